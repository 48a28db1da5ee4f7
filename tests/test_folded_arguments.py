"""Models called with several rows of each sample, as the patches of all images, beside one row per sample."""

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import expanded_nn as enn
from expanded_nn.core import cost
from expanded_nn.layers.general.alone import Alone, FoldedBatch
from expanded_nn.modules.registry import EXPANDED
from oracle import Call, assert_close, assert_close_rows, loop, notes_on, rows_of, set_seed, total_loss
from some import slow
from test_folded import runs_whole, values

B, N, T, D, IMAGE = 3, 2, 5, 4, 9  # each sample has N images in its T words


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", enn.PerSampleWarning)
        yield


class Reader(nn.Module):
    """Puts what a tower makes of images, one vector of each, among the words of the samples."""

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.words, self.tower, self.head = nn.Embedding(10, D), tower, nn.Linear(D, 3)

    def forward(self, ids: Tensor, images: Tensor) -> Any:  # (B, T), (B * N, 8)
        seen = self.tower(images)
        words = self.words(ids).masked_scatter((ids == IMAGE).unsqueeze(-1), seen)
        return self.head(words.sin().cumsum(1))


class ReadsAValue(Reader):
    """So that `vmap` cannot follow it."""

    def forward(self, ids: Tensor, images: Tensor) -> Any:
        return super().forward(ids, images) * (1 + int(ids.max() > IMAGE))


class AlsoReturnsImages(Reader):
    def forward(self, ids: Tensor, images: Tensor) -> Any:
        return {"words": super().forward(ids, images), "images": self.tower(images)}


class PutsThemIn(Reader):
    """By an index, as deeper features are added."""

    def forward(self, ids: Tensor, images: Tensor) -> Any:
        words, places = self.words(ids), ids == IMAGE
        added = words[places, :].clone() + self.tower(images)
        words = words.clone()
        words[places, :] = added
        return self.head(words.sin().cumsum(1))


class Keeps(Reader):
    """Keeps what its next call does not read, as a model does for its decoding."""

    kept: Tensor | None = None
    calls = 0

    def forward(self, ids: Tensor, images: Tensor) -> Any:
        self.kept, self.calls = ids.float().mean(1), self.calls + int(ids[0, 0] >= 0)
        return super().forward(ids, images)


class KeepsResults(Reader):
    def forward(self, ids: Tensor, images: Tensor) -> Any:
        self.kept = super().forward(ids, images)
        return self.kept + 0 * int(ids[0, 0])


class Over(nn.Module):
    """A layer over images of some shape; its results are averaged."""

    def __init__(self, layer: nn.Module, *shape: int) -> None:
        super().__init__()
        self.layer, self.shape = layer, shape

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.view(len(x), *self.shape)).tanh().flatten(2).mean(2)


class WithPositions(nn.Module):
    """Positions are looked up by an index that the forward computes for the rows of all samples."""

    def __init__(self, padding_idx: int | None = None) -> None:
        super().__init__()
        self.layer, self.table = nn.Linear(8, D), nn.Embedding(3, D, padding_idx)
        self.scale = nn.Parameter(torch.ones(3, D))

    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(len(x)) % N
        both = torch.stack([place, place.flip(0)], 1)
        found = (self.table(both) * torch.tensor([0.25, 0.75]).double()[:, None]).sum(1)
        return (self.layer(x) + found) * self.scale[place]


class AtCoordinates(nn.Module):
    """Positions are read off a grid, between its points, at coordinates that each image has of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.grid = nn.Linear(8, D), nn.Parameter(torch.ones(1, D, 3, 4))

    def forward(self, x: Tensor) -> Tensor:
        at = x.detach()[:, :2].tanh().view(1, -1, 1, 2)
        found = F.grid_sample(self.grid, at, mode="bicubic", padding_mode="border", align_corners=False)
        return self.layer(x) + found.squeeze(0).squeeze(-1).permute(1, 0)


class WithToken(nn.Module):
    """A token that all share stands before the pixels of each image."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.layer = nn.Parameter(torch.ones(1, 1, 2)), nn.Linear(2, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.cat([self.token.expand(len(x), -1, -1), x.view(-1, 4, 2)], 1)).tanh().sum(1)


class ByLength(nn.Module):
    """Each image alone, as attention within images does it that have other lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(2, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        pixels = self.layer(x.reshape(-1, 2))
        parts = torch.split(pixels, [4] * len(x))
        mixed = [F.scaled_dot_product_attention(*[part[None, None]] * 3)[0, 0].sum(0) for part in parts]
        return self.out(torch.stack(mixed))


class ByRelativePosition(nn.Module):
    """A bias for each pair of pixels, from the distance and what stands there."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.table = nn.Linear(2, D), nn.Parameter(torch.ones(7, D))

    def forward(self, x: Tensor) -> Tensor:
        pixels = self.layer(x.view(-1, 4, 2))
        distances = torch.arange(4)[:, None] - torch.arange(4) + 3
        return (torch.einsum("btd,tsd->bts", pixels, self.table[distances]).softmax(-1) @ pixels).sum(1)


class WithHeads(nn.Module):
    """Tokens that all share ask what is in each image."""

    def __init__(self, heads: int = 2, mask: str = "", tokens: int = 1, **options: Any) -> None:
        super().__init__()
        self.token, self.layer, self.mask = nn.Parameter(torch.ones(1, tokens, D)), nn.Linear(2, D), mask
        self.heads = nn.MultiheadAttention(D, heads, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        pixels, asks = self.layer(x.view(-1, 4, 2)), self.token.repeat(len(x), 1, 1)
        if "padding" in self.mask:
            return self.heads(asks, pixels, pixels, x[:, ::2] > 1, need_weights="weights" in self.mask)[0].tanh().sum(1)
        if "each" in self.mask:
            mask = x.detach()[:, None, ::2].repeat_interleave(self.heads.num_heads, 0).tanh()
            return self.heads(asks, pixels, pixels.sin(), attn_mask=mask)[0].tanh().sum(1)
        if "causal" in self.mask:
            mask = nn.Transformer.generate_square_subsequent_mask(4).double()
            pixels = pixels + asks
            attended, weights = self.heads(pixels, pixels, pixels, attn_mask=mask, is_causal=True)
            return attended.tanh().sum(1) + weights.sin().sum(1)
        return self.heads(asks, pixels, pixels)[0].tanh().sum(1)


class InOneRow(nn.Module):
    """The pixels of all images stand in one row `(1, n, D)`, and a mask keeps them apart."""

    def __init__(self, others: float | None = float("-inf"), of_first: float | None = None) -> None:
        super().__init__()
        self.layer, self.norm, self.last = nn.Linear(2, D), nn.LayerNorm(D), nn.Linear(D, D, bias=False)
        self.scale, self.others, self.of_first = nn.Parameter(torch.ones(D)), others, of_first

    def forward(self, x: Tensor) -> Tensor:
        pixels = self.scale * self.norm(self.layer(x.view(1, -1, 2)))
        image = torch.arange(len(x)).repeat_interleave(4)
        mask = image[:, None] == image
        if self.others is not None:
            mask = torch.where(mask, 0.0, self.others).double()
            mask[0] = mask[0] if self.of_first is None else self.of_first
        heads = pixels.view(1, -1, 2, D // 2).transpose(1, 2)
        attended = F.scaled_dot_product_attention(heads, heads.sin(), heads, attn_mask=mask)
        return self.last(pixels + attended.transpose(1, 2).flatten(2)).view(len(x), 4, D).mean(1)


class Writes(nn.Module):
    """Its result is written part by part."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last, self.turns = nn.Linear(8, D), nn.Linear(D, D), False

    def forward(self, x: Tensor) -> Tensor:
        out, rows = x.new_zeros(len(x), 2, D), self.layer(x)
        out[:, 0] = rows.flip(0) if self.turns else rows
        for i in range(D):
            out[:, 1, i] = out[:, 0, i].clone().tanh() + out[:, 1].clone().sum(1)
        return self.last(out).mean(1)


LEAST = torch.finfo(torch.float64).min
TOWERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(8, D),
    "patches, 1d": lambda: Over(nn.Conv1d(2, D, 4), 2, 4),
    "patches, 2d": lambda: Over(nn.Conv2d(2, D, 2, stride=2, bias=False), 2, 2, 2),
    "patches, 3d": lambda: Over(nn.Conv3d(1, D, 2, stride=(2, 2, 2)), 1, 2, 2, 2),
    "convolution, 1d": lambda: Over(nn.Conv1d(2, D, 3, padding="same"), 2, 4),
    "convolution, 2d": lambda: Over(nn.Conv2d(2, D, (1, 2), padding=1, dilation=(1, 2), groups=2), 2, 2, 2),
    "convolution, wide": lambda: Over(nn.Conv2d(8, D, 3, padding=1), 8, 1, 1),
    "padded patches": lambda: Over(nn.Conv2d(2, D, 2, padding=1, stride=2), 2, 2, 2),
    "transposed, 1d": lambda: Over(nn.ConvTranspose1d(2, D, 2, stride=2, output_padding=1), 2, 4),
    "transposed, 2d": lambda: Over(nn.ConvTranspose2d(2, D, 2, bias=False), 2, 2, 2),
    "transposed, wide": lambda: Over(nn.ConvTranspose2d(8, D, 3, padding=1), 8, 1, 1),
    "batch norm": lambda: Over(nn.Sequential(nn.Conv1d(2, D, 1), nn.BatchNorm1d(D)), 2, 4),
    "group norm": lambda: Over(nn.Sequential(nn.Conv1d(2, D, 1), nn.GroupNorm(2, D)), 2, 4),
    "instance norm": lambda: Over(nn.Sequential(nn.Conv1d(2, D, 1), nn.InstanceNorm1d(D, affine=True)), 2, 4),
    "layer norm": lambda: nn.Sequential(nn.Linear(8, D), nn.LayerNorm(D)),
    "positions": WithPositions,
    "positions, one of them constant": lambda: WithPositions(padding_idx=-1),
    "positions between those of a grid": AtCoordinates,
    "token": WithToken,
    "heads": WithHeads,
    "heads, biases": lambda: WithHeads(tokens=4, add_bias_kv=True, add_zero_attn=True, bias=False),
    "heads, separate weights": lambda: WithHeads(mask="each", kdim=D, vdim=D, bias=True),
    "heads, padding": lambda: WithHeads(mask="padding"),
    "heads, padding, weights": lambda: WithHeads(4, mask="padding, weights"),
    "heads, causal": lambda: WithHeads(mask="causal"),
    "parts": ByLength,
    "relative positions": ByRelativePosition,
    "in one row": InOneRow,
    "in one row, by truth values": lambda: InOneRow(None),
    "in one row, by the least number": lambda: InOneRow(LEAST),
    "writes": Writes,
}


def built(tower: nn.Module, kind: type[nn.Module] = Reader) -> nn.Module:
    model = kind(tower).double().eval()
    for number, parameter in enumerate(model.parameters()):
        parameter.data.copy_(0.7 * values(*parameter.shape, seed=number + 3))
    return model


def call(samples: int = B, images: int = N, seed: int = 0) -> Call:
    """The images of a sample stand one after the other, in other places of each sample's words."""
    ids = torch.randint(0, 8, (samples, T), generator=torch.Generator().manual_seed(seed))
    for i in range(samples):
        ids[i, [(i + k) % T for k in range(images)]] = IMAGE
    return Call((ids, values(samples * images, 8, seed=seed)))


def sample(call: Call, i: int) -> Call:
    ids, images = call.args
    times = len(images) // len(ids)
    return Call((ids[i : i + 1], images[i * times : (i + 1) * times]))


def assert_right(module: nn.Module, *calls: Call, objective: Any = total_loss) -> nn.Module:
    model = enn.convert(module).per_sample(loss_reduction="sum")
    for each in calls:
        model.zero_grad()
        objective(model, each).backward()
        expected = loop(module, each, len(each.args[0]), take=sample, objective=objective)
        assert_close_rows({name: parameter.grad_sample for name, parameter in model.named_parameters()}, expected)
        for name, parameter in model.named_parameters():
            assert_close(parameter.grad, expected[name].sum(0), name=name)
    return model


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, Reader) for name in TOWERS),
        *((name, ReadsAValue) for name in [*TOWERS][::6]),
        *(slow((name, ReadsAValue)) for n, name in enumerate(TOWERS) if n % 6),
    ],
)
def test_towers(name: str, kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        model = assert_right(built(TOWERS[name](), kind), call(), call(seed=1), call(seed=2))
        assert runs_whole(model)
        monkeypatch.setattr(cost, "DERIVED_NUMEL", 0)  # what is computed from parameters alone is computed once


@pytest.mark.parametrize("kind", [AlsoReturnsImages, PutsThemIn, Keeps, KeepsResults])
def test_models(kind: type[nn.Module]) -> None:
    def objective(model: Any, call: Call, first: int = 0) -> Tensor:
        def words(ids: Tensor, images: Tensor) -> Tensor:
            result = model(ids, images)
            return result["words"] if isinstance(result, dict) else result

        return total_loss(words, call, first)

    assert runs_whole(assert_right(built(nn.Linear(8, D), kind), call(), call(seed=1), objective=objective))


def test_folded_results_are_those_of_the_plain_model() -> None:
    module = built(nn.Linear(8, D), AlsoReturnsImages)
    model = enn.convert(module).per_sample()
    for seed in range(3):
        expected, result = call(seed=seed).on(module), call(seed=seed).on(model)
        assert_close(result["images"], expected["images"].detach())
        assert_close(result["words"], expected["words"].detach())


@pytest.mark.parametrize("escapes", [False, True])
def test_what_a_forward_keeps_is_what_the_plain_one_keeps(escapes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if escapes:  # from the whole batch, to a loop over the samples
        monkeypatch.setattr(FoldedBatch, "suits", lambda whole: False)
    module = built(nn.Linear(8, D), Keeps)
    model = assert_right(module, call(), call(seed=1))
    assert module.calls == 0  # those of copies count
    assert model.calls == 2
    assert torch.equal(model.kept, call(seed=1).args[0].float().mean(1))


def test_other_numbers_of_images_and_samples() -> None:
    model = built(nn.Linear(8, D))
    assert_right(model, call(), call(images=1), call(images=3), call(samples=4), call(samples=1), call(samples=2))


@pytest.mark.parametrize("counts", [(1, 2, 1), (1, 3, 2)], ids=["other_rows", "as_many_as_equal_ones"])
def test_unequal_numbers_of_images_are_refused_and_right_alone(counts: tuple[int, ...]) -> None:
    module, images = built(nn.Linear(8, D)), values(sum(counts), 8)
    ids = torch.ones(B, T, dtype=torch.int64)
    for i, count in enumerate(counts):
        ids[i, :count] = IMAGE
    with pytest.raises(enn.PerSampleError) as refusal:
        enn.convert(module).per_sample()(ids, images)
    assert "call the model with each alone, and backward() after each" in notes_on(refusal.value)[-1]
    model, calls = enn.convert(module).per_sample(), list(zip(ids.split(1), images.split(counts), strict=True))
    for of_sample in calls:
        total_loss(model, Call(of_sample)).backward()
    expected = [loop(module, Call(of_sample), 1, take=lambda whole, i: whole) for of_sample in calls]
    assert_close_rows(rows_of(model), {name: torch.cat([rows[name] for rows in expected]) for name in expected[0]})


HEADS = [name for name in TOWERS if name.startswith("heads")]


@pytest.mark.parametrize("name", HEADS)
def test_heads_of_other_sizes(name: str) -> None:
    """As many samples as heads, as images or as positions; and frozen in part."""
    for samples, images in ((2, 2), (4, 2), (2, 1), (1, 2), (4, 1)):
        calls = [call(samples, images, seed) for seed in range(3)]
        assert runs_whole(assert_right(built(TOWERS[name]()), *calls)) or samples == 1 or images == 1
    module = built(TOWERS[name]())
    for frozen in list(module.tower.parameters())[::2]:
        frozen.requires_grad_(False)
    model = enn.convert(module).per_sample(loss_reduction="sum")
    for seed in range(3):
        model.zero_grad()
        total_loss(model, call(seed=seed)).backward()
        expected = loop(module, call(seed=seed), B, take=sample)
        assert_close_rows({n: p.grad_sample for n, p in model.named_parameters() if p.requires_grad}, expected)
    assert runs_whole(model)


def test_heads_that_drop_weights() -> None:
    model = enn.convert(built(WithHeads(dropout=0.5)).train()).per_sample(loss_reduction="sum")
    total_loss(model, call()).backward()
    assert runs_whole(model)


def test_second_derivatives() -> None:
    def objective(model: Any, call: Call, first: int = 0) -> Tensor:
        ids, images = call.args
        call = Call((ids, images.detach().requires_grad_()))
        loss = total_loss(model, call, first)
        (by_image,) = torch.autograd.grad(loss, call.args[1], create_graph=True)
        return loss + by_image.square().sum()

    heads = [name for name in HEADS if name != "heads, padding"]  # of torch's fused attention there are none
    for name in ("linear", "convolution, 2d", "convolution, wide", "transposed, 1d", "positions", "token", *heads):
        assert_right(built(TOWERS[name]()), call(), call(seed=1), objective=objective)


def test_images_of_other_samples_are_refused() -> None:
    """There are as many as there would be of equally many of each."""
    ids, images = call().args
    ids[0, 3], ids[1] = IMAGE, torch.where(ids[1] == IMAGE, 0, ids[1])
    ids[1, 0] = IMAGE
    model = enn.convert(built(nn.Linear(8, D))).per_sample()
    with pytest.raises(enn.PerSampleError, match="folded batch of 3 x 2"):
        model(ids, images)
    model = enn.convert(built(nn.Linear(8, D))).per_sample()
    call().on(model)
    with pytest.raises(enn.PerSampleError, match=r"shape \(6, 8\), several rows of each sample, and on an even part"):
        model(ids, images)


class Merges(Reader):
    """It ends with the images in their places, and the layer behind it is another module's."""

    def forward(self, ids: Tensor, images: Tensor) -> Any:
        return self.words(ids).masked_scatter((ids == IMAGE).unsqueeze(-1), self.tower(images))


class ReadsMerged(nn.Module):
    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.merges, self.head = Merges(tower), nn.Linear(D, 3)
        self.merges.head = nn.Identity()

    def forward(self, ids: Tensor, images: Tensor) -> Any:
        return self.head(self.merges(ids, images).sin().cumsum(1))


def test_images_in_texts_of_others_are_refused_where_no_layer_follows() -> None:
    model = assert_right(built(nn.Linear(8, D), ReadsMerged), call(), call(seed=1), call(seed=2))
    assert runs_whole(model)
    assert isinstance(model.merges, Alone)
    ids, images = call().args
    ids[0, 3], ids[1] = IMAGE, torch.where(ids[1] == IMAGE, 0, ids[1])
    ids[1, 0] = IMAGE
    with pytest.raises(enn.PerSampleError, match=r"shape \(6, 8\), several rows of each sample"):
        model(ids, images)


@pytest.mark.parametrize(("others", "of_first"), [(-5.0, None), (LEAST, LEAST), (LEAST, 0.0)])
def test_images_in_one_row_that_see_each_other_are_refused(others: float, of_first: float | None) -> None:
    """From the first call on, or from a later one on: each mask is looked at."""
    model = enn.convert(built(InOneRow(others, of_first))).per_sample()
    with pytest.raises(enn.PerSampleError, match="sample by sample"):
        call().on(model)
    model = assert_right(built(InOneRow(LEAST)), call(), call(seed=1))
    assert runs_whole(model)
    model.tower.others, model.tower.of_first = others, of_first
    with pytest.raises(enn.PerSampleError, match="sample by sample"):
        call().on(model)


def test_writes_of_other_samples_are_refused_once_they_come() -> None:
    model = assert_right(built(Writes()), call(), call(seed=1))
    assert runs_whole(model)
    model.tower.turns = True
    with pytest.raises(enn.PerSampleError, match="sample by sample"):
        call().on(model)


def test_images_that_are_left_out() -> None:
    """Torch takes the first numbers; so a sample gets images that would be another one's."""
    ids, images = call().args
    ids[1] = torch.where(ids[1].eq(IMAGE).cumsum(0) == 1, 0, ids[1])
    model = enn.convert(built(nn.Linear(8, D))).per_sample()
    call().on(model)
    with pytest.raises(enn.PerSampleError, match="on the whole batch its forward gives another result"):
        model(ids, images)


def test_a_compiled_step_runs_eagerly() -> None:
    """As values say whose the images are."""
    module = built(nn.Linear(8, D))
    model = enn.convert(module).per_sample(loss_reduction="sum")

    def objective(model: Any, call: Call, first: int = 0) -> Tensor:
        return call.on(model).sin().square().sum()  # type: ignore[no-any-return]

    step = enn.compile(lambda *inputs: objective(model, Call(inputs)).backward(), backend="eager")

    def train(seed: int) -> None:
        model.zero_grad()
        step(*call(seed=seed).args)
        expected = loop(module, call(seed=seed), B, take=sample, objective=objective)
        assert_close_rows(rows_of(model), expected)

    train(0)
    with pytest.warns(enn.PerSampleWarning, match="what Reader does with the whole batch depends on values"):
        train(1)
    train(2)


@pytest.mark.parametrize("compiled", [False, True])
def test_one_image_of_each_is_not_two_of_one(compiled: bool) -> None:
    """The rows are as many as the samples, and only the places that they are put into tell whose they are."""
    ids, images = call(images=1).args
    other = ids.clone()
    other[0, 1], other[1] = IMAGE, torch.where(ids[1] == IMAGE, 0, ids[1])
    model = enn.convert(built(nn.Linear(8, D))).per_sample()

    def step(ids: Tensor, images: Tensor) -> None:
        total_loss(model, Call((ids, images))).backward()

    run = enn.compile(step, backend="eager") if compiled else step
    for _ in range(2):
        model.zero_grad()
        run(ids, images)
    error = RuntimeError if compiled else enn.PerSampleError
    with pytest.raises(error, match=r"take.* each other's places"):
        run(other, images)


def test_results_that_are_all_folded_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images are independent of each other, so that nothing tells whose they are."""
    monkeypatch.setitem(EXPANDED, Over, None)  # to be taken away again
    enn.alone(Over)
    model = enn.convert(built(Over(nn.Conv1d(2, D, 4), 2, 4))).per_sample(escalate=False)
    with pytest.raises(enn.PerSampleError, match="wanted a result with one row per sample"):
        call().on(model)


def test_a_table_of_many_rows_is_shared() -> None:
    """It has B * N rows, too; with it alone each sample gives its own result."""

    class Shared(Reader):
        def forward(self, ids: Tensor, images: Tensor) -> Any:
            rows = self.tower(self.words(ids).reshape(-1, D))  # folded, so that it goes sample by sample
            return rows.view(len(ids), T, D) * images[:, :D].sum(0)

    model = enn.convert(built(nn.Linear(D, D), Shared)).per_sample(loss_reduction="sum")
    module = built(nn.Linear(D, D), Shared)
    ids, images = call().args
    total_loss(model, Call((ids, images))).backward()
    alone = partial(loop, module, Call((ids, images)), B, take=lambda each, i: Call((ids[i : i + 1], images)))
    expected = alone()
    used = ["words.weight", "tower.weight", "tower.bias"]
    assert_close_rows({n: model.get_parameter(n).grad_sample for n in used}, {n: expected[n] for n in used})


def test_clipping() -> None:
    model = enn.convert(built(nn.Linear(8, D))).per_sample(loss_reduction="sum")
    total_loss(model, call()).backward()
    expected = loop(built(nn.Linear(8, D)), call(), B, take=sample)
    norms = enn.clip_grad_sample_norms_(model, 0.5)
    of_samples = torch.stack([rows.flatten(1).square().sum(1) for rows in expected.values()]).sum(0).sqrt()
    assert_close(norms, of_samples)


TEXT = {
    "vocab_size": 20,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 12,
    "head_dim": 4,
}
SEES = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12}


def llava(hf: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    """Two images of 8 by 8 pixels in each text, of four patches."""
    sees = hf.CLIPVisionConfig(**SEES, image_size=8, patch_size=4, projection_dim=8)
    config = hf.LlavaConfig(vision_config=sees, text_config=hf.LlamaConfig(**TEXT), image_token_id=19)
    ids = torch.randint(0, 18, (B, 12), generator=torch.Generator().manual_seed(0))
    ids[:, 2:10] = 19
    inputs = {"input_ids": ids, "pixel_values": values(2 * B, 3, 8, 8), "attention_mask": torch.ones_like(ids)}
    return hf.LlavaForConditionalGeneration(config), inputs


def qwen(hf: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    """One image in each text, of 4 by 8 patches, which become 8 words."""
    sees = {"depth": 1, "embed_dim": 8, "hidden_size": 8, "num_heads": 1, "mlp_ratio": 2, "patch_size": 2}
    rope = {"rope_type": "default", "mrope_section": [1, 1, 0], "rope_theta": 1e4}
    words = {"image_token_id": 19, "vision_start_token_id": 18, "video_token_id": 17, "vision_end_token_id": 16}
    config = hf.Qwen2VLConfig(vision_config=sees, text_config={**TEXT, "rope_parameters": rope}, **words)
    ids = torch.randint(0, 15, (B, 12), generator=torch.Generator().manual_seed(0))
    ids[:, 2:10], ids[:, 1] = 19, 18
    patches = values(32 * B, 3 * 2 * 2 * 2)
    grid = torch.tensor([[1, 4, 8]] * B)
    inputs = {"input_ids": ids, "pixel_values": patches, "image_grid_thw": grid, "mm_token_type_ids": (ids == 19).int()}
    return hf.Qwen2VLForConditionalGeneration(config), inputs


@pytest.mark.parametrize("build", [llava, qwen])
def test_models_of_images_and_texts(build: Any) -> None:
    hf = pytest.importorskip("transformers")
    set_seed(0)
    module, inputs = build(hf)

    def objective(model: Any, call: Call, first: int = 0) -> Tensor:
        return total_loss(lambda **inputs: model(**inputs).logits, call, first)

    def take(call: Call, i: int) -> Call:
        return call.map(lambda x: x[i * len(x) // B : (i + 1) * len(x) // B])

    module.double().eval()
    model = enn.convert(module).per_sample(loss_reduction="sum")
    for _ in range(2):
        model.zero_grad()
        objective(model, Call((), inputs)).backward()
    expected = loop(module, Call((), inputs), B, take=take, objective=objective)
    used = {name: parameter.grad_sample for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert not any(rows.any() for name, rows in expected.items() if name not in used)
    assert_close_rows(used, {name: expected[name] for name in used})
    assert runs_whole(model)
