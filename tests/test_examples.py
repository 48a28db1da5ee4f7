"""The examples run, and write their pictures; each is short, and none is left out."""

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

import expanded_nn as enn
from some import slow

pytestmark = pytest.mark.small_rows

EXAMPLES = Path(__file__).parent.parent / "examples"
QUICK = {  # arguments of a run of a few seconds; at full size each takes less than a minute
    "influence": ["--steps", "10", "--passages", "32"],
    "llm_rows": ["--steps", "2", "--passages", "16"],
    "maml": ["--steps", "20"],
    "mislabelled": ["--epochs", "1"],
    "noise_scale": ["--epochs", "4"],
    "ntk_fisher": ["--steps", "10"],
    "pinn": ["--steps", "10"],
    "quickstart": ["--epochs", "1"],
    "trak": ["--halves", "3"],
}
SLOW = ["distributed_dp", "dp_sgd"]  # more than a few seconds at any size
NEEDS = {"distributed_dp": "opacus", "dp_sgd": "opacus", "llm_rows": "transformers"}
FILES = sorted(path for path in EXAMPLES.glob("*.py") if not path.name.startswith("_"))


def run(name: str, arguments: list[str]) -> str:
    """Runs an example in a process of its own, where every warning is an error; what it printed."""
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    command = [sys.executable, "-W", "error", str(EXAMPLES / f"{name}.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def assert_drawn(printed: str, picture: Path) -> None:
    assert str(picture) in printed.replace("\n", "")
    assert picture.stat().st_size > 10_000


@pytest.mark.parametrize("name", QUICK)
def test_example(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, as most of the time of another one would be its imports."""
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    picture = tmp_path / "pictures" / "picture.png"
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *QUICK[name], "--seed", "1", "--out", str(picture)])
    torch.set_default_dtype(torch.float32)
    loaded(name).main()
    assert_drawn(capsys.readouterr().out, picture)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*QUICK, *SLOW])
def test_example_at_full_size(name: str, tmp_path: Path) -> None:
    picture = tmp_path / "pictures" / "picture.png"
    assert_drawn(run(name, ["--seed", "1", "--out", str(picture)]), picture)


def test_an_example_in_a_process_of_its_own(tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    assert_drawn(run("quickstart", [*QUICK["quickstart"], "--out", str(picture)]), picture)


def test_every_example_is_run() -> None:
    assert {path.stem for path in FILES} == {*QUICK, *SLOW}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_example_is_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) < 100


def test_pictures_are_small() -> None:
    pictures = list((EXAMPLES.parent / "docs" / "images").glob("*.png"))
    assert {path.stem: path.stat().st_size for path in pictures if path.stat().st_size >= 150_000} == {}


# --- what the examples do at each step, as a graph -----------------------------------------------------------------

Parts = tuple[torch.nn.Module, Callable[..., Any], Callable[[], tuple[Tensor, ...]]]  # model, step, a batch


def private() -> Parts:
    example = loaded("dp_sgd")
    model = enn.convert(example.small_cnn()).per_sample(accumulate_grad=False)

    def step(images: Tensor, labels: Tensor, bound: Tensor) -> Tensor:
        F.cross_entropy(model(images), labels).backward()
        return enn.clip_grad_sample_norms_(model, lambda norms: 1 / torch.maximum(norms, bound))

    return model, step, lambda: (*digits(), torch.rand(()))


def digits() -> tuple[Tensor, Tensor]:
    return torch.randn(9, 1, 8, 8), torch.randint(10, (9,))


def noise() -> Parts:
    example = loaded("noise_scale")
    model = enn.convert(example.small_cnn()).per_sample()

    def step(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        loss, grads = example.rows(model, images, labels)
        return loss, example.moments(grads)

    return model, step, digits


def wrong_labels() -> Parts:
    model = enn.convert(loaded("quickstart").small_cnn()).per_sample()

    def step(images: Tensor, labels: Tensor) -> list[Tensor]:
        F.cross_entropy(model(images), labels).backward()
        return [parameter.grad_sample.flatten(1).norm(dim=1) for parameter in model.parameters()]

    return model, step, digits


def influences() -> Parts:
    example = loaded("mislabelled")
    model = enn.convert(torch.nn.Sequential(torch.nn.Linear(64, 8), torch.nn.ReLU(), torch.nn.Linear(8, 10)))
    _, clean = example.losses_and_grads(model.per_sample(), torch.randn(3, 64), torch.arange(3))

    def step(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        losses, grads = example.losses_and_grads(model, images.flatten(1), labels)
        return losses, grads.gram(clean)

    return model, step, digits


def balanced() -> Parts:
    example = loaded("pinn")
    torch.manual_seed(3)
    model, _ = example.train(1.0, False, 1)
    model.per_sample(True).zero_grad()

    def step(inside: Tensor, edge: Tensor) -> Tensor:
        (example.residual(model, inside).mean() + (model(edge) ** 2).mean()).backward()
        return enn.per_sample_grads(model).norms()

    return model, step, lambda: (torch.rand(11, 2), example.boundary()[:7])


def margins() -> Parts:
    example = loaded("trak")
    model = example.fit(torch.randn(5, 64), torch.arange(5)).per_sample(True, accumulate_grad=False)
    projection = enn.Projection(8)

    def step(images: Tensor, labels: Tensor) -> Tensor:
        example.margins(model, images.flatten(1), labels).mean().backward()
        return projection(enn.per_sample_grads(model))

    return model, step, digits


def language() -> Parts:
    example = loaded("influence")
    model = enn.convert(example.GPT()).per_sample(True, accumulate_grad=False, keep_factors=True)
    return model, lambda texts: example.matrices(model, texts).gram(), lambda: (torch.randint(256, (3, 17)),)


def passages() -> Parts:
    pytest.importorskip("transformers")
    example = loaded("llm_rows")
    model = example.train(torch.randint(256, (4, 20)), 1).per_sample(True, accumulate_grad=False)

    def step(texts: Tensor) -> dict[str, Tensor]:
        example.losses(model, texts).mean().backward()
        return enn.per_sample_grads(model).norms(per_parameter=True)

    return model, step, lambda: (torch.randint(256, (3, 17)),)


def meta_learning() -> Parts:
    example = loaded("maml")
    model = enn.convert(torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)))

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = example.error(example.after_a_step(model, x, y), y)
        loss.backward()
        return loss.detach()

    return model, step, lambda: example.waves(5)


@pytest.mark.parametrize(
    "make",
    [
        *(private, noise, wrong_labels, influences, passages),
        *map(slow, (balanced, margins, language, meta_learning)),
    ],
)
def test_steps_as_a_graph(make: Callable[[], Parts]) -> None:
    """What `enn.compile` makes of them returns and leaves what they do."""
    torch.manual_seed(1)
    model, step, batch = make()
    compiled = enn.compile(step, backend="eager")
    for _ in range(3):
        arguments = batch()
        model.zero_grad()
        expected = step(*arguments), [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        found = compiled(*arguments), [parameter.grad for parameter in model.parameters()]
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    assert sum(len(family.graphs) for family in compiled._graphs.families.values()) == 1
    assert not any(family.is_eager for family in compiled._graphs.families.values())


# --- what two examples compute, against plain torch -------------------------------------------------------------


def test_maml_agrees_with_a_loop_over_the_tasks() -> None:
    """The gradient of the loss after the step, by the start."""
    maml = loaded("maml")
    model, _ = maml.train(steps=1, meta=True)
    plain = enn.revert(model)
    x, y = maml.waves(5)
    start = dict(plain.named_parameters())
    predicted = []
    for x_i, y_i in zip(x, y, strict=True):
        loss = F.mse_loss(plain(x_i[: maml.SHOTS]), y_i[: maml.SHOTS])
        grads = torch.autograd.grad(loss, list(start.values()), create_graph=True)
        own = {name: weight - 0.02 * grad for (name, weight), grad in zip(start.items(), grads, strict=True)}
        predicted.append(functional_call(plain, own, x_i))
    expected = torch.autograd.grad(maml.error(torch.stack(predicted), y), list(start.values()))
    actual = torch.autograd.grad(maml.error(maml.after_a_step(model, x, y), y), list(model.parameters()))
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_moments_are_those_of_the_samples_alone() -> None:
    """tr(Σ) and |G|² of the noise scale, from gradients taken one sample at a time."""
    example = loaded("noise_scale")
    model = enn.convert(example.small_cnn()).per_sample(True)
    images, labels = torch.randn(7, 1, 8, 8), torch.arange(7)
    plain = enn.revert(model)
    rows = []
    for image, label in zip(images, labels, strict=True):
        grads = torch.autograd.grad(F.cross_entropy(plain(image[None]), label[None]), list(plain.parameters()))
        rows.append(torch.cat([grad.flatten() for grad in grads]))
    spread = torch.stack(rows).var(0).sum()
    square = torch.stack(rows).mean(0).square().sum() - spread / 7
    loss, grads = example.rows(model, images, labels)
    torch.testing.assert_close(loss, F.cross_entropy(plain(images), labels))
    torch.testing.assert_close(example.moments(grads), torch.stack([spread, square]), rtol=1e-9, atol=0)
