"""A step of GPT-2 at its real size, 124 million parameters: what clipping costs, in time and memory.

The model is transformers' own, made from its configuration with random weights. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import warnings
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from transformers import GPT2Config, GPT2LMHeadModel

import expanded_nn as enn
from benchmarks.__main__ import machine
from benchmarks.measure import resident, timed
from benchmarks.peers import MAX_NORM, clip_factors

BATCH, STEPS = 4, 256
CPU = torch.device("cpu")
Step = Callable[[Tensor], object]


def loss_of(model: nn.Module, words: Tensor) -> Tensor:
    return model(input_ids=words, labels=words, use_cache=False).loss


def plain(model: nn.Module) -> Step:
    def step(words: Tensor) -> None:
        model.zero_grad()
        loss_of(model, words).backward()

    return step


def clipped(model: nn.Module, *, compiled: bool = False) -> Step:
    converted = enn.convert(model, inplace=True).per_sample(accumulate_grad=False)

    def body(words: Tensor) -> Tensor:
        loss_of(converted, words).backward()
        return enn.clip_grad_sample_norms_(converted, MAX_NORM)

    called = enn.compile(body) if compiled else body

    def step(words: Tensor) -> Tensor:
        converted.zero_grad()
        return called(words)

    return step


def norms(model: nn.Module) -> Step:
    converted = enn.convert(model, inplace=True).per_sample(accumulate_grad=False)

    def step(words: Tensor) -> Tensor:
        converted.zero_grad()
        loss_of(converted, words).backward()
        return enn.per_sample_grads(converted).norms()

    return step


def functional(model: nn.Module) -> Step:
    """`torch.func`: the rows of all samples, their norms, and the sum of the clipped ones."""
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(values: dict[str, Tensor], words: Tensor) -> Tensor:
        return functional_call(model, values, (), {"input_ids": words, "labels": words, "use_cache": False}).loss

    def step(words: Tensor) -> Tensor:
        rows = vmap(grad(loss), in_dims=(None, 0))(parameters, words[:, None])
        found = torch.stack([each.flatten(1).norm(dim=1) for each in rows.values()]).norm(dim=0)
        factors = clip_factors(found)
        for each in rows.values():
            torch.einsum("b,b...->...", factors, each)
        return found

    return step


METHODS: dict[str, Callable[[nn.Module], Step]] = {
    "plain": plain,
    "clip": clipped,
    "clip, compiled": partial(clipped, compiled=True),
    "norms alone": norms,
    "clip by torch.func": functional,
}


def task() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    config = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return GPT2LMHeadModel(config), torch.randint(config.vocab_size, (BATCH, STEPS))


def verify(step: Step, model: nn.Module, words: Tensor) -> None:
    """Compares the norms with those of each sample alone."""
    found = step(words)
    if not isinstance(found, Tensor):
        return
    for i, norm in enumerate(found):
        grads = torch.autograd.grad(loss_of(model, words[i : i + 1]), list(model.parameters()))
        torch.testing.assert_close(norm, torch.stack([each.norm() for each in grads]).norm(), rtol=1e-3, atol=0.0)


def peak(name: str) -> int:
    """Bytes that steps need at most beyond the model; call it in a process of its own."""
    model, words = task()
    before = resident("VmRSS")
    step = METHODS[name](model)
    for _ in range(3):
        step(words)
    return resident("VmHWM") - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=7, help="turns of each method")
    parser.add_argument("--peak", choices=METHODS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    warnings.simplefilter("ignore")
    if arguments.peak:
        print(peak(arguments.peak))
        return
    model, words = task()
    steps = {name: method(deepcopy(model)) for name, method in METHODS.items()}
    for step in steps.values():
        verify(step, model, words)
        step(words)
    times: dict[str, list[float]] = {name: [] for name in steps}
    order = random.Random(0)
    for _ in range(arguments.rounds):
        for name in order.sample(list(steps), len(steps)):
            times[name].append(timed(partial(steps[name], words), CPU))
    told = machine(CPU)
    print(f"GPT-2 small of transformers (124 million parameters), {BATCH} texts of {STEPS} words, float32, on")
    print(f"{told['cpu']}, {arguments.threads} of {told['cores']} cores, torch {told['versions']['torch']}.\n")
    print("| | seconds | ratio to the plain step | peak memory, GB | ratio |\n|---|---|---|---|---|")
    memory: dict[str, int] = {}
    for name in METHODS:
        command = [sys.executable, "-m", "benchmarks.gpt2", "--peak", name, "--threads", str(arguments.threads)]
        memory[name] = int(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
        ratio = median(a / b for a, b in zip(times[name], times["plain"], strict=True))
        figures = f"{median(times[name]):.2f} | {ratio:.2f} | {memory[name] / 1e9:.2f}"
        print(f"| {name} | {figures} | {memory[name] / memory['plain']:.2f} |", flush=True)


if __name__ == "__main__":
    main()
