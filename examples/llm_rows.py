"""Which passages pull hardest at a language model? Per-sample gradients of a GPT-2 that nobody edited.

A small GPT-2 of the `transformers` package reads Python's standard library, byte by byte. Once it is converted, with
its tied head, each passage's gradient has a norm, over all weights or layer by layer; no row is built for it.
"""

import argparse
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from rich.progress import track
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import expanded_nn as enn

LENGTH = 128  # bytes in a passage
MODULES = ("argparse", "_pydecimal", "difflib", "html.entities", "pydoc", "statistics", "tarfile", "textwrap", "turtle")
LAYERS = ("wte", "wpe", "h.0", "h.1", "h.2", "h.3", "ln_f")  # wte is the embedding and the head


def passages() -> Tensor:  # (N, LENGTH)
    sources = "\n".join(find_spec(name).loader.get_source(name) for name in MODULES)
    return torch.tensor(list(sources.encode())).unfold(0, LENGTH, LENGTH)


def losses(model: GPT2LMHeadModel, texts: Tensor) -> Tensor:
    """The mean loss of each passage over its bytes, `(B,)`."""
    logits = model(texts[:, :-1]).logits  # (B, T, 256)
    return F.cross_entropy(logits.transpose(1, 2), texts[:, 1:], reduction="none").mean(1)


def train(texts: Tensor, steps: int) -> GPT2LMHeadModel:
    sizes = {"vocab_size": 256, "n_positions": LENGTH, "n_embd": 128, "n_layer": 4, "n_head": 4}
    model = enn.convert(GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in track(range(steps), description="training"):
        optimizer.zero_grad()
        losses(model, texts[torch.randint(len(texts), (4,))]).mean().backward()
        optimizer.step()
    return model.eval()


def measure(model: GPT2LMHeadModel, texts: Tensor) -> Tensor:
    """Each passage's loss, and the norm of its gradient in each layer, `(N, 1 + 7)`."""
    model.per_sample(True, accumulate_grad=False)  # rows of the last backward alone, no .grad
    result = []
    for batch in track(texts.split(16), description="measuring"):
        loss = losses(model, batch)
        loss.mean().backward()
        norms = enn.per_sample_grads(model).norms(per_parameter=True)
        layers = [[norm for name, norm in norms.items() if f".{layer}." in name] for layer in LAYERS]
        result.append(torch.stack([loss.detach(), *(torch.stack(layer).norm(dim=0) for layer in layers)], 1))
    return torch.cat(result)


def draw(loss: Tensor, norms: Tensor, marked: dict[str, int], path: Path) -> None:
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(loss, norms.norm(dim=1), ".", color="gray", alpha=0.5)
    right.plot(norms.median(0).values, LAYERS, "o-", color="gray", label="the median passage")
    for label, i in marked.items():
        left.plot(loss[i], norms[i].norm(), "o")
        right.plot(norms[i], LAYERS, "o-", label=label)
    left.set(xlabel="loss of a passage", ylabel="norm of its gradient", ylim=0)
    right.set(xlabel="norm of its gradient in a layer", xscale="log")
    right.legend(loc="lower left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/images/llm_rows.png"), help="the picture")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--passages", type=int, default=320)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    texts = passages()
    model = train(texts, args.steps)
    print(enn.check(model, texts[:4]))
    texts = texts[torch.randperm(len(texts))[: args.passages]]
    loss, norms = measure(model, texts).tensor_split([1], dim=1)
    loss, total = loss[:, 0], norms.norm(dim=1)
    print(f"The median of {len(texts)} passages: loss {loss.median():.1f}, norm {total.median():.1f}")
    marked = {"largest loss": int(loss.argmax()), "largest norm": int(total.argmax())}
    for label, i in marked.items():
        print(f"The {label}: loss {loss[i]:.1f}, norm {total[i]:.1f}, {bytes(texts[i].tolist())!r}")
    draw(loss, norms, marked, args.out)
    print(f"Loss against norm, and the norm layer by layer: {args.out}")


if __name__ == "__main__":
    main()
