"""Section 4 of the contract: where peers return wrong rows without a word. Right here, or a clear error."""

import warnings
from collections.abc import Callable
from functools import partial
from io import StringIO

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import expanded_nn as enn
from oracle import (
    Call,
    Objective,
    assert_close,
    assert_close_rows,
    gradient_penalty,
    loop,
    rows_of,
    sample_losses,
    total_loss,
)

images = Call((torch.randn(3, 4, 7, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64),))
features = Call((torch.randn(3, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64),))
words = Call((torch.tensor([[2, 5, 5, 5, 9], [0, 2, 2, 1, 1], [9, 9, 9, 9, 9]]),))


def right(
    module: nn.Module, call: Call, *, objective: Callable[..., Tensor] = total_loss, oracle: nn.Module | None = None
) -> None:
    """The rows are those of the loop."""
    model = enn.convert(module).per_sample(loss_reduction="sum")
    objective(model, call, 0).backward()
    assert_close_rows(rows_of(model), loop(oracle or module, call, 3, objective=objective))


def test_convolution_whose_input_is_a_permuted_view() -> None:
    right(nn.Conv2d(4, 6, 3), Call((torch.randn(3, 7, 8, 4).permute(0, 3, 1, 2),)))


def test_convolution_with_groups() -> None:
    right(nn.Conv2d(4, 6, 3, groups=2), images)


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_convolution_with_padding_mode_other_than_zeros(mode: str) -> None:
    right(nn.Conv2d(4, 6, 3, padding=2, padding_mode=mode), images)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
@pytest.mark.parametrize("kernel", [3, 4])
def test_convolution_with_padding_same(kernel: int) -> None:
    right(nn.Conv2d(4, 6, kernel, padding="same"), images)


def test_embedding_with_padding_idx() -> None:
    right(nn.Embedding(10, 4, padding_idx=2), words)


def test_embedding_with_scale_grad_by_freq() -> None:
    right(nn.Embedding(10, 4, scale_grad_by_freq=True), words)


def test_embedding_bag_with_repeated_indices() -> None:
    right(nn.EmbeddingBag(10, 4), words)


def test_embedding_bag_with_mode_max() -> None:
    right(nn.EmbeddingBag(10, 4, mode="max"), words)


def test_complex_weights() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2, dtype=torch.complex128)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(torch.fft.fft(x)).abs()

    right(Model(), features)


def test_weight_used_outside_its_module() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(10, 4)

        def forward(self, words: Tensor) -> Tensor:
            return F.linear(self.emb(words), self.emb.weight)

    model = enn.convert(Model()).per_sample(escalate=False)
    with pytest.raises(enn.PerSampleError, match=r"emb\.weight"):
        total_loss(model, words).backward()
    with pytest.warns(enn.PerSampleWarning, match=r"emb\.weight"):
        right(Model(), words)


def test_input_derivative_losses() -> None:
    right(
        nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 2)),
        features,
        objective=gradient_penalty,
    )


def test_laplacian() -> None:
    def laplacian(module: nn.Module, call: Call, first: int = 0) -> Tensor:
        (x,) = call.requires_grad().args
        (first_derivative,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
        second = [
            torch.autograd.grad(first_derivative[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(x.shape[1])
        ]
        return sum(second).square().sum()

    right(
        nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 1, bias=False)),
        features,
        objective=laplacian,
    )


def test_tied_weights() -> None:
    head = nn.Linear(4, 10, bias=False)
    embedding = nn.Embedding(10, 4)
    head.weight = embedding.weight
    right(nn.Sequential(embedding, nn.Tanh(), head), words)


def test_batch_folded_into_rows() -> None:
    class Fold(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.flatten(0, 1)).unflatten(0, x.shape[:2])

    model = enn.convert(Fold()).per_sample(escalate=False)
    with pytest.raises(enn.PerSampleError, match=r"layer.*\(15, 4\)"):
        model(torch.randn(3, 5, 4))
    with pytest.warns(enn.PerSampleWarning, match=r"layer.*\(15, 4\)"):
        right(Fold(), Call((torch.randn(3, 5, 4),)))


def test_broadcast_position_ids() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.positions = nn.Embedding(10, 4), nn.Embedding(8, 4)
            self.register_buffer("ids", torch.arange(8).expand(1, -1))

        def forward(self, words: Tensor) -> Tensor:
            return self.words(words) + self.positions(self.ids[:, : words.shape[1]])

    right(Model(), words)


def test_layer_called_by_keyword() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.conv, self.norm = nn.Linear(8, 8), nn.Conv2d(4, 4, 1), nn.LayerNorm(8)
            self.group, self.act, self.rms = nn.GroupNorm(2, 4), nn.PReLU(4), nn.RMSNorm(8)
            self.up, self.two = nn.ConvTranspose2d(4, 4, 1), nn.Bilinear(8, 8, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(input=self.conv(input=self.linear(input=x)))
            x = self.rms(x=self.act(input=self.group(input=x)))
            x = self.up(input=x, output_size=x.shape[2:])
            return self.two(input2=x, input1=x.sin())

    right(Model(), images)


def test_embedding_called_by_keyword() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.bag = nn.Embedding(10, 4), nn.EmbeddingBag(10, 4, mode="sum")

        def forward(self, words: Tensor) -> Tensor:
            weights = torch.linspace(1, 2, words.shape[1]).expand(words.shape)
            return self.words(input=words) + self.bag(per_sample_weights=weights, input=words).unsqueeze(1)

    right(Model(), words)


def test_model_called_by_keyword() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, *, x: Tensor) -> Tensor:
            return self.layer(x)

    right(Model(), Call((), {"x": features.args[0]}))


def test_keywords_in_another_order_than_the_forward_names_them() -> None:
    """The first tensor of a call is that of the forward's first parameter."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.shared = nn.Linear(4, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor, *, table: Tensor) -> Tensor:
            return self.layer(x) + self.shared(table)

    table = torch.randn(1, 2)
    model = enn.convert(Model()).per_sample(loss_reduction="sum")
    plain, x = enn.revert(model), features.args[0]
    assert enn.check(model, table=table, x=x).ok
    sample_losses(model(table=table, x=x)).sum().backward()
    step: Objective = lambda m, call, first: sample_losses(m(*call.args, table=table), first).sum()  # noqa: E731
    rows = loop(plain, features, len(x), objective=step)
    assert_close_rows(rows_of(model), rows)


@pytest.mark.parametrize(
    "layer", [nn.Linear(8, 8), nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.LayerNorm(8)], ids=repr
)
def test_in_place_relu_after_a_layer(layer: nn.Module) -> None:
    right(
        nn.Sequential(layer.double(), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 1).double(), nn.ReLU(inplace=True)), images
    )


def test_in_place_relu_before_a_layer() -> None:
    right(nn.Sequential(nn.AvgPool2d(1), nn.ReLU(inplace=True), nn.Linear(8, 2)), images)


def test_in_place_residual() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            h += x
            return self.b(h)

    right(Model(), features)


def test_layer_norm_without_bias() -> None:
    right(nn.LayerNorm(4, bias=False), features)


def test_empty_batch() -> None:
    model = enn.convert(
        nn.Sequential(nn.Conv2d(4, 6, 3), nn.GroupNorm(2, 6), nn.Flatten(), nn.Linear(180, 2))
    ).per_sample()
    model(torch.randn(0, 4, 7, 8)).sum().backward()
    for p in model.parameters():
        assert p.grad_sample.shape == (0, *p.shape)
        assert torch.equal(p.grad, torch.zeros_like(p))


def test_model_in_eval_mode() -> None:
    module = nn.Sequential(
        nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(), nn.Flatten(), nn.Linear(180, 2)
    )
    right(module.eval(), images)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing(use_reentrant: bool) -> None:
    class Model(nn.Module):
        def __init__(self, use_reentrant: bool) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4)
            self.use_reentrant = use_reentrant

        def forward(self, x: Tensor) -> Tensor:
            return self.c(checkpoint(lambda h: self.b(h).tanh(), self.a(x), use_reentrant=self.use_reentrant))

    module, oracle = Model(use_reentrant), Model(False)
    oracle.load_state_dict(module.state_dict())
    right(module, features, oracle=oracle)


def test_lora_on_an_embedding() -> None:
    class LoRA(nn.Module):
        """peft's way: the base frozen, the factors parameters of the module itself."""

        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Embedding(10, 4).requires_grad_(False)
            self.a = nn.Parameter(torch.randn(2, 10))
            self.b = nn.Parameter(torch.randn(4, 2))

        def forward(self, words: Tensor) -> Tensor:
            return self.base(words) + F.embedding(words, self.a.T) @ self.b.T

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb, self.head = LoRA(), nn.Linear(4, 2)

        def forward(self, words: Tensor) -> Tensor:
            return self.head(self.emb(words))

    right(Model(), words)


def test_lora_on_an_embedding_with_padding_idx() -> None:
    """`vmap(F.embedding(padding_idx=…))` gives wrong gradients in torch 2.13."""

    class LoRA(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.randn(2, 10))
            self.b = nn.Parameter(torch.randn(4, 2))

        def forward(self, words: Tensor) -> Tensor:
            return F.embedding(words, self.a.T, padding_idx=2) @ self.b.T

    module = LoRA()
    right(module, words)


@pytest.mark.filterwarnings("ignore:.*sample by sample:expanded_nn.PerSampleWarning")
def test_cache_that_a_layer_mutates() -> None:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))
            self.register_buffer("seen", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            self.seen.add_(x.detach().mean(0))
            return x * self.weight

    right(nn.Sequential(nn.Linear(4, 4), Cached()), features)


def test_cache_that_a_layer_keeps() -> None:
    """A tensor that leaves the vmapped forward by an attribute would be one of vmap's own."""

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))
            self.history: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            self.history.append(x)
            return x * self.weight + sum(self.history)

    model = enn.convert(Keeps()).per_sample()
    with pytest.raises(enn.PerSampleError, match=r"Keeps.*(?s:.*)history"):
        model(features.args[0])


@pytest.mark.parametrize(
    "norm",
    [nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=True, track_running_stats=False).eval()],
    ids=["train", "no_statistics"],
)
def test_batch_norm_in_train_mode(norm: nn.Module) -> None:
    model = enn.convert(nn.Sequential(nn.Conv2d(4, 4, 3), norm.double())).per_sample()
    with pytest.raises(enn.PerSampleError, match=r"1.*BatchNorm2d(?s:.*)GroupNorm"):
        images.on(model)


def test_batch_norm_in_train_mode_without_parameters() -> None:
    """It mixes the samples of the layers before it all the same."""
    model = enn.convert(nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4, affine=False))).per_sample()
    with pytest.raises(enn.PerSampleError, match=r"1.*BatchNorm2d(?s:.*)GroupNorm"):
        images.on(model)


def test_frozen_batch_norm_in_train_mode() -> None:
    norm = nn.BatchNorm2d(4).requires_grad_(False)
    model = enn.convert(nn.Sequential(nn.Conv2d(4, 4, 3), norm)).per_sample()
    with pytest.raises(enn.PerSampleError, match=r"1.*BatchNorm2d(?s:.*)GroupNorm"):
        images.on(model)


class Normalizes(nn.Module):
    """Two convolutions, between which a function normalizes."""

    def __init__(self, normalize: Callable[[Tensor], Tensor], first: nn.Module) -> None:
        super().__init__()
        self.first, self.last, self.normalize = first, nn.Conv2d(4, 2, 1), normalize

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.normalize(self.first(x)))


BATCH_NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "functional": lambda h: F.batch_norm(h, None, None, training=True),
    "by_position": lambda h: F.batch_norm(h, torch.zeros(4), torch.ones(4), None, None, True, 0.1),
    "of_torch": lambda h: torch.batch_norm(h, None, None, None, None, True, 0.1, 1e-5, False),
    "native": lambda h: torch.native_batch_norm(h, None, None, None, None, True, 0.1, 1e-5)[0],
    "of_positions": lambda h: (
        F.batch_norm(h.movedim(1, 3).reshape(-1, 4), None, None, training=True).view(3, 7, 8, 4).movedim(3, 1)
    ),
    "in_a_checkpoint": lambda h: checkpoint(
        lambda h: F.batch_norm(h, None, None, training=True), h, use_reentrant=True
    ),
}


@pytest.mark.parametrize("behind_a_layer", [True, False])
@pytest.mark.parametrize("norm", BATCH_NORMS.values(), ids=BATCH_NORMS)
def test_batch_norm_as_a_function(norm: Callable[[Tensor], Tensor], *, behind_a_layer: bool) -> None:
    if not behind_a_layer and norm is BATCH_NORMS["in_a_checkpoint"]:
        return  # without a gradient to hand on there is nothing to run again
    first = nn.Conv2d(4, 4, 1) if behind_a_layer else nn.Identity()
    model = enn.convert(Normalizes(norm, first)).per_sample()
    with pytest.raises(
        enn.PerSampleError, match=r"^Normalizes: .*batch_norm with training=True, line(?s:.*)group_norm"
    ):
        images.on(model)
    images.on(model.per_sample(False))


class Activated(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


@pytest.mark.parametrize("affine", [True, False])
def test_frozen_batch_norm_of_a_class_of_the_users(*, affine: bool) -> None:
    """It has no rows, and mixes those of other layers."""
    norm = Activated(4, affine=affine).requires_grad_(False)
    model = enn.convert(nn.Sequential(nn.Conv2d(4, 4, 3), norm)).per_sample()
    with pytest.raises(enn.PerSampleError, match=r"its forward normalizes by the statistics of the batch"):
        images.on(model)


def test_batch_norm_by_own_weights_of_vectors() -> None:
    """One sample has no statistics: torch's words would name its shape alone."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return F.batch_norm(x, None, None, self.weight, training=True)

    model = enn.convert(nn.Sequential(nn.Linear(4, 4), Own())).per_sample()
    with pytest.raises(enn.PerSampleError, match=r"its forward normalizes by the statistics of the batch"):
        features.on(model)


NO_MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "one_row": lambda h: F.batch_norm(h.view(1, -1, 7, 8), None, None, training=True).view(h.shape),
    "of_running_statistics": lambda h: F.batch_norm(h, torch.zeros(4), torch.ones(4)),
    "each_alone": lambda h: torch.stack([F.batch_norm(one[None], None, None, training=True)[0] for one in h]),
    "instance": lambda h: F.instance_norm(h),
    "weights": lambda h: h * F.batch_norm(torch.arange(8.0).view(2, 4), None, None, training=True)[0, :, None, None],
}


@pytest.mark.parametrize("norm", NO_MIXING.values(), ids=NO_MIXING)
def test_norm_that_mixes_no_samples(norm: Callable[[Tensor], Tensor]) -> None:
    right(Normalizes(norm, nn.Conv2d(4, 4, 1)), images)


def test_instance_norm_with_one_shared_row() -> None:
    right(nn.Sequential(nn.Conv2d(4, 4, 1), nn.InstanceNorm2d(4, affine=True, track_running_stats=True)), images)


def test_dropout_draws_once_a_sample_in_a_general_module() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(50))

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x * self.weight, 0.5, self.training)

    model = enn.convert(Noisy()).per_sample(loss_reduction="sum")
    out = model(torch.ones(3, 50))
    assert not torch.equal(out[0], out[1])
    out.sum().backward()
    assert_close(model.weight.grad_sample, out.detach())


class Positions(nn.Module):
    """Learned positions, with an extra dimension put before or after the look-up."""

    def __init__(self, look_up: Callable[[nn.Embedding, Tensor], Tensor]) -> None:
        super().__init__()
        self.words, self.places, self.head = nn.Embedding(10, 4), nn.Embedding(6, 4), nn.Linear(4, 2)
        self.look_up = look_up

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.words(words) + self.look_up(self.places, torch.arange(words.shape[1])))


def test_positions_unsqueezed_after_the_look_up() -> None:
    module, text = Positions(lambda places, index: places(index)[None]), r"places \(Embedding\): its input is shared"
    with pytest.raises(enn.PerSampleError, match=text + " by all 3 samples.*unsqueeze the input"):
        enn.convert(module).per_sample(escalate=False)(torch.randint(10, (3, 5)))
    with pytest.warns(enn.PerSampleWarning, match=text):
        right(module, Call((torch.randint(10, (3, 5)),)))


def test_positions_unsqueezed_before_the_look_up() -> None:
    module = Positions(lambda places, index: places(index[None]))
    words = torch.randint(10, (3, 5))
    model = enn.convert(module).per_sample(loss_reduction="sum")
    assert torch.equal(model(words), module(words))


def test_mean_over_the_batch_taken_as_one_row() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            return h[:, :2] + self.second(h.mean(0, keepdim=True))

    with pytest.raises(enn.PerSampleError, match=r"second \(Linear\).*computed from 3 rows.*do not mix"):
        enn.convert(Mixed()).per_sample()(torch.randn(3, 4))


class Weighted(nn.Module):
    """A parameter of its own, and an argument that all samples share."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        return x * self.scale * weights


class Holder(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("weights", torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, self.weights)


def test_shared_argument_with_as_many_rows_as_samples_in_the_general_rule() -> None:
    module = Holder(Weighted())
    model = enn.convert(module).per_sample(loss_reduction="sum", escalate=False)
    x = torch.randn(5, 4)
    assert torch.equal(model(x), module(x))
    call, words = Call((torch.randn(4, 4),)), r"inner \(Weighted\).*another result than sample by sample"
    total_loss(model, call).backward()  # the other size told that all samples share it
    assert_close_rows(rows_of(model), loop(module, call, 4))
    model = enn.convert(module).per_sample(loss_reduction="sum", escalate=False)
    with pytest.raises(enn.PerSampleError, match=words):
        call.on(model)
    with pytest.warns(enn.PerSampleWarning, match=words):
        total_loss(model.per_sample(escalate=True), call).backward()
    assert_close_rows(rows_of(model), loop(module, call, 4))


class SlightlyBiased(nn.Module):
    """A mask that all samples share, times a parameter so small that float32 hardly shows it in the outputs."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.query, self.bias = nn.Linear(6, 6), nn.Parameter(torch.full((6,), size))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = self.query(x) @ x.mT + (x @ self.bias)[..., None] * mask
        return scores.softmax(-1) @ x


class Gated(nn.Module):
    """A table that all samples share, behind a gate that is closed in the beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(6))

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return x + self.gate * (table @ x)


class Sliced(nn.Module):
    """Takes as many rows of a table as there are positions, and changes them in place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        scores = torch.einsum("btd,sd->bts", x, table.repeat(2, 1)[:, :6] @ self.weight)[..., x.shape[1] :].clone()
        scores *= table
        return scores.softmax(-1) @ x


class WithTable(nn.Module):
    """Gives a module a table `(T, T)` that is made in the forward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.before, self.inner, self.after = nn.Linear(4, 6), inner, nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        table = torch.arange(x.shape[1] ** 2, dtype=x.dtype).view(x.shape[1], -1).sin()
        outputs: Tensor = self.after(self.inner(self.before(x), table).mean(1))
        return outputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("batch", [7, 8, 16])
@pytest.mark.parametrize("inner", [*(partial(SlightlyBiased, size) for size in (1e-1, 1e-2, 1e-4)), Gated, Sliced])
def test_table_with_as_many_rows_as_samples_that_outputs_hardly_show(
    inner: Callable[[], nn.Module], batch: int, dtype: torch.dtype
) -> None:
    module = WithTable(inner()).to(dtype)
    call = Call((torch.randn(batch, 8, 4, dtype=dtype),))
    model = enn.convert(module).per_sample(loss_reduction="sum")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if batch == 8 else "error")
        total_loss(model, call).backward()
    exact = loop(module.double(), Call((call.args[0].double(),)), batch)
    for name, rows in rows_of(model).items():
        assert rows is not None
        digits = 1e-3 if dtype == torch.float32 else 1e-9
        assert (rows - exact[name]).norm() <= digits * exact[name].norm() + digits * 1e-3, name


def test_samples_mixed_inside_the_general_rule() -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return (x - x.mean(0)) * self.scale

    with pytest.raises(enn.PerSampleError, match=r"Centred: on the whole batch.*another result"):
        enn.convert(Centred()).per_sample()(torch.randn(3, 4))


@pytest.mark.parametrize("dense", [True, False])
def test_graphs_whose_nodes_are_rows(dense: bool) -> None:
    class Messages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            start, end = edge_index
            return x.tanh().index_add(-2 if dense else -1, end, self.layer(x).index_select(-2 if dense else -1, start))

    edges = torch.tensor([[0, 1, 2], [1, 2, 3]])
    model = enn.convert(Messages()).per_sample(loss_reduction="sum")
    with pytest.raises(enn.PerSampleError, match="rows of its input, which are the nodes of graphs, not samples"):
        model(torch.randn(4, 4), edges)
    if not dense:  # each row is a sample, whose numbers the graph joins
        model.per_sample(batch_size=5)
    x = torch.randn(5, 6, 4) if dense else torch.randn(5, 4)
    model(x, edges).sin().sum().backward()
    expected = loop(Messages(), Call((x,)), 5, objective=lambda m, call, first=0: m(*call.args, edges).sin().sum())
    assert_close_rows(rows_of(model), expected)


def test_general_rule_leaves_the_random_state_and_buffers_alone() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * self.scale

    model = enn.convert(Noisy()).per_sample()
    state = torch.get_rng_state()
    model(torch.randn(0, 4)), model(torch.ones(3, 4))
    assert torch.equal(state, torch.get_rng_state())
    assert model.calls == 2


def test_clipping_a_model_that_is_not_in_per_sample_mode() -> None:
    model = nn.Linear(3, 2)
    model(torch.randn(4, 3)).sum().backward()
    with pytest.raises(
        enn.PerSampleError,
        match=r"\['weight', 'bias'\] are in no layer in per-sample mode.*: convert\(model, inplace=True\)\.per_sample",
    ):
        enn.clip_grad_sample_norms_(model, 1.0)
    model = enn.convert(model)
    model(torch.randn(4, 3)).sum().backward()
    for use in (enn.per_sample_grads, lambda model: enn.clip_grad_sample_norms_(model, 1.0)):
        with pytest.raises(enn.PerSampleError, match=r"on before the forward: model\.per_sample\(True\)\.$"):
            use(model)


def test_clipping_a_model_of_which_a_part_is_plain() -> None:
    model = nn.Sequential(enn.Linear(4, 4).per_sample(), nn.Linear(4, 2))
    model(torch.randn(3, 4)).sum().backward()
    with pytest.raises(enn.PerSampleError, match=r"\['1.weight', '1.bias'\] are in no layer.*: convert\(model, inp"):
        enn.clip_grad_sample_norms_(model, 1.0)


def test_rows_of_an_older_step_after_switching_off() -> None:
    model = enn.Linear(3, 2).per_sample()
    model(torch.randn(4, 3)).sum().backward()
    model.per_sample(False)
    assert model.weight.grad_sample is None


def test_layer_replaced_after_conversion() -> None:
    model = enn.convert(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))).per_sample()
    model[1] = nn.Linear(4, 3)
    with pytest.raises(enn.PerSampleError, match=r"1\.bias: the parameter belongs to a plain Linear.*convert"):
        model(torch.randn(3, 4)).sum().backward()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize(
    "transform",
    [
        pytest.param(lambda model, x: torch.func.jacrev(model)(x), id="jacrev"),
        pytest.param(lambda model, x: torch.func.jvp(model, (x,), (x,)), id="jvp"),
        pytest.param(lambda model, x: torch.func.vmap(model)(x), id="vmap"),
    ],
)
def test_transform_of_a_model_in_per_sample_mode(transform: Callable[[nn.Module, Tensor], object]) -> None:
    model = enn.convert(nn.Linear(4, 2)).per_sample()
    with pytest.raises(enn.PerSampleError, match=r"torch\.func.*per_sample\(False\)"):
        transform(model, torch.randn(3, 4))


def test_transform_of_a_model_switched_off() -> None:
    module = nn.Linear(4, 2)
    model = enn.convert(module).per_sample().per_sample(False)
    x = torch.randn(3, 4)
    assert torch.equal(torch.func.jacrev(model)(x), torch.func.jacrev(module)(x))


def test_module_shared_by_two_models() -> None:
    both = nn.Linear(4, 4)
    one, other = nn.Sequential(both, nn.Linear(4, 2)), nn.Sequential(both, nn.Linear(4, 3))
    for model in (one, other):
        enn.convert(model, inplace=True).per_sample(loss_reduction="sum")
    x = torch.randn(3, 4)
    one(x).square().sum().backward()
    loop = enn.revert(one)
    expected = [torch.autograd.grad(loop(each).square().sum(), loop[0].weight)[0] for each in x]
    assert torch.allclose(both.weight.grad_sample, torch.stack(expected))


def test_folded_batch_taken_as_a_whole() -> None:
    class Folding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.flatten(0, 1)).unflatten(0, x.shape[:2]).tanh()

    class Model(nn.Sequential):
        pass

    x = torch.randn(3, 5, 4)
    with pytest.raises(enn.PerSampleError, match=r"folded batch of 3 x 5.*alone\(ItsClass\)"):
        enn.convert(Model(Folding())).per_sample(escalate=False)(x)
    enn.alone(Folding)
    right(Model(Folding()), Call((x,)))


@pytest.mark.parametrize("probability", [0.0, 0.5])
def test_general_rule_compares_once_and_not_at_each_step(probability: float) -> None:
    calls = StringIO()  # what comparisons append to a list is undone

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.dropout = nn.Parameter(torch.ones(4)), nn.Dropout(probability)

        def forward(self, x: Tensor) -> Tensor:
            calls.write(str(len(x)))
            return self.dropout(x * self.scale)

    model = enn.convert(Scaled()).per_sample()
    for _ in range(3):
        model(torch.randn(5, 4)).sum().backward()
    # the plain forward of the whole batch comes first, with chance once more without it; the samples run once, and the
    # plain forward again for its gradients; then comes that on the whole batch, on which each step runs from then on
    first = "51555" if probability else "5155"
    # in the second of the three steps one sample is compared alone, the batch with one sample and the others, and which
    # parameters the plain forward uses
    assert calls.getvalue() == first + "515514555"


class LoopBehind(nn.Module):
    """A layer, and behind it another one in a loop over the samples."""

    def __init__(self, first: nn.Module, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.call = first, nn.Linear(3, 2), call

    def forward(self, x: Tensor) -> Tensor:
        x = self.call(self.first, x)
        return torch.cat([self.second(x[i : i + 1]) for i in range(len(x))])


@torch.no_grad()
def without_gradients(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)


@pytest.mark.parametrize("size", [(2, 3), (2, 1, 3), (2, 4, 3), (3, 2, 2, 3)])
@pytest.mark.parametrize(
    ("trained", "call"),
    [
        pytest.param(True, lambda layer, x: layer(x), id="plain"),
        pytest.param(False, lambda layer, x: layer(x), id="frozen"),
        pytest.param(True, without_gradients, id="no_grad"),
        pytest.param(True, lambda layer, x: checkpoint(layer, x, use_reentrant=True), id="reentrant"),
        pytest.param(True, lambda layer, x: checkpoint(layer, x, use_reentrant=False), id="checkpoint"),
    ],
)
def test_loop_over_what_a_layer_returns(
    trained: bool, call: Callable[[nn.Module, Tensor], Tensor], size: tuple[int, ...]
) -> None:
    model = enn.convert(LoopBehind(nn.Linear(3, 3).requires_grad_(trained), call)).per_sample(escalate=False)
    with pytest.raises(enn.PerSampleError, match=r"second \(Linear\): .*is a slice.*all [23] samples at once"):
        model(torch.randn(*size, requires_grad=True))


class Table(nn.Module):
    """As many positions as samples times those in use, kept or made: all samples share them."""

    def __init__(self, kept: Tensor) -> None:
        super().__init__()
        self.register_buffer("kept", kept)
        self.layer, self.head = nn.Linear(5, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        kept = self.kept[:, :4] if self.kept.dim() == 3 else (self.kept * 2)[:4][None]
        return self.head(x + self.layer(kept))


@pytest.mark.parametrize("size", [(12, 5), (1, 12, 5)])
@pytest.mark.parametrize("trained", [True, False])
def test_part_of_a_table_that_all_samples_share(trained: bool, size: tuple[int, ...]) -> None:
    model = Table(torch.randn(12, 5).view(size))
    model.layer.requires_grad_(trained)
    right(model, Call((torch.randn(3, 4, 5),)))


class Frozen(nn.Module):
    """A module of the user's own between two layers, whose result is changed in place."""

    def __init__(self, how: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.ones(1), requires_grad=False)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        return self.how(x)


class ChangedInPlace(nn.Module):
    def __init__(self, how: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.frozen, self.last = nn.Linear(4, 6), Frozen(how), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = self.frozen(x).mul_(2)
        return self.last(x) + y.sum(1, keepdim=True)


def test_frozen_module_that_returns_a_view_of_its_input() -> None:
    """A change of the view is one of the input, in autograd's eyes too."""
    right(ChangedInPlace(lambda x: x[:, 1:]), features)


def test_frozen_module_that_returns_a_view_of_what_autograd_keeps() -> None:
    model = enn.convert(ChangedInPlace(lambda x: x.exp()[:, 1:])).per_sample()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total_loss(model, features).backward()
