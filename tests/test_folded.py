"""Modules that fold their samples into rows, as mixtures of experts do, and run on the whole batch nevertheless."""

import io
import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import expanded_nn as enn
from expanded_nn.core import cost
from expanded_nn.layers.general import operations, owners
from expanded_nn.layers.general.alone import Alone
from expanded_nn.layers.general.batched import RULES, NotInTable, Run
from expanded_nn.layers.general.owners import Owners, Writes
from expanded_nn.layers.general.samples import NOBODY, Memo, Unknown
from expanded_nn.layers.recurrent.steps import Steps
from expanded_nn.modules.registry import EXPANDED
from oracle import (
    Call,
    assert_close,
    assert_close_rows,
    assert_derivatives_of_rows,
    gradient_penalty,
    loop,
    rows_of,
    set_seed,
    total_loss,
)

B, T, D, E = 3, 5, 4, 3


def values(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", enn.PerSampleWarning)
        warnings.filterwarnings("ignore", message="The .grad attribute")  # Module.to in a forward, in a loop
        yield


# Mixtures of experts: how rows choose their experts, and what these are


def by_score(scores: Tensor, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The weights and the experts, `(n, k)`."""
    weights, chosen = torch.topk(scores.softmax(-1), k, dim=-1)
    return weights / weights.sum(-1, keepdim=True), chosen


def by_first_feature(scores: Tensor, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """As a test says it, by the first number of each row."""
    chosen = x[:, :1].detach().long().clamp(0, E - 1).expand(-1, k)
    return scores.softmax(-1).gather(1, chosen), chosen


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ModuleList(nn.Sequential(nn.Linear(D, 6), nn.SiLU(), nn.Linear(6, D)) for _ in range(E))

    def of(self, expert: Any, x: Tensor) -> Tensor:
        return self.each[int(expert)](x)  # type: ignore[no-any-return]


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.empty(E, 12, D)), nn.Parameter(torch.empty(E, D, 6))

    def of(self, expert: Any, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.up[expert]).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down[expert])


class Viewed(nn.Module):
    """Weights that are matrices only in their use."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.empty(E, 12 * D)), nn.Parameter(torch.empty(E, D, 3, 2))

    def of(self, expert: Any, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.up[expert].view(12, D)).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down[expert].flatten(1))


class WithBiases(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.empty(E, D, 6)), nn.Parameter(torch.empty(E, 6, D))
        self.up_bias, self.down_bias = nn.Parameter(torch.empty(E, 6)), nn.Parameter(torch.empty(E, D))

    def of(self, expert: Any, x: Tensor) -> Tensor:
        hidden = x @ self.up[expert] + self.up_bias[expert]
        return torch.tanh(hidden) @ self.down[expert] + self.down_bias[expert]


class WithNorms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(E))
        self.scale = nn.Parameter(torch.empty(D))

    def of(self, expert: Any, x: Tensor) -> Tensor:
        y = self.norms[int(expert)](x) * self.scale
        y += self.scale
        return y


class Mixture(nn.Module):
    """A block of a transformer; `chooses` says which rows take which experts."""

    def __init__(self, experts: nn.Module, chooses: Callable[..., Any] = by_score, k: int = 2) -> None:
        super().__init__()
        self.gate, self.experts, self.shared = nn.Linear(D, E, bias=False), experts, nn.Linear(D, D)
        self.chooses, self.k, self.capacity, self.visits_all = chooses, k, 1000, False

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D)
        rows = x.view(-1, D)
        weights, chosen = self.chooses(self.gate(rows), rows, self.k)
        total = torch.zeros_like(rows)
        mask = F.one_hot(chosen, E).permute(2, 1, 0)
        used = mask.sum((-1, -2)) >= (0 if self.visits_all else 1)
        for expert in used.nonzero():
            place, row = torch.where(mask[expert[0]])
            place, row = place[: self.capacity], row[: self.capacity]  # beyond it they are dropped
            y = self.experts.of(expert[0], rows[row]) * weights[row, place, None]  # type: ignore[operator]
            total.index_add_(0, row, y)
        return total.view(x.shape) + self.shared(x)


class Around(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.before, self.part, self.after = nn.Linear(D, D), part, nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.part(self.before(x)))  # type: ignore[no-any-return]


def built(part: nn.Module, *, around: bool = True) -> nn.Module:
    module = (Around(part) if around else part).double()
    for number, parameter in enumerate(module.parameters()):
        parameter.data.copy_(0.7 * values(*parameter.shape, seed=number + 3))
    return module


def folding(model: nn.Module) -> list[Alone]:
    return [module for module in model.modules() if isinstance(module, Alone)]


def runs_whole(model: nn.Module) -> bool:
    parts = folding(model)
    return bool(parts) and all(
        part._told.ways and all(ways.known for ways in part._told.ways.values()) for part in parts
    )


def assert_right(module: nn.Module, *calls: Call, samples: int = B, objective: Any = total_loss) -> nn.Module:
    """In the first step, which compares, and in those after it, with other inputs."""
    model = enn.convert(module).per_sample(loss_reduction="sum")
    for call in calls:
        model.zero_grad()
        assert_close(call.on(model), call.on(module).detach())
        objective(model, call).backward()
        used = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
        expected = loop(module, call, samples, objective=objective)
        assert not any(rows.any() for name, rows in expected.items() if name not in used)
        rows = {name: model.get_parameter(name).grad_sample for name in used}
        assert_close_rows(rows, {name: expected[name] for name in used})
        for name in used:
            assert_close(model.get_parameter(name).grad, rows[name].sum(0), name=name)
    return model


def calls(samples: int = B, positions: int = T, number: int = 3) -> list[Call]:
    return [Call((values(samples, positions, D, seed=seed),)) for seed in range(number)]


KINDS = [Layers, Stacked, Viewed, WithBiases, WithNorms]


@pytest.mark.parametrize("kind", KINDS)
class TestMixtures:
    @pytest.mark.parametrize("k", [1, 2])
    def test_rows_equal_the_loop(self, kind: Any, k: int) -> None:
        assert runs_whole(assert_right(built(Mixture(kind(), k=k)), *calls()))

    @pytest.mark.parametrize(("samples", "positions"), [(1, 5), (4, 4), (2, 1), (5, 2)])
    def test_sizes(self, kind: Any, samples: int, positions: int) -> None:
        """One sample, as many as positions, one position; so an expert has B rows by chance."""
        model = assert_right(built(Mixture(kind())), *calls(samples, positions), samples=samples)
        assert samples == 1 or runs_whole(model)

    def test_an_expert_that_is_called_with_no_rows(self, kind: Any) -> None:
        """In the memory of the step before, in which it had some."""
        mixture = Mixture(kind(), by_first_feature, k=1)
        mixture.visits_all = True
        module = built(mixture, around=False)
        model = enn.convert(module).per_sample(loss_reduction="sum", materialize=True)
        for experts in ([0, 1, 2, 0, 1], [2, 1, 1, 2, 1], [0, 0, 0, 0, 0], [0, 1, 2, 0, 1]):
            x = 0.3 * values(B, T, D).abs()
            x[..., 0] = torch.tensor(experts) + 0.5
            model.zero_grad()
            call = Call((x,))
            total_loss(model, call).backward()
            rows = {name: parameter.grad_sample for name, parameter in model.named_parameters()}
            assert_close_rows(rows, loop(module, call, B))
        assert runs_whole(model)

    def test_second_derivatives(self, kind: Any) -> None:
        model = assert_right(built(Mixture(kind())), *calls(), objective=gradient_penalty)
        assert runs_whole(model)

    @pytest.mark.filterwarnings("ignore:Using backward")
    def test_derivatives_of_the_rows(self, kind: Any) -> None:
        module, call = built(Mixture(kind())), calls()[0]
        model = enn.convert(module).per_sample(loss_reduction="sum")
        total_loss(model, call).backward()
        model.zero_grad()
        assert_derivatives_of_rows(model, module, call, B)
        assert runs_whole(model)

    @pytest.mark.parametrize(
        "experts",
        [
            [[0] * 5, [0] * 5, [0] * 5],  # one has all rows
            [[0] * 5, [1] * 5, [2] * 5],  # each has those of one sample
            [[0, 1, 1, 1, 1], [1, 0, 1, 1, 1], [1, 1, 1, 1, 0]],  # one has B rows, one of each sample
            [[0, 0, 0, 1, 1], [1] * 5, [1] * 5],  # one has B rows, all of the first sample
            [[1] * 5, [0, 1, 1, 1, 1], [0, 0, 1, 1, 1]],  # one has B rows, of two samples
        ],
    )
    def test_who_gets_which_rows(self, kind: Any, experts: list[list[int]]) -> None:
        """Also after other ones, as the choice is another one in each step."""
        x = 0.3 * values(B, T, D).abs()
        x[..., 0] = torch.tensor(experts) + 0.5
        module = built(Mixture(kind(), by_first_feature, k=1), around=False)
        assert runs_whole(assert_right(module, Call((x,)), *calls(), Call((x,))))


def test_inputs_without_gradients_and_embedded_ones() -> None:
    model = assert_right(built(Mixture(Stacked()), around=False), *calls())
    assert runs_whole(model)


def test_frozen_experts_have_no_rows() -> None:
    module = built(Mixture(Stacked()))
    module.part.experts.up.requires_grad_(False)  # type: ignore[union-attr]
    model = enn.convert(module).per_sample(loss_reduction="sum")
    (call, *_) = calls()
    total_loss(model, call).backward()
    assert runs_whole(model)
    rows, expected = rows_of(model), loop(module, call, B)
    assert "part.experts.up" not in rows
    assert_close_rows(rows, {name: expected[name] for name in rows})


class Stopped(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor) -> Tensor:
        return weight.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


class WithAStop(WithBiases):
    def of(self, expert: Any, x: Tensor) -> Tensor:
        return torch.tanh(x @ Stopped.apply(self.up[expert])) @ self.down[expert]


def test_experts_whose_weight_gets_no_gradient() -> None:
    model = assert_right(built(Mixture(WithAStop())), *calls())
    assert runs_whole(model)
    assert model.part.experts.up.grad is None  # type: ignore[union-attr]


def test_an_expert_without_rows_leaves_zeros() -> None:
    x = 0.3 * values(B, T, D).abs()
    with torch.random.fork_rng():
        torch.use_deterministic_algorithms(True)  # which fills memory that is not written with NaN
        try:
            assert_right(built(Mixture(Stacked(), by_first_feature, k=1), around=False), Call((x,)), Call((x,)))
        finally:
            torch.use_deterministic_algorithms(False)


class Scaled(Around):
    """With a parameter of its own, so that its forward goes through the general rule."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__(part)
        self.scale = nn.Parameter(torch.empty(D))

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.part(self.before(x) * self.scale))  # type: ignore[no-any-return]


def test_a_module_with_a_parameter_of_its_own_around_them() -> None:
    """The experts, which `vmap` cannot follow, are sent through the general rule, and not all that is around them."""
    model = assert_right(built(Scaled(Mixture(Stacked())), around=False), *calls())
    assert runs_whole(model)
    assert not isinstance(model, Alone)
    assert isinstance(model.part, Alone)


def test_experts_share_a_weight() -> None:
    experts = Layers()
    experts.each[1] = experts.each[0]
    assert runs_whole(assert_right(built(Mixture(experts)), *calls()))


def test_clipping_and_norms() -> None:
    module, (call, *_) = built(Mixture(Stacked())), calls()
    model = enn.convert(module).per_sample(loss_reduction="sum")
    total_loss(model, call).backward()
    expected = torch.cat([rows.flatten(1) for rows in loop(module, call, B).values()], 1).norm(dim=1)
    assert_close(enn.clip_grad_sample_norms_(model, 0.1), expected)


class Checkpointed(Around):
    use_reentrant = True

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.part, self.before(x), use_reentrant=self.use_reentrant)
        return self.after(hidden)  # type: ignore[no-any-return]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints(use_reentrant: bool) -> None:
    """There the graph cannot be looked at: the samples go through it one by one.

    With two experts for each row, one that all rows choose takes them in another order, which a reentrant one refuses.
    """
    module = built(Mixture(Stacked(), k=1 if use_reentrant else 2))
    checkpointed: Any = deepcopy(module)
    checkpointed.__class__, checkpointed.use_reentrant = Checkpointed, use_reentrant
    model = enn.convert(checkpointed).per_sample(loss_reduction="sum")
    for call in calls():
        model.zero_grad()
        total_loss(model, call).backward()
        assert_close_rows(rows_of(model), loop(module, call, B))


def test_a_mixing_auxiliary_loss_is_shared_out() -> None:
    """A loss that is common to all samples has rows that add up to its gradient."""
    module, (call, *_) = built(Mixture(Stacked())), calls()
    model = enn.convert(module).per_sample(loss_reduction="sum")
    model_output, output = call.on(model), call.on(module)
    model_output.mean((0, 1)).square().sum().backward()
    output.mean((0, 1)).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad_sample.sum(0), module.get_parameter(name).grad, name=name)


# Samples that meet


def test_a_capacity_of_the_whole_batch_is_refused() -> None:
    module = built(Mixture(Stacked()))
    module.part.capacity = 4  # type: ignore[union-attr]
    model = enn.convert(module).per_sample()
    with pytest.raises(enn.PerSampleError, match="sample by sample"):
        calls()[0].on(model)


def test_a_capacity_that_is_met_later_is_found_soon() -> None:
    """In the trial no row was dropped."""
    module = built(Mixture(Stacked()))
    model = enn.convert(module).per_sample()
    for call in calls():
        call.on(model)
    assert runs_whole(model)
    model.part.capacity = 1  # type: ignore[union-attr]
    with pytest.raises(enn.PerSampleError, match="sample by sample"):
        assert [call.on(model) for call in calls(number=B * cost.TURNS_OF_A_SAMPLE)]


def test_dropout_is_drawn_once_in_each_step() -> None:
    """Also where a sample alone is compared; of what is drawn nothing can be."""

    class Drops(Mixture):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(F.dropout(x, 0.5))

    module, (call, *_) = built(Drops(Stacked())), calls()
    model = enn.convert(module).per_sample()
    call.on(model)
    for _ in range(cost.TURNS_OF_A_SAMPLE + 1):
        with torch.random.fork_rng():
            set_seed(7)
            expected, state = call.on(module).detach(), torch.get_rng_state()
            set_seed(7)
            assert_close(call.on(model), expected)
            assert torch.equal(torch.get_rng_state(), state)
    assert runs_whole(model)


def test_rows_of_experts_have_no_positions() -> None:
    """Those that an expert takes are others in each sample, and fewer in some."""
    model = enn.convert(built(Mixture(Layers()))).per_sample(keep_factors=True)
    total_loss(model, calls()[0]).backward()
    assert runs_whole(model)
    with pytest.raises(enn.PerSampleError, match=r"kronecker: .*'part.experts.each.0.0.weight'"):
        enn.per_sample_grads(model).kronecker()


@pytest.mark.parametrize("kind", KINDS)
def test_experts_keep_factors(kind: type[nn.Module]) -> None:
    module, (call, other, _) = built(Mixture(kind())), calls()
    model = enn.convert(module).per_sample(loss_reduction="sum", keep_factors=True)
    snapshots, expected = [], []
    for each in (call, other):
        model.zero_grad()
        total_loss(model, each).backward()
        snapshots.append(enn.per_sample_grads(model))
        expected.append(torch.cat([rows.flatten(1) for rows in loop(module, each, B).values()], 1))
    held = {type(term).__name__ for rows in snapshots[0].values() for term in rows.terms()}
    assert {Layers: "PaddedOuter", Stacked: "Parts", WithBiases: "Parts"}.get(kind, "Dense") in held
    buffer = io.BytesIO()
    torch.save(dict(snapshots[0]), buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    grads, rows = snapshots[0], expected[0]
    weights = torch.tensor([0.5, -1.0, 2.0]).double()
    assert_close(torch.cat([saved[name].dense().flatten(1) for name in grads], 1), rows)
    assert_close(grads.norms(), rows.norm(dim=1))
    assert_close(grads.gram(snapshots[1]), rows @ expected[1].t())
    assert_close(torch.cat([total.flatten() for total in grads.sum(weights).values()]), weights @ rows)
    assert_close(enn.Projection(8)(grads), enn.Projection(8)({name: grads[name].dense() for name in grads}))
    assert_close(grads.flatten(), rows)


def test_mixed_rows_do_not_run_on_the_whole_batch() -> None:
    class Mixes(Mixture):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + 1e-9 * x.flip(0))  # too little for a comparison of results

    module, (call, *_) = built(Mixes(Stacked())), calls()
    model = enn.convert(module).per_sample()
    call.on(model)
    assert not runs_whole(model)


# Models of the `transformers` package


def test_experts_by_a_grouped_product() -> None:
    """In float32, as it knows no float64."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 1, "vocab_size": 30}
    with torch.random.fork_rng():
        set_seed(0)
        config = transformers.MixtralConfig(**sizes, **experts, use_cache=False)
        module = transformers.MixtralForCausalLM(config).float().eval()
    module.set_experts_implementation("grouped_mm")
    model = enn.convert(deepcopy(module)).per_sample(loss_reduction="sum")
    for seed in range(2):
        words = torch.randint(30, (B, 6), generator=torch.Generator().manual_seed(seed))
        model.zero_grad()
        model(words).logits.sin().sum().backward()
        for i in range(B):
            module.zero_grad()
            module(words[i : i + 1]).logits.sin().sum().backward()
            for name, parameter in module.named_parameters():
                row = model.get_parameter(name).grad_sample[i]
                assert float((row - parameter.grad).norm()) <= 1e-4 * float(parameter.grad.norm()) + 1e-5, name
    assert runs_whole(model) or torch.__version__ < "2.11"  # with torch 2.10 it goes sample by sample


DECODER = {
    "vocab_size": 30,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "num_hidden_layers": 1,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "use_cache": False,
}
SWITCH = {
    "vocab_size": 30,
    "d_model": 8,
    "d_kv": 4,
    "d_ff": 12,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_sparse_encoder_layers": 1,
    "num_sparse_decoder_layers": 1,
    "num_heads": 2,
    "num_experts": 3,
    "expert_capacity": 2,  # beyond which rows are dropped, in each sample
    "use_cache": False,
}


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("Mixtral", DECODER),
        ("GptOss", {**DECODER, "layer_types": ["full_attention"]}),
        ("GraniteMoe", {key: value for key, value in DECODER.items() if key != "head_dim"}),
        ("SwitchTransformers", SWITCH),
    ],
)
def test_models(name: str, sizes: dict[str, Any]) -> None:
    """Unedited: of gpt-oss the whole layer folds its samples, the router of Switch moves itself to its own dtype."""
    transformers = pytest.importorskip("transformers")
    seq2seq = name.startswith("Switch")
    with torch.random.fork_rng():
        set_seed(0)
        config = getattr(transformers, f"{name}Config")(**sizes)
        module = getattr(transformers, f"{name}For{'ConditionalGeneration' if seq2seq else 'CausalLM'}")(config)
        module = module.double().eval()
        for parameter in module.parameters():
            parameter.data.add_(0.3 * torch.randn_like(parameter))
    for router in module.modules():
        if hasattr(router, "classifier"):
            router.dtype = torch.float64  # the config knows no other than float32
    if not seq2seq:
        module.set_experts_implementation("eager")
        module.set_attn_implementation("eager")
    model = enn.convert(deepcopy(module)).per_sample(loss_reduction="sum")
    for seed in range(2):
        words = torch.randint(3, 30, (B, 6), generator=torch.Generator().manual_seed(seed))
        inputs = {"input_ids": words, **({"decoder_input_ids": words.flip(1)} if seq2seq else {})}
        model.zero_grad()
        model(**inputs).logits.sin().sum().backward()
        for i in range(B):
            module.zero_grad()
            module(**{key: value[i : i + 1] for key, value in inputs.items()}).logits.sin().sum().backward()
            for key, parameter in module.named_parameters():
                rows = model.get_parameter(key).grad_sample
                if parameter.grad is not None:
                    assert_close(rows[i], parameter.grad, name=key)
                else:
                    assert rows is None or not rows[i].any()
    assert runs_whole(model)


CHOICES = {"vocab_size": 30, "pad_token_id": 0, "max_position_embeddings": 16, "n_positions": 16}
CHOICES |= dict.fromkeys(("hidden_size", "n_embd", "dim"), 8) | dict.fromkeys(("intermediate_size", "hidden_dim"), 12)
CHOICES |= dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers"), 2)
CHOICES |= dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 2)


@pytest.mark.parametrize("name", ["BertForMultipleChoice", "DistilBertForMultipleChoice", "GPT2DoubleHeadsModel"])
def test_models_that_fold_the_choices(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    with torch.random.fork_rng():
        set_seed(0)
        kind = getattr(transformers, name)
        options = {key: value for key, value in CHOICES.items() if hasattr(kind.config_class(), key)}
        module = kind(kind.config_class(**options)).double().eval()
    model = enn.convert(module).per_sample(loss_reduction="sum")
    for seed in range(2):
        words = torch.randint(3, 30, (B, 2, 4), generator=torch.Generator().manual_seed(seed))
        inputs = {"input_ids": words, "attention_mask": (words > 5).long()}
        if name == "GPT2DoubleHeadsModel":
            inputs = {"input_ids": words, "mc_token_ids": words.argmax(-1)}

        def loss(called: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
            outputs = called(**inputs)
            scores = (
                outputs.logits
                if "mc_logits" not in outputs
                else torch.cat([outputs.logits[..., 0], outputs.mc_logits[..., None]], -1)
            )
            return scores.sin().sum()

        model.zero_grad()
        loss(model, inputs).backward()
        for i in range(B):
            module.zero_grad()
            loss(module, {key: value[i : i + 1] for key, value in inputs.items()}).backward()
            for key, parameter in module.named_parameters():
                if parameter.grad is not None:
                    assert_close(model.get_parameter(key).grad_sample[i], parameter.grad, name=key)
    assert runs_whole(model)


# Other folds


class Windows(nn.Module):
    """Attention within windows of two positions, shifted by one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D)
        y = torch.roll(x, -1, 1).reshape(-1, 2, D)
        q, k, v = self.qkv(self.norm(y)).view(-1, 2, 3, 2, D // 2).permute(2, 0, 3, 1, 4).unbind()
        mixed = (q @ k.mT).softmax(-1) @ v
        y = self.out(mixed.transpose(1, 2).reshape(y.shape))
        return x + torch.roll(y.reshape(x.shape), 1, 1)


class BiasedWindows(Windows):
    """The same with a bias for each distance, which layers compute from a table; fused, and not."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Sequential(nn.Linear(1, 5), nn.LayerNorm(5), nn.ReLU(), nn.Dropout(0.0), nn.Linear(5, 2))
        self.register_buffer("distances", torch.arange(-1.0, 2.0).view(3, 1))
        self.register_buffer("place", torch.tensor([[1, 0], [2, 1]]))

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D)
        y = x.reshape(-1, 2, D)
        q, k, v = self.qkv(self.norm(y)).view(-1, 2, 3, 2, D // 2).permute(2, 0, 3, 1, 4).unbind()
        bias = self.bias(self.distances)[self.place.view(-1)].view(2, 2, -1).permute(2, 0, 1).contiguous()
        bias = 16 * torch.sigmoid(bias)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        mixed = mixed + (q @ k.mT + bias.unsqueeze(0)).softmax(-1) @ v
        return x + self.out(mixed.transpose(1, 2).reshape(y.shape)).reshape(x.shape)


class Patches(nn.Module):
    """A transformer over the patches of an image, whose pixels are folded into the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.layer = nn.Conv2d(2, D, 3, padding=1), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D)
        image = self.conv(x.view(-1, 2, 4, 4))
        count = image.shape[0]
        patches = image.reshape(count * D * 2, 2, 2, 2).transpose(1, 2).reshape(count, D, 4, 4)
        rows = patches.transpose(1, 3).reshape(count * 4, 4, D)
        rows = self.layer(rows).sigmoid().view(count, 4, 4, D).transpose(1, 3)
        rows = rows.reshape(count * D * 2, 2, 2, 2).transpose(1, 2).reshape(count, D, 4, 4)
        return rows.flatten(1)


class Slopes(nn.Module):
    """A forward that takes a derivative itself, with respect to what it has folded."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D)
        rows = self.inner(x.flatten(0, 1))
        (slopes,) = torch.autograd.grad(rows.tanh().sum(), rows, create_graph=True)
        return self.outer(slopes).view(x.shape)


class EachAlone(nn.Module):
    """All experts take all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.weight = nn.Linear(D, E), nn.Parameter(torch.empty(E, D, D))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        results = torch.bmm(rows.repeat(E, 1).view(E, -1, D), self.weight)
        return (results * self.gate(rows).t()[..., None]).sum(0).view(x.shape)


class ByEinsum(nn.Module):
    """All experts take all rows, each with weights of its own; the products are written by names."""

    def __init__(self, up: str = "...nd,...dh->...nh", down: str = "enh,ehd->end") -> None:
        super().__init__()
        self.gate, self.equations = nn.Linear(D, E), (up, down)
        self.up, self.down = nn.Parameter(torch.empty(E, D, 6)), nn.Parameter(torch.empty(E, 6, D))

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D)
        rows = torch.einsum("btd,bte->ebtd", x, self.gate(x).softmax(-1)).flatten(1, 2)
        hidden = torch.einsum(self.equations[0], rows, self.up).tanh()
        return torch.einsum(self.equations[1], hidden, self.down).unflatten(1, x.shape[:2]).sum(0)


class OutOfOrder(nn.Module):
    """Its samples take each other's places, and stand in their own again in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flip(0).transpose(0, 1).flatten(0, 1)
        return self.layer(rows).tanh().unflatten(0, (x.shape[1], x.shape[0])).transpose(0, 1).flip(0)


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (Windows, (6, D)),
        (Windows, (2 * B, D)),
        (BiasedWindows, (6, D)),
        (BiasedWindows, (2 * B, D)),
        (Patches, (8, D)),
        (Slopes, (T, D)),
        (EachAlone, (T, D)),
        (OutOfOrder, (T, D)),
        (ByEinsum, (T, D)),
    ],
)
def test_other_folds(module: Any, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXPANDED, module, None)  # to be taken away again
    enn.alone(module)
    inputs = [Call((values(B, *shape, seed=seed),)) for seed in range(3)]
    assert runs_whole(assert_right(built(module(), around=False), *inputs))


class Frames(nn.Module):
    """A part for the frames of all films, which has no other parameters, and a recurrent layer over each film."""

    def __init__(self, fold: Callable[[Tensor], Tensor] = lambda x: x.view(-1, 1, 4, 4)) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Conv2d(1, 3, 3), nn.GroupNorm(1, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, D))
        self.film, self.fold = nn.GRU(D, 3, batch_first=True), fold

    def forward(self, x: Tensor) -> Tensor:  # (B, T, 4, 4)
        return self.film(self.part(self.fold(x)).view(*x.shape[:2], D))[0]  # type: ignore[no-any-return]


def of_films(*sizes: int) -> list[Call]:
    return [Call((values(size, 2, 4, 4, seed=seed),)) for seed, size in enumerate(sizes)]


def test_a_part_for_the_rows_of_all_samples() -> None:
    model = assert_right(built(Frames(), around=False), *of_films(B, B, B))
    assert folding(model) == [model.part]
    assert runs_whole(model)


def test_a_part_for_rows_of_a_slice_of_the_data() -> None:
    data = values(9, 2, 4, 4)
    model = assert_right(built(Frames(), around=False), *(Call((data[i : i + B],)) for i in (0, B, 5)))
    assert folding(model) == [model.part]
    assert runs_whole(model)


class Slots(nn.Module):
    """A recurrent cell that each position goes through twice, as in slot attention; first without a state."""

    def __init__(self, kind: Callable[..., nn.RNNCellBase]) -> None:
        super().__init__()
        self.cell = kind(D, D)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D)
        rows = x.reshape(-1, D)
        states = self.cell(rows)
        states = self.cell(rows.tanh(), states)
        return (states[0] * states[1] if isinstance(states, tuple) else states).view(x.shape)


CELLS = {
    "gru": nn.GRUCell,
    "lstm": nn.LSTMCell,
    "tanh": nn.RNNCell,
    "relu": partial(nn.RNNCell, nonlinearity="relu"),
    "no_bias": partial(nn.GRUCell, bias=False),
}


@pytest.mark.parametrize("objective", [total_loss, gradient_penalty])
@pytest.mark.parametrize("kind", CELLS.values(), ids=CELLS)
def test_recurrent_cells(kind: Callable[..., nn.RNNCellBase], objective: Any) -> None:
    assert runs_whole(assert_right(built(Slots(kind)), *calls(), objective=objective))


class Sequences(nn.Module):
    """A recurrent layer over several sequences of each sample, as over the sentences of a text."""

    def __init__(self, layer: nn.RNNBase, first: str = "zeros") -> None:
        super().__init__()
        self.layer, self.first = layer, first
        self.sizes = [layer.proj_size or layer.hidden_size, *([layer.hidden_size] if layer.mode == "LSTM" else [])]
        count = layer.num_layers * (2 if layer.bidirectional else 1)
        if first == "learned":
            self.states = nn.ParameterList(torch.empty(count, 1, size) for size in self.sizes)
        elif first == "computed":
            self.before = nn.ModuleList(nn.Linear(D, count * size) for size in self.sizes)

    def forward(self, x: Tensor) -> Tensor:  # (B, n, T, D)
        rows = self.chosen(x.flatten(0, 1))  # (B * n, T, D)
        y, states = self.layer(rows if self.layer.batch_first else rows.transpose(0, 1), self.first_states(rows))
        states = states if isinstance(states, tuple) else (states,)
        steps_first = [y.transpose(0, 1) if self.layer.batch_first else y, *states]
        return self.put_back(torch.cat([part.transpose(0, 1).flatten(1) for part in steps_first], 1), x)

    def first_states(self, rows: Tensor) -> Any:
        if self.first == "zeros":
            return None
        if self.first == "learned":
            states = [own.expand(-1, len(rows), -1).contiguous() for own in self.states]
        else:
            of_rows = [own(rows[:, 0]).unflatten(1, (-1, size)) for own, size in zip(self.before, self.sizes)]  # noqa: B905
            states = [state.transpose(0, 1).contiguous() for state in of_rows]
        return tuple(states) if len(states) > 1 else states[0]

    def chosen(self, rows: Tensor) -> Tensor:
        return rows

    def put_back(self, rows: Tensor, x: Tensor) -> Tensor:
        return rows.unflatten(0, x.shape[:2])


class SomeSequences(Sequences):
    """Over those whose first number is positive alone, the last ones first."""

    def chosen(self, rows: Tensor) -> Tensor:
        self.places = torch.where(rows[:, 0, 0] > 0)[0].flip(0)
        return rows[self.places]

    def put_back(self, rows: Tensor, x: Tensor) -> Tensor:
        places, self.places = self.places, None
        zeros = torch.zeros(x.shape[0] * x.shape[1], rows.shape[1], dtype=x.dtype)
        return zeros.index_add(0, places, rows).unflatten(0, x.shape[:2])


RECURRENT: dict[str, Callable[[], nn.RNNBase]] = {
    "lstm": lambda: nn.LSTM(D, 3, batch_first=True),
    "lstm_time_first": lambda: nn.LSTM(D, 3),
    "lstm_two_layers": lambda: nn.LSTM(D, 3, 2, batch_first=True, bidirectional=True, proj_size=2),
    "lstm_no_bias": lambda: nn.LSTM(D, 3, bias=False, proj_size=2),
    "gru": lambda: nn.GRU(D, 3, 2, batch_first=True),
    "gru_both_ways": lambda: nn.GRU(D, 3, bidirectional=True),
    "tanh": lambda: nn.RNN(D, 3, batch_first=True, bias=False),
    "relu": lambda: nn.RNN(D, 3, 2, nonlinearity="relu"),
}


def of_sequences(sequences: int = 2) -> list[Call]:
    return [Call((values(B, sequences, T, D, seed=seed),)) for seed in range(3)]


@pytest.mark.parametrize("first", ["zeros", "learned", "computed"])
@pytest.mark.parametrize("objective", [total_loss, gradient_penalty])
@pytest.mark.parametrize("layer", RECURRENT.values(), ids=RECURRENT)
def test_recurrent_layers(layer: Callable[[], nn.RNNBase], objective: Any, first: str) -> None:
    module = built(Sequences(layer(), first), around=False)
    assert runs_whole(assert_right(module, *of_sequences(), objective=objective))


@pytest.mark.parametrize("sequences", [1, B, 6])
def test_numbers_of_sequences(sequences: int) -> None:
    module = built(Sequences(nn.LSTM(D, 3, batch_first=True)), around=False)
    assert_right(module, *of_sequences(sequences))


@pytest.mark.parametrize("first", ["zeros", "learned", "computed"])
@pytest.mark.parametrize("layer", RECURRENT.values(), ids=RECURRENT)
def test_recurrent_layers_over_some_sequences(layer: Callable[[], nn.RNNBase], first: str) -> None:
    module = built(SomeSequences(layer(), first), around=False)
    assert runs_whole(assert_right(module, *of_sequences(5)))


class Packed(Sequences):
    """The same over sequences of different lengths."""

    lengths = (2, T, 3, 1, 4, T)
    sorts = False

    def forward(self, x: Tensor) -> Tensor:  # (B, n, T, D)
        rows, is_batch_first = x.flatten(0, 1), self.layer.batch_first
        lengths = torch.tensor(self.lengths).repeat(len(rows))[: len(rows)]
        if self.sorts:
            lengths = lengths.sort(descending=True).values
        padded = rows if is_batch_first else rows.transpose(0, 1)
        packed = pack_padded_sequence(padded, lengths, batch_first=is_batch_first, enforce_sorted=self.sorts)
        packed, states = self.layer(packed, self.first_states(rows))
        y, _ = pad_packed_sequence(packed, is_batch_first, padding_value=0.5, total_length=T)
        states = states if isinstance(states, tuple) else (states,)
        steps_first = [y.transpose(0, 1) if is_batch_first else y, *states]
        return torch.cat([part.transpose(0, 1).flatten(1) for part in steps_first], 1).unflatten(0, x.shape[:2])


class SortedPacked(Packed):
    sorts = True


class EquallyPacked(Packed):
    lengths = (T,)


@pytest.mark.parametrize("first", ["zeros", "learned", "computed"])
@pytest.mark.parametrize("objective", [total_loss, gradient_penalty])
@pytest.mark.parametrize("layer", RECURRENT.values(), ids=RECURRENT)
def test_packed_sequences(layer: Callable[[], nn.RNNBase], objective: Any, first: str) -> None:
    module = built(Packed(layer(), first), around=False)
    assert runs_whole(assert_right(module, *of_sequences(6), objective=objective))


@pytest.mark.parametrize("kind", [SortedPacked, EquallyPacked])
def test_other_packed_sequences(kind: type[Packed]) -> None:
    samples = 1 if kind is SortedPacked else B  # of whom one at a time has them in the same order
    module = built(kind(nn.LSTM(D, 3, 2, bidirectional=True)), around=False)
    inputs = [Call((values(samples, 6, T, D, seed=seed),)) for seed in range(3)]
    assert runs_whole(assert_right(module, *inputs, samples=samples))


def test_steps_of_several_samples_are_no_sequence() -> None:
    known_by, x = Owners(B, Memo()), values(B, 2, D)
    (x,) = known_by.begin((x,), [0])
    sizes = torch.tensor([B, B])
    apart, mixed = x.transpose(0, 1).flatten(0, 1), torch.cat([x[:, 0], x[:, 1].flip(0)])
    of_steps, of_sequences = known_by.of_sequences(apart, Steps.of_packed(PackedSequence(apart, sizes)))
    assert of_steps.owner.tolist() == [*range(B), *range(B)]
    assert of_sequences.owner.tolist() == [*range(B)]
    with pytest.raises(Unknown):
        known_by.of_sequences(mixed, Steps.of_packed(PackedSequence(mixed, sizes)))


class Characters(nn.Module):
    """Looks up the letters of each word, `(B, n, T)`, in one way or another, and then goes over the words."""

    def __init__(self, of_letters: Callable[[Tensor], Tensor], **options: Any) -> None:
        super().__init__()
        self.of_letters, self.table = of_letters, nn.Embedding(7, D, **options)
        self.letters, self.words = nn.LSTM(D, 3, batch_first=True), nn.GRU(3, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.table(self.of_letters(x)).reshape(x.shape[0] * x.shape[1], -1, D)
        words = self.letters(rows)[0][:, -1].view(*x.shape[:2], -1)
        return self.words(words)[0][:, -1]  # type: ignore[no-any-return]


def first_clamped(x: Tensor) -> Tensor:
    x = x.clone()
    return x.clamp_(max=5).flatten(0, 1)


OF_LETTERS: dict[str, Callable[[Tensor], Tensor]] = {
    "flattened": lambda x: x.flatten(0, 1),
    "viewed": lambda x: x.view(-1, x.shape[-1]),
    "one after the other": lambda x: x.reshape(-1),
    "as it is": lambda x: x,
    "every other one": lambda x: x[..., ::2].flatten(0, 1),
    "detached": lambda x: x.detach()[:, :, 1:],
    "in its own memory": lambda x: x.view(-1, x.shape[-1]).data,
}


def of_words(dtype: torch.dtype = torch.int64) -> list[Call]:
    generator = torch.Generator().manual_seed(0)
    return [Call((torch.randint(7, (B, 6, T), generator=generator).to(dtype),)) for _ in range(3)]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("of_letters", OF_LETTERS.values(), ids=OF_LETTERS)
def test_folded_indices(of_letters: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    model = assert_right(built(Characters(of_letters), around=False), *of_words(dtype))
    assert runs_whole(model)


@pytest.mark.parametrize("options", [{"padding_idx": 2}, {"scale_grad_by_freq": True}], ids=["padding", "scaled"])
def test_options_of_folded_look_ups(options: dict[str, Any]) -> None:
    assert runs_whole(assert_right(built(Characters(OF_LETTERS["viewed"], **options), around=False), *of_words()))


class LettersFirst(Characters):
    def forward(self, x: Tensor) -> Tensor:
        rows = self.table(x.view(-1, T).t())  # (T, B * n, D)
        words = self.letters(rows.transpose(0, 1))[0][:, -1].view(*x.shape[:2], -1)
        return self.words(words)[0][:, -1]  # type: ignore[no-any-return]


@pytest.mark.parametrize("options", [{}, {"scale_grad_by_freq": True}], ids=["plain", "scaled"])
def test_folded_indices_with_the_letters_first(options: dict[str, Any]) -> None:
    model = assert_right(built(LettersFirst(OF_LETTERS["viewed"], **options), around=False), *of_words())
    assert runs_whole(model) == (not options)  # the samples' numbers do not stand together, so zeros are between them


@pytest.mark.parametrize("of_letters", [first_clamped, lambda x: x.flip(1).flatten(0, 1)], ids=["changed", "turned"])
def test_copies_of_indices_do_not_tell_whose_they_are(of_letters: Callable[[Tensor], Tensor]) -> None:
    assert not runs_whole(assert_right(built(Characters(of_letters), around=False), *of_words()))


@pytest.mark.parametrize(
    ("of_letters", "words"),
    [
        ("flattened", r"Here it can, as comparisons have found\."),
        ("turned", r"Steps take longer, unless comparisons in "),
    ],
)
def test_the_warning_says_whether_the_whole_batch_can_run(of_letters: str, words: str) -> None:
    module = built(Characters({**OF_LETTERS, "turned": lambda x: x.flip(1).flatten(0, 1)}[of_letters]), around=False)
    with pytest.warns(enn.PerSampleWarning, match=f"runs sample by sample from now on, in a loop.*{words}"):
        assert_right(module, *of_words())


class Masked(nn.Module):
    """It writes a token of its own where a mask says, as models that fill in what is masked do."""

    def __init__(self, shape: tuple[int, ...], write: Callable[..., None]) -> None:
        super().__init__()
        self.token, self.layer, self.write = nn.Parameter(torch.empty(shape)), nn.Linear(D, D), write

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        rows = self.layer(x).sin()
        self.write(rows, mask, self.token)
        return self.layer(rows)


def by_mask(rows: Tensor, mask: Tensor, token: Tensor) -> None:
    rows[mask] = token


def by_number(rows: Tensor, mask: Tensor, token: Tensor) -> None:
    rows[rows > 0.5] = token


def in_folded_rows(rows: Tensor, mask: Tensor, token: Tensor) -> None:
    rows.view(-1, D)[mask.view(-1)] = token


def in_a_view(rows: Tensor, mask: Tensor, token: Tensor) -> None:
    rows[:, 1:, :][mask[:, 1:]] = 2 * token


def by_position(rows: Tensor, mask: Tensor, token: Tensor) -> None:
    rows[mask] = token.expand_as(rows)[mask]


def computed(rows: Tensor, mask: Tensor, token: Tensor) -> None:
    rows[mask] = token.tanh() * 3


@pytest.mark.parametrize(
    ("shape", "write"),
    [((D,), by_mask), ((), by_mask), ((1, 1, D), by_mask), ((), by_number), ((D,), computed)],
)
@pytest.mark.parametrize("samples", [B, T, 1])
def test_a_parameter_that_is_written_where_a_mask_says(
    shape: tuple[int, ...], write: Callable[..., None], samples: int
) -> None:
    masks = [values(samples, T, seed=seed) > 0 for seed in range(3)]
    masks[2][0] = False  # one sample without
    inputs = [Call((values(samples, T, D, seed=seed + 5), mask)) for seed, mask in enumerate(masks)]
    model = assert_right(built(Masked(shape, write), around=False), *inputs, samples=samples)
    assert runs_whole(model) or samples == 1


def test_a_parameter_that_is_written_in_another_way() -> None:
    """By a mask of folded rows, into a view, or another token for each position."""
    inputs = [Call((values(B, T, D, seed=seed), values(B, T, seed=seed) > 0)) for seed in range(2)]
    for module in Masked((D,), in_folded_rows), Masked((D,), in_a_view), Masked((T, D), by_position):
        assert_right(built(module, around=False), *inputs)


def test_attention_between_samples_is_not_taken_for_that_of_one() -> None:
    recorder = enn.convert(nn.Linear(1, 1)).per_sample()._recorder
    run = Run(B, recorder, nn.Module(), Owners(B, Memo()))
    x = run.owners.begin(values(B, T, D), [0])
    mask = run.batched(values(T, T).expand(B, T, T))
    attend = RULES[F.scaled_dot_product_attention]
    attend(F.scaled_dot_product_attention, (x, x.sin(), x, mask), {})
    with pytest.raises(Unknown):
        attend(F.scaled_dot_product_attention, (x, x.flip(0), x, mask), {})


class Picks(nn.Module):
    """Takes the words of each sample that a layer without gradients finds best, once the forward has folded them."""

    def __init__(self) -> None:
        super().__init__()
        self.finds, self.layer = nn.Linear(D, 1), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.layer(x.flatten(0, 1)).tanh()
        with torch.no_grad():
            place = self.finds(rows).view(len(x), -1).topk(2, -1).indices
        picked = rows.unflatten(0, x.shape[:2]).gather(1, place[..., None].expand(-1, -1, D))
        return self.layer(picked.flatten(0, 1)).unflatten(0, (len(x), 2))


def test_layers_without_gradients_choose_words() -> None:
    model = assert_right(built(Picks()), *calls())
    assert runs_whole(model)
    assert model.part.finds.weight.grad is None  # type: ignore[union-attr]


def test_the_samples_of_a_view_of_an_index() -> None:
    known_by, x = Owners(B, Memo()), torch.arange(100)[4 : 4 + B * 6].view(B, 2, 3)
    (x,) = known_by.begin((x,), [0])
    each = torch.arange(B).view(-1, 1, 1)
    assert known_by.of(x) is known_by.of(x)
    for view in (x, x.view(-1, 3), x.permute(2, 0, 1), x[1:], x[:, 1], x.unsqueeze(0), x.as_strided((2, 2), (1, 7), 8)):
        samples = known_by.of(view)
        assert samples is not None
        assert torch.equal(samples.expand(view.shape), (view - 4) // 6)
    assert torch.equal(known_by.of(x), each)
    for other in (x.clone(), torch.zeros(2, dtype=torch.int64), x[:0], x.view(torch.float64)):
        assert known_by.of(other) is None
    with pytest.raises(Unknown):
        known_by.of(x._base[:8])  # it begins before the argument
    with pytest.raises(Unknown):
        known_by.of(x._base[-5:])
    x[0] = x[1]
    assert known_by.of(x.view(-1, 3)) is None


def test_samples_that_share_their_places_are_not_known() -> None:
    known_by = Owners(B, Memo())
    (x,) = known_by.begin((torch.arange(4).expand(B, 4),), [0])
    with pytest.raises(Unknown):
        known_by.of(x[:, 1])


def test_a_parameter_without_gradients_is_not_changed_in_place() -> None:
    run = Run(B, enn.convert(nn.Linear(1, 1)).per_sample()._recorder, nn.Module(), Owners(B, Memo()))
    weight = run.batched(values(D).expand(B, D))
    with torch.no_grad():
        assert torch.equal(weight * 2, 2 * values(D))
        assert run.way == [("mul", "no_grad")]
        with pytest.raises(NotInTable):
            weight.mul_(2)
    assert run.failed


def test_a_checkpoint_that_runs_without_gradients_first_is_no_such_layer() -> None:
    run = Run(B, enn.convert(nn.Linear(1, 1)).per_sample()._recorder, nn.Module(), Owners(B, Memo()))
    weight, x = run.batched(values(D).expand(B, D)), run.owners.begin(values(B, D), [0])
    with torch.no_grad():
        assert torch.equal(x * weight, values(B, D) * values(D))
    with pytest.raises(NotInTable):
        checkpoint(lambda x: x * weight, x, use_reentrant=True)


# The table: whose the numbers of a result are, against the derivatives by each sample


def index(*numbers: int) -> Tensor:
    return torch.tensor(numbers)


def folded(x: Tensor) -> Tensor:
    return x.flatten(0, 1)


def in_one_row(x: Tensor, groups: int = B, others: float = float("-inf"), own: float = 0.0, **changed: float) -> Tensor:
    """Attention of the rows of all samples; those of another group are masked."""
    rows = x.reshape(1, 1, -1, 6)
    group = torch.arange(12) // (12 // groups)
    mask = torch.where(group[:, None] == group, own, others).double()
    mask[0] = changed.get("of_first", mask[0])
    return F.scaled_dot_product_attention(rows, rows.sin(), rows, attn_mask=mask)


def written(out: Tensor, rows: Tensor) -> Tensor:
    """Parts of each row, one after the other, into `(12, 2, 6)`."""
    out[:, 0] = rows
    out[:, 1, 2:] = rows[:, 2:].sin()
    out[..., 1, :2].copy_(out[:, 0, :2].clone())
    out[:, 0, 0] = 1.0
    return out


def written_at(place: Callable[[Tensor], Tensor], *parts: Tensor, rows: int = 12) -> Tensor:
    """Parts of rows, one after the other, into a view of zeros `(12, 12)`."""
    out = torch.zeros(rows, 12).double()
    for part in parts:
        place(out)[...] = part
    return out


LEAST = torch.finfo(torch.float64).min
KNOWN: dict[str, Callable[[Tensor], Any]] = {  # of x (B, 4, 6)
    "elementwise": lambda x: F.gelu(x.exp() + 1) * x[:, :1] / 3 - x.clamp(max=1),
    "elementwise, more": lambda x: x.cosh().log2() + x.tan().atan().sinh() + F.celu(x) + x.round() * x.exp2(),
    "elementwise, near zero": lambda x: x.square().log1p().expm1(),
    "where": lambda x: torch.where(x > 0, x, 2 * x).masked_fill(x > 1, 0),
    "flatten": folded,
    "groups": lambda x: x.reshape(B * 4 * 2, 3).view(B, 2, 4, 3).transpose(1, 2).reshape(-1, 3, 4),
    "ones": lambda x: x.unsqueeze(0).view(1, B, 1, 24, 1).squeeze(-1).squeeze(),
    "transpose": lambda x: x.transpose(0, 1).reshape(-1, 6),
    "permute": lambda x: x.permute(-1, 0, 1).flatten(0, 1),
    "matrix transposed": lambda x: folded(x).t(),
    "expand": lambda x: x[None].expand(2, -1, -1, -1).reshape(-1, 6),
    "repeat": lambda x: x.repeat(2, 1, 1),
    "interleaved": lambda x: folded(x).repeat_interleave(2, 0),
    "slice": lambda x: folded(x)[1:9:2, ..., ::2],
    "slice from behind": lambda x: x[-2:, :-1],
    "select": lambda x: x[1] * x[-2],
    "unbind": lambda x: x.unbind()[2],
    "chunk": lambda x: folded(x).chunk(4)[1],
    "split": lambda x: folded(x).split([5, 7])[1],
    "split of features": lambda x: x.split([2, 4], -1)[1],
    "index": lambda x: folded(x)[index(0, 7, 7, 11, 2)],
    "index in front of features": lambda x: folded(x)[index(0, 7, 3), index(1, 2, 0), None],
    "index behind": lambda x: x.transpose(0, 2)[:, index(1, 0), index(2, 2)],
    "index by a mask": lambda x: x[x.detach().sum(-1) > 0],
    "index_select": lambda x: folded(x).index_select(0, index(5, 1)),
    "gather": lambda x: x.gather(2, torch.zeros(B, 4, 2, dtype=torch.int64)),
    "flip and roll": lambda x: torch.roll(x.flip(0, 2), (1, 2), (0, 1)),
    "pad": lambda x: F.pad(x, (1, 0, 2, 0)),
    "cat": lambda x: torch.cat([x[1:], x[:1]]),
    "cat with what has none, of rows that were folded": lambda x: torch.cat(
        [torch.zeros(B, 1, 6).double(), folded(x).unflatten(0, (B, 4))], 1
    ),
    "cat of samples": lambda x: torch.cat([x[:1, 0], x[1:2, 0]], -1),
    "cat of features": lambda x: torch.cat([-x[..., 3:], x[..., :3], torch.zeros(B, 4, 1).double()], -1),
    "stack": lambda x: torch.stack([x, 2 * x], 1).flatten(0, 1),
    "stack of samples": lambda x: torch.stack([x[1], x[0]], -1),
    "stack with what has none": lambda x: torch.stack([x, torch.zeros(B, 4, 6).double()], 2),
    "softmax": lambda x: folded(x).softmax(-1).log_softmax(-1),
    "reductions": lambda x: x.sum(1) + x.mean((1,)) + x.amax(1) + x.var(1) + x.logsumexp(1) + x.norm(dim=1),
    "reductions, more": lambda x: F.glu(folded(x).cumprod(1)) * folded(x).prod(-1, keepdim=True),
    "transforms": lambda x: torch.fft.irfft(torch.fft.fft(torch.fft.rfft(x, dim=1), dim=2)[..., :3], dim=1),
    "windows": lambda x: folded(x).nan_to_num().unfold(0, 4, 4),
    "windows of features": lambda x: x.transpose(1, 2).unfold(-1, 2, 2).flatten(0, 1),
    "kept dimensions": lambda x: x - x.mean((1, 2), keepdim=True),
    "topk": lambda x: folded(x).topk(2, -1)[0] + folded(x).sort(-1)[0][:, :2] + folded(x).max(-1, keepdim=True)[0],
    "products": lambda x: x @ x.mT @ x,
    "product with what all share": lambda x: F.linear(folded(x), torch.ones(2, 6).double()),
    "product beside rows": lambda x: torch.addmm(folded(x), torch.ones(12, 2).double(), torch.ones(2, 6).double()),
    "einsum": lambda x: torch.einsum("bti,bsi->bts", x, x),
    "attention": lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None]),
    "index_add": lambda x: torch.zeros(12, 6).double().index_add(0, index(3, 0, 11), folded(x)[index(3, 0, 11)]),
    "index_add to its own": lambda x: folded(x).index_add(0, index(1, 4), folded(x)[index(2, 7)]),
    "scatter": lambda x: torch.zeros(B, 4, 6).double().scatter(2, torch.ones(B, 4, 1, dtype=torch.int64), x[..., :1]),
    "norm": lambda x: F.layer_norm(folded(x), (6,)),
    "complex": lambda x: torch.view_as_real(torch.view_as_complex(x.view(B, 4, 3, 2)) * 2j).flatten(0, 1),
    "pooling": lambda x: F.interpolate(F.avg_pool2d(x[:, None], 2), size=(3, 3)),
    "dropout": lambda x: F.dropout(folded(x), 0.5),
    "a change in place": lambda x: folded(x).clone().add_(1).relu_(),
    "all parts": lambda x: torch.cat([part * part for part in folded(x).split([5, 7])]),
    "all samples": lambda x: torch.stack([2 * sample for sample in x.unbind()], -1),
    "attention in one row": in_one_row,
    "attention in one row, by the least number": lambda x: in_one_row(x, others=LEAST),
    "attention in one row, of some rows": lambda x: in_one_row(x, groups=2 * B),
    "attention in one row, by a difference": lambda x: in_one_row(x, others=-1e32, own=-1e10),
    "attention to what all share": lambda x: F.scaled_dot_product_attention(
        folded(x)[None, None], *[torch.rand(1, 1, 9, 6).double()] * 2
    ),
    "columns": lambda x: F.unfold(x[:, None], 2),
    "pads of its own numbers": lambda x: F.pad(F.pad(folded(x)[:, None], (2, 1), "reflect"), (0, 1), "replicate"),
    "pads of images": lambda x: F.pad(x[:, None], (1, 1, 2, 0), "reflect"),
    "spectrograms": lambda x: torch.stft(folded(x), 4, 2, return_complex=True, window=torch.ones(4).double()).abs(),
    "by strides": lambda x: x.clone().as_strided((B, 3, 2), (24, 5, 1), 1),
    "from columns": lambda x: F.fold(F.unfold(x[:, None], 2), (4, 6), 2),
    "from columns of one image": lambda x: F.fold(F.unfold(x[:, None], 2)[1], (4, 6), 2),
    "equations": lambda x: torch.linalg.solve_triangular(x[..., :4], x, upper=False, unitriangular=True),
    "writes": lambda x: written(torch.zeros(12, 2, 6).double(), folded(x)),
    "writes to rows of columns": lambda x: written(
        torch.empty_strided((12, 2, 6), (12, 1, 2)).double().zero_(), folded(x)
    ),
    "writes to a column": lambda x: written_at(lambda out: out.t()[3], folded(x)[:, 0]),
    "writes to every second column": lambda x: written_at(lambda out: out[:, ::2], folded(x)),
}
MIXED: dict[str, Callable[[Tensor], Any]] = {
    "a sum over the samples": lambda x: x - x.sum(0, keepdim=True),
    "over positions of several": lambda x: folded(x).mean(0),
    "over all": lambda x: x * x.sum(),
    "another sample": lambda x: x + x.flip(0),
    "softmax": lambda x: folded(x).softmax(0),
    "a product over the rows": lambda x: folded(x).t() @ folded(x),
    "attention between samples": lambda x: F.scaled_dot_product_attention(*[folded(x)[None, None]] * 3),
    "index_add": lambda x: torch.zeros(2, 6).double().index_add(0, index(0, 0), folded(x)[index(0, 11)]),
    "index_add to another": lambda x: folded(x).index_add(0, index(0), folded(x)[index(11)]),
    "scatter": lambda x: torch.zeros(B, 4, 6).double().scatter(0, torch.zeros(1, 4, 6, dtype=torch.int64), x[1:2]),
    "a change in place of a part": lambda x: _written(folded(x).clone()),
    "attention in one row, where others weigh little": lambda x: in_one_row(x, others=-5.0),
    "attention in one row, of other groups": lambda x: in_one_row(x, groups=2),
    "attention in one row, with all hidden from the first": lambda x: in_one_row(x, others=LEAST, of_first=LEAST),
    "attention in one row, with all shown to the first": lambda x: in_one_row(x, of_first=0.0),
    "attention in one row, asked by what all share": lambda x: F.scaled_dot_product_attention(
        torch.ones(1, 1, 12, 6).double(), *[folded(x)[None, None]] * 2, torch.eye(12).bool()
    ),
    "writes to the only row": lambda x: written_at(lambda out: out[:, :6], x[1, :1], rows=1),
    "columns over samples": lambda x: F.unfold(folded(x)[None, None], 2),
    "pads over samples": lambda x: F.pad(x.permute(1, 2, 0), (1, 1), "reflect"),
    "by strides over samples": lambda x: x.clone().as_strided((2, 30), (30, 1)),
    "by strides of other rows": lambda x: x.clone().as_strided((B, 5), (12, 1)),
    "from columns over samples": lambda x: F.fold(x.permute(1, 2, 0), (1, B), 1),
    "equations of several": lambda x: torch.linalg.solve_triangular(folded(x)[:6], folded(x)[:6], upper=False),
    "writes to a row": lambda x: written_at(lambda out: out[0], folded(x)[:, 0]),
    "writes to a row of a turned tensor": lambda x: written_at(lambda out: out.t()[:, 3], folded(x)[:, 0]),
    "writes to the next row": lambda x: written_at(lambda out: out[1:, :6], folded(x)[:-1]),
    "writes to a diagonal": lambda x: written_at(lambda out: out.diagonal(), folded(x)[:, 0]),
    "writes of other rows": lambda x: written_at(lambda out: out[:, :6], folded(x), folded(x).flip(0)),
    "windows over samples": lambda x: folded(x).unfold(0, 5, 1).sum(-1),
    "an operation that is not in the table": lambda x: x.logcumsumexp(1),
    "filled up with what is of no sample": lambda x: torch.cat([x[:1], torch.zeros(1, 4, 6).double()]),
}


def _written(rows: Tensor) -> Tensor:
    rows.view(-1)[:6] = rows[-1].detach() + rows[5]
    return rows


def samples_of(function: Callable[[Tensor], Any]) -> tuple[Any, Tensor, Tensor]:
    """What the graph says; what the derivatives say `(*shape, B)`; the result."""
    set_seed(0)
    known, argument = Owners(B, Memo()), values(B, 4, 6)
    x = known.begin(argument, [0])
    with Writes(known):
        y = function(x)
    y = torch.view_as_real(y) if y.is_complex() else y
    depends = torch.zeros(*y.shape, B, dtype=torch.bool)
    for place in range(y.numel()):
        (grad,) = torch.autograd.grad(y.flatten()[place], x, retain_graph=True, allow_unused=True)
        if grad is not None:
            depends.view(-1, B)[place] = grad.flatten(1).ne(0).any(1)
    return known.of(y), depends, y


@pytest.mark.parametrize("name", KNOWN)
def test_the_samples_of_a_result(name: str) -> None:
    found, depends, y = samples_of(KNOWN[name])
    assert found.dim() == y.dim()
    found = found.expand(y.shape)
    assert depends.any()
    assert int(depends.sum(-1).max()) == 1
    of = depends.int().argmax(-1)
    assert torch.equal(found[depends.any(-1)], of[depends.any(-1)])
    assert bool((found[~depends.any(-1)] >= NOBODY).all())


@pytest.mark.parametrize("name", MIXED)
def test_samples_that_are_not_known(name: str) -> None:
    with pytest.raises(Unknown):
        samples_of(MIXED[name])


OF_ALL: dict[str, Callable[[Tensor], Tensor]] = {  # of a table (4, 6)
    "reductions": lambda table: table.softmax(-1).sum(0, keepdim=True),
    "joined": lambda table: torch.cat([table, table.sin()]),
    "stacked": lambda table: torch.stack([table, table.sin()]),
    "products": lambda table: F.linear(table, table, table[:, 0]),
    "added": lambda table: torch.zeros(4, 6).double().index_add(0, index(3, 0), table[:2]),
    "put": lambda table: torch.zeros(4, 6).double().index_put((index(3),), table[0]),
    "scattered": lambda table: torch.zeros(4, 6).double().scatter(0, index(3, 0)[:, None], table[:2]),
    "put by a mask": lambda table: torch.zeros(4, 6).double().masked_scatter(table > 0, table),
    "attention": lambda table: F.scaled_dot_product_attention(*[table[None, None]] * 3),
    "equations": lambda table: torch.linalg.solve_triangular(table[:, :4], table, upper=False),
}


@pytest.mark.parametrize("name", OF_ALL)
def test_what_all_samples_share_is_of_none(name: str) -> None:
    known = Owners(B, Memo())
    _, table = known.begin([values(B, 4, 6), values(4, 6).requires_grad_()], [0, None])
    assert known.of(OF_ALL[name](table)) is None


def test_each_rule_is_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for operations that work as another one does."""
    used: set[str] = set()
    alike = {"Elu", "Mish", "LeakyRelu", "Log10", "Floor", "Ceil", "Sign", "Cummax"}

    class Noting(dict[str, Any]):
        def get(self, name: str, default: Any = None) -> Any:
            used.add(name)
            return super().get(name, default)

    monkeypatch.setattr(operations, "NODE_RULES", Noting(operations.NODE_RULES))
    for function in KNOWN.values():
        samples_of(function)
    moves = {
        name for name, rule in operations.NODE_RULES.items() if rule not in (operations._elementwise, operations._along)
    }
    assert len(moves & used) > 25, sorted(moves - used)
    assert alike <= set(operations.NODE_RULES)


def test_rows_in_their_places_again() -> None:
    owner, x = index(2, 0, 2, 2, 0), values(5, 2)
    arrangement = owners.Arrangement(owner, B, owner[:, None])
    padded = arrangement.padded(x)
    assert padded.shape == (B, 3, 2)
    assert_close(padded[0], torch.stack([x[1], x[4], torch.zeros(2).double()]))
    assert not padded[1].any()
    assert torch.equal(arrangement.unpadded(padded), x)


class Casts(nn.Module):
    """Casts its layer the first time that it runs, as the router of Switch transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.layer = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D)
        rows = self.layer(x.flatten(0, 1))
        self.gate = self.gate.to(torch.float32)
        return (rows * self.gate(rows.float()).to(x.dtype).sigmoid()).view(x.shape)


class Moves(nn.Module):
    """Moves a parameter to the device and the dtype that it has, as some losses of classes do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(D, 6))

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D)
        self.weight.data = self.weight.data.to(device=x.device, dtype=x.dtype)
        return (x / self.weight.data.norm()) @ F.normalize(self.weight, dim=0)


@pytest.mark.parametrize("within", [False, True])
def test_a_parameter_that_is_moved_to_where_it_is(within: bool) -> None:
    parts = [nn.Linear(D, D).double(), Moves().double()] if within else [Moves().double()]
    module = built(nn.Sequential(*parts) if within else parts[0], around=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = assert_right(module, *calls())
    assert all(ways.known for ways in (model[1] if within else model)._told.ways.values())


def test_a_parameter_that_is_set_to_other_numbers_is_refused() -> None:
    class Sets(Moves):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.data = self.weight.data * 0.5
            return x @ self.weight

    model = enn.convert(built(Sets(), around=False)).per_sample()
    with pytest.raises(enn.PerSampleError, match="in place"):
        calls()[0].on(model)


def test_a_forward_that_casts_a_layer() -> None:
    module, each = built(Casts(), around=False), Call((values(B, T, D),))
    expected = loop(deepcopy(module), each, B)
    model = enn.convert(module).per_sample(loss_reduction="sum")
    for _ in range(3):
        model.zero_grad()
        total_loss(model, each).backward()
        rows = {name: rows.double() for name, rows in rows_of(model).items()}
        assert_close_rows(rows, {name: rows.double() for name, rows in expected.items()}, 1e-5)


@enn.alone
class KernelTwice(nn.Module):
    """Images of several a sample through the same kernel twice: the second input is computed from the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(values(3, 3, 3, 3) / 5)

    def forward(self, x: Tensor) -> Tensor:  # (B, images, 3, height, width)
        images = torch.tanh(F.conv2d(x.flatten(0, 1), self.kernel, padding=1))
        return F.conv2d(images, self.kernel, padding=1).unflatten(0, x.shape[:2])


def test_a_kernel_that_images_meet_twice_has_rows_with_a_history() -> None:
    """The gradient of the second input goes back to the weight once, and not with that of the weight as well."""
    plain, x = built(KernelTwice(), around=False), values(B, 2, 3, 5, 5, seed=2)
    model = enn.convert(plain).per_sample()
    for _ in range(2):  # the first step compares
        loss = model(x).square().flatten(1).sum(1).mean()
        torch.autograd.grad(loss, model.kernel, create_graph=True)
    assert runs_whole(model)
    alone = [torch.autograd.grad(plain(x[i : i + 1]).square().sum(), plain.kernel)[0] for i in range(B)]
    assert_close(model.kernel.grad_sample, torch.stack(alone))


def test_a_copy_learns_anew() -> None:
    module, (call, *_) = built(Mixture(Stacked())), calls()
    model = deepcopy(enn.convert(module)).per_sample(loss_reduction="sum")
    total_loss(model, call).backward()
    copied = deepcopy(model)
    total_loss(copied, call).backward()
    assert_close_rows(rows_of(copied), loop(module, call, B))


def test_what_is_known_of_samples_is_kept_for_the_next_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    module, each = built(Windows()), Call((values(B, 6, D),))
    model = assert_right(module, each, each)
    (memo,) = [part._told.memo for part in folding(model)]
    before = len(memo.found)
    each.on(model)
    assert len(memo.found) == before > 0
    monkeypatch.setattr(cost, "KEPT_SAMPLES", 0)
    memo.found["a key"] = "that is forgotten"
    model.zero_grad()
    total_loss(model, each).backward()
    assert "a key" not in memo.found
    assert_close_rows(rows_of(model), loop(module, each, B))


def test_samples_that_depend_on_values_are_the_tensor_from_before() -> None:
    memo, first = Memo(), index(0, 0, 1)
    assert memo.same(first) is first
    assert memo.same(first.clone()) is first
    others = [memo.same(index(0, 1, place)) for place in range(9)]
    assert len({id(other) for other in others}) == 9
    assert sum(map(len, memo.known.values())) == 4  # a mixture has others each time
    assert memo.same(None) is None


@pytest.mark.filterwarnings("ignore::expanded_nn.PerSampleWarning")
@pytest.mark.parametrize("is_alone", [False, True])
def test_weights_of_each_sample_in_a_module_that_folds(is_alone: bool) -> None:
    """As in meta-learning, where a sample is a task of several images."""

    class Tasks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3))

        def forward(self, x: Tensor) -> Tensor:  # (tasks, shots, 1, 4, 4)
            folded: Tensor = self.net(x.flatten(0, 1))
            return folded.unflatten(0, x.shape[:2])

    if is_alone:
        enn.alone(Tasks)
    plain = Tasks()
    model = enn.convert(plain).per_sample()
    x, query = torch.randn(4, 5, 1, 4, 4), torch.randn(4, 6, 1, 4, 4)
    start = dict(model.named_parameters())
    for _ in range(2):
        loss = model(x).square().mean((1, 2)).mean()
        torch.autograd.grad(loss, [*start.values()], create_graph=True)
        own = {name: weight - 0.1 * weight.grad_sample for name, weight in start.items()}
        found = functional_call(model, own, (query,))
        outer = torch.autograd.grad(found.sin().sum(), [*start.values()])
    weights = dict(plain.named_parameters())
    results = []
    for task in range(4):
        inner = plain(x[task : task + 1]).square().mean()
        grads = torch.autograd.grad(inner, [*weights.values()], create_graph=True)
        of_task = {name: weight - 0.1 * grad for (name, weight), grad in zip(weights.items(), grads, strict=True)}
        results.append(functional_call(plain, of_task, (query[task : task + 1],)))
    expected = torch.cat(results)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(outer, torch.autograd.grad(expected.sin().sum(), [*weights.values()]))
