"""convert and revert: what a converted model keeps."""

import abc
import collections.abc
import copy
import gc
import importlib.metadata
import inspect
import io
import pickle
import re
import typing
import weakref
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import expanded_nn as enn
from expanded_nn.modules.base import PerSampleModule
from expanded_nn.modules.registry import EXPANDED
from oracle import Call, assert_close, assert_close_rows, grads_of, loop, rows_of, total_loss


class Block(nn.Module):
    """A user's module: parameters of its own, tied weights, buffers, a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(10, 4, padding_idx=0)
        self.position = nn.Parameter(torch.randn(1, 8, 4))
        self.net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.LayerNorm(4))
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)
        self.note = {"anything": [1, 2]}

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.net(self.emb(words) + self.position[:, : words.shape[1]]) * self.scale)


class MyLinear(nn.Linear):
    """A user's subclass that only adds."""

    def __init__(self, size: int) -> None:
        super().__init__(size, size)
        self.size = size

    def describe(self) -> str:
        return f"{self.size} to {self.size}"


class Doubled(nn.Linear):
    """A user's subclass with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x).tanh()


class Standardized(nn.Conv2d):
    """Weight standardization, as in many a ResNet: the forward is not the layer's."""

    def forward(self, x: Tensor) -> Tensor:
        weight = (self.weight - self.weight.mean((1, 2, 3), keepdim=True)) / self.weight.std((1, 2, 3), keepdim=True)
        return self._conv_forward(x, weight, self.bias)


words = Call((torch.tensor([[1, 2, 3, 0], [4, 4, 4, 4], [9, 0, 0, 1]]),))


def features(*shape: int) -> Call:
    return Call((torch.randn(3, *shape),))


def right(module: nn.Module, call: Call, model: nn.Module | None = None, tol: float = 1e-9) -> nn.Module:
    """The rows of the converted model are those of the loop."""
    expected = loop(module, call, 3)
    model = enn.convert(module) if model is None else model
    enn.per_sample(model, loss_reduction="sum")
    assert_close(call.on(model), call.on(module).detach(), tol=1e-12)
    total_loss(model, call).backward()
    assert_close_rows(rows_of(model), expected, tol)
    assert_close_rows(grads_of(model), {name: r.sum(0) for name, r in expected.items()}, tol)
    return model


def types(model: nn.Module) -> list[type]:
    return [type(m) for m in model.modules()]


# --- copy and in place ----------------------------------------------------------------------------------------


def test_convert_copies() -> None:
    module = Block()
    classes = types(module)
    model = right(module, words)
    assert types(module) == classes
    assert not {id(p) for p in module.parameters()} & {id(p) for p in model.parameters()}
    assert all(p.grad is None and not hasattr(p, "grad_sample") for p in module.parameters())


def test_convert_in_place_keeps_the_parameters() -> None:
    module = Block()
    reference = copy.deepcopy(module)
    parameters, modules = dict(module.named_parameters()), list(module.modules())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model = enn.convert(module, inplace=True)
    assert model is module
    assert list(model.modules()) == modules
    assert all(p is parameters[name] for name, p in model.named_parameters())
    right(reference, words, model)
    before = model.position.detach().clone()
    optimizer.step()
    assert_close(model.position, before - 0.1 * model.position.grad)


def test_isinstance_holds() -> None:
    model = enn.convert(nn.Sequential(Block(), MyLinear(10)))
    assert isinstance(model, nn.Sequential)
    block, mine = model
    assert isinstance(block, Block)
    assert isinstance(mine, MyLinear)
    assert isinstance(mine, enn.Linear)
    assert isinstance(block.head, enn.Linear)
    assert isinstance(block.head, nn.Linear)
    assert isinstance(block.emb, enn.Embedding)
    assert type(block.head) is enn.Linear
    assert type(block.net[1]) is nn.ReLU


def test_everything_else_is_kept() -> None:
    module = Block()
    module.net[0].requires_grad_(False)
    module.net.eval()
    model = enn.convert(module)
    assert model.head.weight is model.emb.weight
    assert not model.net[0].weight.requires_grad
    assert model.position.requires_grad
    assert model.training
    assert not model.net.training
    assert model.note == {"anything": [1, 2]}
    assert model.emb.padding_idx == 0
    assert [name for name, _ in model.named_modules()] == [name for name, _ in module.named_modules()]
    assert [name for name, _ in model.named_buffers()] == [name for name, _ in module.named_buffers()]


def test_dtype_is_kept() -> None:
    model = enn.convert(Block().bfloat16())
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.float().per_sample().position.dtype == torch.float32


def test_hooks_are_kept() -> None:
    module, seen = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4)), []
    module.register_forward_hook(lambda m, args, out: seen.append("root"))
    module[1].register_forward_hook(lambda m, args, out: seen.append("layer"))
    module[1].register_forward_pre_hook(lambda m, args: seen.append("before"))
    module[1].register_full_backward_pre_hook(lambda m, go: seen.append("before backward"))
    module[1].register_full_backward_hook(lambda m, gi, go: seen.append("backward"))
    for model in (module, enn.convert(module).per_sample()):
        seen.clear()
        total_loss(model, words).backward()
        assert seen == ["before", "layer", "root", "before backward", "backward"]


def test_forward_hooks_are_kept_under_the_general_rule() -> None:
    module, seen = Block(), []
    module.net[0].register_forward_pre_hook(lambda m, args: seen.append("before"))
    module.net[0].register_forward_hook(lambda m, args, out: seen.append("layer"))
    total_loss(enn.convert(module).per_sample(), words).backward()
    assert seen == ["before", "layer"]


def test_backward_hook_under_the_general_rule_is_an_error() -> None:
    module = Block()
    module.net[0].register_full_backward_hook(lambda m, gi, go: None)
    model = enn.convert(module).per_sample()
    with pytest.raises(enn.PerSampleError, match=r"Block.*net\.0.*full backward hook"):
        words.on(model)


def test_forward_hook_that_changes_the_output() -> None:
    module = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
    module[0].register_forward_hook(lambda m, args, out: out.tanh())
    right(module, features(4))


def test_converting_twice_changes_nothing() -> None:
    model = enn.convert(enn.convert(Block()))
    assert types(model) == types(enn.convert(Block()))
    right(enn.revert(model), words, model)


def test_module_registered_under_two_names() -> None:
    shared = nn.Linear(4, 4)
    right(nn.Sequential(shared, nn.Tanh(), shared), features(4))


def test_model_without_parameters() -> None:
    model = enn.convert(nn.Sequential(nn.ReLU())).per_sample()
    assert torch.equal(model(torch.ones(2)), torch.ones(2))


# --- the way back ---------------------------------------------------------------------------------------------


def test_revert_gives_the_plain_classes() -> None:
    module = nn.Sequential(Block(), MyLinear(10), Doubled(10, 10), nn.ParameterList([torch.ones(2)]))
    model = enn.convert(module).per_sample()
    back = enn.revert(model)
    assert types(back) == types(module)
    assert types(model) == types(enn.convert(module))
    for p, q in zip(back.parameters(), module.parameters(), strict=True):
        assert torch.equal(p, q)
        assert not hasattr(p, "grad_sample")
    assert back[0].head.weight is back[0].emb.weight


def test_revert_in_place_keeps_the_parameters() -> None:
    model = enn.convert(Block()).per_sample()
    total_loss(model, words).backward()
    parameters = list(model.parameters())
    back = enn.revert(model, inplace=True)
    assert back is model
    assert all(p is q for p, q in zip(back.parameters(), parameters, strict=True))
    back.zero_grad()
    total_loss(back, words).backward()
    assert all(getattr(p, "grad_sample", None) is None for p in back.parameters())


def test_reverted_model_equals_the_original() -> None:
    module = Block()
    back = enn.revert(enn.convert(module).per_sample())
    assert set(vars(back)) == set(vars(module))
    for a, b in zip(back.modules(), module.modules(), strict=True):
        assert set(vars(a)) == set(vars(b))
    assert torch.equal(words.on(back), words.on(module))


def test_state_dict_both_ways() -> None:
    module, other = Block(), Block()
    model = enn.convert(other).per_sample()
    assert list(model.state_dict()) == list(module.state_dict())
    model.load_state_dict(module.state_dict())
    assert torch.equal(words.on(module), words.on(model.per_sample(False)))
    fresh = Block()
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(words.on(module), words.on(fresh))
    right(module, words, model)


# --- users' classes -------------------------------------------------------------------------------------------


def test_user_subclass() -> None:
    model = right(MyLinear(4), features(4))
    assert model.describe() == "4 to 4"


def test_user_subclass_that_overrides_forward() -> None:
    right(Doubled(4, 5), features(4))
    right(nn.Sequential(nn.Linear(4, 4), Doubled(4, 5)), features(6, 4))


def test_weight_standardization() -> None:
    right(Standardized(4, 6, 3, padding=1), features(4, 7, 8))
    right(Standardized(4, 6, 3, padding=1, padding_mode="circular"), features(4, 7, 8))


def test_user_subclass_with_a_parameter_more() -> None:
    class Gained(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 5)
            self.gain = nn.Parameter(torch.ones(5))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.gain

    right(Gained(), features(4))


def test_registered_layer_of_the_users_own() -> None:
    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            return (x + self.shift).tanh()

    @enn.expands(Shift)
    class ExpandedShift(enn.Expanded, Shift):
        def expanded_forward(self, x: Tensor) -> Tensor:
            shift = self.expanded("shift")
            return (x + shift.unflatten(1, (*(1,) * (x.dim() - 2), -1))).tanh()

    model = right(nn.Sequential(Shift(), nn.Linear(4, 2)), features(6, 4))
    assert type(model[0]) is ExpandedShift
    assert type(enn.revert(model)[0]) is Shift


def test_expands_refuses_a_class_that_does_not_derive() -> None:
    with pytest.raises(TypeError, match="does not derive from"):

        @enn.expands(nn.Softplus)
        class Wrong(nn.Module):
            pass


# --- copies of a converted model --------------------------------------------------------------------------------


def pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [pickled, saved, copy.deepcopy], ids=lambda f: f.__name__)
@pytest.mark.parametrize("stepped", [False, True], ids=["fresh", "stepped"])
@pytest.mark.parametrize(
    "module",
    [Block, lambda: MyLinear(4), lambda: Doubled(4, 4), lambda: nn.Linear(4, 4)],
    ids=["block", "subclass", "general", "layer"],
)
def test_copies(module: Any, copied: Any, stepped: bool) -> None:
    torch_module = module()
    call = words if isinstance(torch_module, Block) else features(4)
    model = enn.convert(torch_module).per_sample(loss_reduction="sum")
    if stepped:
        total_loss(model, call).backward()
    twin = copied(model)
    assert types(twin) == types(model)
    if isinstance(twin, Block):
        assert twin.head.weight is twin.emb.weight
    twin.zero_grad()
    total_loss(twin, call).backward()
    assert_close_rows(rows_of(twin), loop(torch_module, call, 3))
    if not stepped:
        assert all(p.grad_sample is None for p in model.parameters())


# --- parametrizations -----------------------------------------------------------------------------------------


PARAMETRIZATIONS: dict[str, Any] = {
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(4, 5)),
    "weight_norm_of_a_convolution": lambda: parametrizations.weight_norm(nn.Conv1d(4, 5, 3)),
    "weight_norm_dim_none": lambda: parametrizations.weight_norm(nn.Linear(4, 5), dim=None),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(4, 5)).eval(),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(4, 4)),
    "orthogonal_householder": lambda: parametrizations.orthogonal(nn.Linear(4, 3), orthogonal_map="householder"),
    "of_the_bias": lambda: parametrize_bias(nn.Linear(4, 5)),
    "two_in_a_row": lambda: parametrize_weight(parametrizations.weight_norm(nn.Linear(4, 5))),
    "with_a_parameter": lambda: parametrize_with_parameter(nn.Linear(4, 5)),
}


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.tanh() * 2


class LowRank(nn.Module):
    """LoRA as a parametrization: a parameter in the parametrization itself."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(5, 2)), nn.Parameter(torch.randn(2, 4))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.a @ self.b


def parametrize_bias(module: nn.Module) -> nn.Module:
    parametrize.register_parametrization(module, "bias", Symmetric())
    return module


def parametrize_weight(module: nn.Module) -> nn.Module:
    parametrize.register_parametrization(module, "weight", Symmetric())
    return module


def parametrize_with_parameter(module: nn.Module) -> nn.Module:
    parametrize.register_parametrization(module, "weight", LowRank())
    return module


def shape_for(module: nn.Module) -> tuple[int, ...]:
    return (4, 7) if isinstance(module, nn.Conv1d) else (4,)


@pytest.mark.parametrize("make", PARAMETRIZATIONS.values(), ids=PARAMETRIZATIONS)
@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "inplace"])
def test_parametrization(make: Any, inplace: bool) -> None:
    module = make()
    call = features(*shape_for(module))
    model = right(module, call, enn.convert(copy.deepcopy(module), inplace=True) if inplace else enn.convert(module))
    assert list(model.state_dict()) == list(module.state_dict())
    assert parametrize.is_parametrized(model)
    back = enn.revert(model)
    assert parametrize.is_parametrized(back)
    assert torch.equal(call.on(back), call.on(module))
    assert isinstance(back, type(make()).__mro__[1])
    assert not any(issubclass(cls, enn.Expanded) for cls in type(back).__mro__)


@pytest.mark.parametrize("make", PARAMETRIZATIONS.values(), ids=PARAMETRIZATIONS)
def test_parametrization_inside_a_model(make: Any) -> None:
    module = make()
    right(nn.Sequential(nn.Tanh(), module, nn.Tanh()), features(*shape_for(module)))


@pytest.mark.parametrize("layer", [nn.Linear, nn.Embedding])
def test_spectral_norm_in_train_mode(layer: Any) -> None:
    """The power iteration runs once a forward, as in torch, and the rows are those of the vectors it found."""
    module = parametrizations.spectral_norm(layer(4, 5))
    model = enn.convert(module).per_sample(loss_reduction="sum")
    call = features(4) if layer is nn.Linear else Call((torch.randint(4, (3, 2)),))
    total_loss(model, call).backward()
    call.on(module)
    for (name, a), b in zip(model.named_buffers(), module.buffers(), strict=True):
        assert_close(a, b, tol=1e-12, name=name)
    assert_close_rows(rows_of(model), loop(module.eval(), call, 3))


def test_cached_parametrization() -> None:
    module = parametrizations.weight_norm(nn.Linear(4, 4))
    model = enn.convert(module).per_sample(loss_reduction="sum")
    call = features(4)
    with parametrize.cached():
        out = model(model(*call.args))
    out.sin().sum().backward()

    def twice(module: nn.Module, call: Call, first: int = 0) -> Tensor:
        return module(module(*call.args)).sin().sum()

    assert_close_rows(rows_of(model), loop(module, call, 3, objective=twice))


def test_parametrization_removed_from_a_converted_model() -> None:
    module = parametrizations.weight_norm(nn.Linear(4, 5))
    model = enn.convert(module)
    parametrize.remove_parametrizations(model, "weight")
    parametrize.remove_parametrizations(module, "weight")
    right(module, features(4), model)


def test_parametrization_registered_on_a_converted_model() -> None:
    module = nn.Linear(4, 5)
    model = enn.convert(module)
    parametrizations.weight_norm(module)
    parametrizations.weight_norm(model)
    right(module, features(4), model)


def test_parametrized_weight_used_outside_is_an_error() -> None:
    model = enn.convert(parametrizations.weight_norm(nn.Linear(4, 4))).per_sample()
    with pytest.raises(enn.PerSampleError, match=r"parametrizations\.weight"):
        (total_loss(model, features(4)) + model.weight.sum()).backward()


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize("in_a_model", [False, True])
def test_old_weight_norm_in_place(in_a_model: bool) -> None:
    def make() -> nn.Module:
        torch.manual_seed(3)
        layer = nn.utils.weight_norm(nn.Linear(4, 5))
        return nn.Sequential(layer, nn.Tanh()) if in_a_model else layer

    module, call = make(), features(4)
    expected = {name: r.detach() for name, r in loop(module, call, 3, create_graph=True).items()}  # makes no copy
    model = enn.convert(make(), inplace=True).per_sample(loss_reduction="sum")
    assert_close(call.on(model), call.on(module).detach(), tol=1e-12)
    total_loss(model, call).backward()
    assert_close_rows(rows_of(model), expected)


def test_lists_with_the_names_of_methods() -> None:
    class Folding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.flatten(0, 1)).view_as(x)

    class Scaled(nn.Module):  # as in N-BEATS
        def __init__(self) -> None:
            super().__init__()
            self.parameters = nn.ParameterList([torch.rand(4), torch.rand(4)])  # type: ignore[assignment]

        def forward(self, x: Tensor) -> Tensor:
            scale, shift = self._modules["parameters"]
            return x * scale + shift

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.modules = nn.ModuleList([Folding(), Scaled()])  # type: ignore[assignment]

        def forward(self, x: Tensor) -> Tensor:
            folding, scaled = self._modules["modules"]
            return scaled(folding(x))

    call = features(3, 4)
    model = enn.convert(Named()).per_sample(loss_reduction="sum")
    with pytest.warns(enn.PerSampleWarning, match=r"modules\.0 \(Folding\): runs sample by sample"):
        total_loss(model, call).backward()
    assert_close_rows(rows_of(model), loop(Named(), call, 3))


# --- what cannot be converted -----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.torch.jit.*is deprecated")
def test_one_error_lists_everything() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fine = nn.Linear(2, 2)
            self.lazy = nn.LazyLinear(3)
            self.inner = nn.Sequential(nn.ReLU(), nn.SyncBatchNorm(4))
            self.scripted = torch.jit.script(nn.Linear(2, 2))

    with pytest.raises(enn.ConversionError) as info:
        enn.convert(Model())
    text = str(info.value)
    for name, class_name in (("lazy", "LazyLinear"), ("inner.1", "SyncBatchNorm"), ("scripted", "")):
        line = next(line for line in text.splitlines() if name in line)
        assert class_name in line
    assert "fine" not in text


def test_refused_model_is_left_as_it_was() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3))
    classes = types(module)
    with pytest.raises(enn.ConversionError, match=r"1 .*LazyLinear"):
        enn.convert(module, inplace=True)
    assert types(module) == classes


def test_plain_module_with_parameters_is_refused_by_per_sample() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ours, self.plain = enn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.plain(self.ours(x))

    model = enn.convert(nn.Sequential(nn.Linear(2, 2)))
    model.append(nn.Linear(2, 2))
    with pytest.raises(enn.PerSampleError, match=r"1.*Linear.*(?s:.*)convert"):
        model.per_sample()


# --- what other tools see ---------------------------------------------------------------------------------------

TWINS = [(plain, twin) for plain, twin in EXPANDED.items() if isinstance(plain, type) and issubclass(twin, plain)]


@pytest.mark.parametrize(("plain", "twin"), TWINS, ids=[plain.__name__ for plain, _ in TWINS])
def test_the_forward_of_a_twin_has_the_plain_signature(plain: Any, twin: Any) -> None:
    assert inspect.signature(twin.forward) == inspect.signature(plain.forward)
    assert twin.forward.__doc__ == plain.forward.__doc__
    assert twin.forward.__annotations__ == plain.forward.__annotations__


class Described(nn.Module):
    """A module of the user's own around layers, with a parameter of its own or without."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
        self.gain = nn.Parameter(torch.ones(3)) if own else None

    def forward(self, x: Tensor, scale: float = 2.0) -> Tensor:
        """Scales."""
        return self.body(x) * (scale if self.gain is None else scale * self.gain)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("mode", [False, True])
def test_a_converted_model_has_the_plain_signature(own: bool, mode: bool) -> None:
    module = Described(own)
    model = enn.convert(module).per_sample(mode)
    for own_forward, found in ((module.forward, model.forward), (Described.forward, type(model).forward)):
        assert inspect.signature(found) == inspect.signature(own_forward)
        assert (found.__doc__, found.__annotations__) == (own_forward.__doc__, own_forward.__annotations__)
    assert inspect.signature(enn.revert(model).forward) == inspect.signature(module.forward)


@pytest.mark.parametrize("own", [False, True])
def test_symbolic_trace_with_the_mode_off(own: bool) -> None:
    model, x = enn.convert(Described(own)), torch.randn(5, 4)
    traced = torch.fx.symbolic_trace(model)
    assert [node.name for node in traced.graph.nodes if node.op == "placeholder"] == ["x", "scale"]
    assert torch.equal(traced(x, 3.0), model(x, 3.0))


@pytest.mark.parametrize("own", [False, True])
def test_a_traced_model_is_copied(own: bool) -> None:
    """A module of torch.fx has a class of its own, which its copy takes no part in."""
    traced, x = torch.fx.symbolic_trace(Described(own)), torch.randn(5, 4)
    model = enn.convert(nn.Sequential(traced)).per_sample(loss_reduction="sum")
    copied = copy.deepcopy(model)
    for each in (copied, pickle.loads(pickle.dumps(model)), model):
        each[0](x, 3.0).sum().backward()
        rows = [parameter.grad_sample for parameter in each.parameters()]
        assert all(torch.allclose(own_rows.sum(0), p.grad) for own_rows, p in zip(rows, each.parameters(), strict=True))
        assert len(rows) == 2 + own
        assert all(len(own_rows) == 5 for own_rows in rows)
    assert torch.equal(enn.revert(model)[0](x, 3.0), traced(x, 3.0))
    assert not isinstance(enn.revert(model)[0], PerSampleModule)
    assert isinstance(model[0], PerSampleModule)
    assert copied[0]._recorder is not model[0]._recorder


class Sealed(nn.Module):
    """It refuses attributes that it does not have."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.gain = nn.Parameter(torch.ones(3)) if own else None
        self.__dict__["is_sealed"] = True

    def __setattr__(self, name: str, value: Any) -> None:
        known = {**self.__dict__, **self.__dict__.get("_parameters", {}), **self.__dict__.get("_modules", {})}
        if "is_sealed" in known and name not in known:
            raise AttributeError(f"there is no {name}")
        super().__setattr__(name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * (1 if self.gain is None else self.gain)


@pytest.mark.parametrize("own", [False, True])
def test_a_class_that_refuses_new_attributes(own: bool) -> None:
    module, x = Sealed(own), torch.randn(5, 4)
    model = copy.deepcopy(enn.convert(nn.Sequential(module)).per_sample())
    model(x).sum(1).mean().backward()
    for parameter in model.parameters():
        assert torch.allclose(parameter.grad_sample.mean(0), parameter.grad)
    assert enn.check(model, x).ok
    assert type(enn.revert(model)[0]) is Sealed


@pytest.mark.parametrize("own", [False, True])
def test_export_takes_dynamic_shapes_by_the_names_of_the_arguments(own: bool) -> None:
    model, x = enn.convert(Described(own)), torch.randn(7, 4)
    shapes = {"x": {0: torch.export.Dim("samples")}, "scale": None}
    exported = torch.export.export(model, (torch.randn(5, 4), 3.0), dynamic_shapes=shapes)
    assert torch.equal(exported.module()(x, 3.0), model(x, 3.0))


def test_a_class_that_registers_its_subclasses_hears_nothing_of_its_twin() -> None:
    heard: list[type] = []

    class Registered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def __init_subclass__(cls, *, key: str, **others: Any) -> None:
            super().__init_subclass__(**others)
            heard.append(cls)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

    class Own(Registered, key="own"):
        pass

    model = enn.convert(nn.Sequential(Own())).per_sample()
    model(torch.randn(5, 4)).sum().backward()
    assert model[0].layer.weight.grad_sample.shape == (5, 3, 4)
    assert heard == [Own]


def test_the_version_is_that_of_the_metadata() -> None:
    assert enn.__version__ == importlib.metadata.version("expanded_nn")


def test_make_runs_the_oldest_and_the_newest_torch_of_the_metadata() -> None:
    root = Path(__file__).parent.parent
    lowest, above = re.findall(r"torch>=([\d.]+),<([\d.]+)", (root / "setup.cfg").read_text())[0]
    oldest, newest = re.findall(r"TORCH=([\d.]+)", (root / "Makefile").read_text())
    assert oldest.startswith(f"{lowest}.")
    assert int(newest.split(".")[1]) + 1 == int(above.split(".")[1])


class OwnNames(nn.Module):
    """Attributes whose names converted modules might want for themselves."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(3))
        self.lin = nn.Linear(3, 3)
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        self.batch_size = len(x)
        if getattr(self, "name", None) == "double":
            x = 2 * x
        elif isinstance(getattr(self, "name", None), nn.Module):
            x = self.name(x)
        return self.lin(x) * self.scale


@pytest.mark.parametrize(
    "attributes",
    [
        {"name": "double"},
        {"name": nn.Tanh()},
        {"batch_size": 7},
        {"samples": 3, "rows": 2, "passes": nn.Identity()},
    ],
    ids=str,
)
def test_attributes_keep_their_meaning(attributes: dict[str, Any]) -> None:
    module, x = OwnNames(**attributes), torch.randn(4, 3)
    model = enn.convert(module)
    assert torch.equal(model(x), module(x))
    model.per_sample()
    torch.testing.assert_close(model(x), module(x))
    model(x).square().sum(1).mean().backward()
    for i in range(4):
        grads = torch.autograd.grad(module(x[i : i + 1]).square().sum(), list(module.parameters()))
        for parameter, grad in zip(model.parameters(), grads, strict=True):
            torch.testing.assert_close(parameter.grad_sample[i], grad)


class Shadows(nn.Linear):
    def checked(self) -> str:
        return "mine"


class OwnMode(nn.Sequential):
    def per_sample(self) -> str:
        return "mine"

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


@pytest.mark.parametrize(
    ("module", "where", "name"),
    [
        (OwnNames(expanded=True), "the model itself (OwnNames)", "expanded"),
        (OwnNames(checked=nn.Linear(3, 3)), "the model itself (OwnNames)", "checked"),
        (nn.Sequential(Shadows(3, 3)), "0 (Shadows)", "checked"),
        (OwnMode(nn.Linear(3, 3)), "the model itself (OwnMode)", "per_sample"),
    ],
    ids=str,
)
def test_names_with_two_meanings_are_refused(module: nn.Module, where: str, name: str) -> None:
    with pytest.raises(enn.ConversionError, match=re.escape(f"{where}: it has a '{name}' of its own")):
        enn.convert(module)
    assert not any(isinstance(each, enn.Expanded) for each in module.modules())


class MadeOfWidth(nn.Module):
    """A class whose instances are made with an argument."""

    def __new__(cls, width: int) -> "MadeOfWidth":
        return super().__new__(cls)

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.layer = width, nn.Linear(3, width)

    def __getnewargs__(self) -> tuple[int]:
        return (self.width,)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class MadeByName(MadeOfWidth):
    def __new__(cls, *, width: int) -> "MadeByName":
        return super().__new__(cls, width)

    def __init__(self, *, width: int) -> None:
        super().__init__(width)

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, int]]:
        return (), {"width": self.width}


@pytest.mark.parametrize("kind", [MadeOfWidth, MadeByName])
def test_a_class_whose_new_takes_arguments_is_copied(kind: Any) -> None:
    model = enn.convert(kind(width=2)).per_sample()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other(torch.ones(4, 3)).sum().backward()
        assert other.layer.weight.grad_sample.shape == (4, 2, 3)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_protocol_of_pickle(protocol: int) -> None:
    model = enn.convert(nn.Sequential(nn.Linear(3, 2))).per_sample()
    loaded = pickle.loads(pickle.dumps(model, protocol))
    loaded(torch.ones(4, 3)).sum().backward()
    assert loaded[0].weight.grad_sample.shape == (4, 2, 3)


class Sized(abc.ABC, nn.Module):
    """Python lays its objects out in another way than those of other modules."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(3, 3), nn.Parameter(torch.rand(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * self.scale)

    def __len__(self) -> int:
        return 1


class Generic(typing.Generic[typing.TypeVar("T")], nn.Linear):  # type: ignore[misc]
    pass


class Around(collections.abc.Sized, nn.Module):
    """One without parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(Sized(), Generic(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.parts(x)

    def __len__(self) -> int:
        return 2


@pytest.mark.parametrize("make", [Sized, lambda: Generic(3, 3), Around], ids=["abc", "generic", "around"])
def test_a_base_without_attributes_comes_first(make: Callable[[], nn.Module]) -> None:
    module = make()
    model, call = enn.convert(module).per_sample(loss_reduction="sum"), Call((torch.randn(4, 3),))
    for other in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(other, type(module))
        assert isinstance(other, PerSampleModule)
        other.zero_grad()
        total_loss(other, call).backward()
        assert_close_rows(rows_of(other), loop(module, call, 4))
    assert type(enn.revert(model)) is type(module)


def test_parametrized_with_such_a_base() -> None:
    module = parametrizations.weight_norm(Generic(3, 3))
    model, call = enn.convert(module).per_sample(loss_reduction="sum"), Call((torch.randn(4, 3),))
    total_loss(model, call).backward()
    assert_close_rows(rows_of(model), loop(module, call, 4))


@pytest.mark.parametrize("bound", [False, True])
def test_a_function_that_holds_a_method_of_a_layer(bound: bool) -> None:
    """In a copy it would go on using the original's weights."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    plain = module[0].forward
    function = lambda *args: plain(args[-1]).relu()  # noqa: E731
    module[0].forward = MethodType(function, module[0]) if bound else function
    with pytest.raises(enn.ConversionError, match=r"0\.forward refers to this model"):
        enn.convert(module)


def test_a_hook_that_keeps_in_a_dict_of_the_model() -> None:
    """A copy of the model would have a dict of its own, in which the hook keeps nothing."""
    module: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    kept = module.kept = {}
    module[0].register_forward_hook(lambda m, args, result: kept.update(result=result))
    with pytest.raises(enn.ConversionError, match=r"0\._forward_hooks refers to .* dicts"):
        enn.convert(module)
    enn.convert(module, inplace=True)(torch.randn(3, 4))
    assert module.kept["result"].shape == (3, 4)


class Flat(nn.Module):
    """Its parameters have dots in their names, as those of tensordict."""

    def __init__(self) -> None:
        super().__init__()
        self._parameters["0.weight"] = nn.Parameter(torch.randn(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self._parameters["0.weight"]


def test_names_of_parameters_with_dots() -> None:
    module, call = nn.Sequential(Flat(), nn.Linear(2, 1)), Call((torch.randn(4, 3),))
    model = enn.convert(module).per_sample(loss_reduction="sum")
    total_loss(model, call).backward()
    assert_close_rows(rows_of(model), loop(module, call, 4))


class Prompted(nn.Module):
    """Has no parameters of its own until it gets a prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.prompt: nn.Parameter | None = None

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x if self.prompt is None else x + self.prompt)


@pytest.mark.parametrize("inplace", [False, True])
def test_a_module_that_gets_a_parameter_is_converted_again(inplace: bool) -> None:
    model, x = enn.convert(nn.Sequential(Prompted(), nn.Tanh())).per_sample(), torch.randn(4, 5)
    model(x).mean().backward()
    model.zero_grad()
    model[0].prompt = nn.Parameter(torch.randn(5))
    words = r"^0.prompt: the parameter belongs to the Prompted, which had no parameters when .*Convert the model again"
    with pytest.raises(enn.PerSampleError, match=words):
        model(x).mean().backward()
    model.zero_grad()
    again = enn.convert(model, inplace=inplace).per_sample(loss_reduction="sum")
    assert (again is model) == inplace
    expected = loop(enn.revert(again), Call((x,)), 4)
    total_loss(again, Call((x,))).backward()
    assert_close_rows(rows_of(again), expected)
    assert type(enn.revert(again)[0]) is Prompted


@pytest.mark.parametrize("own", [False, True])
def test_a_class_that_is_made_in_a_function_goes_with_its_model(own: bool) -> None:
    def made() -> weakref.ref[type]:
        class Made(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(5, 3)
                self.scale = nn.Parameter(torch.ones(3)) if own else 1.0

            def forward(self, x: Tensor) -> Tensor:
                return self.layer(x) * self.scale

        plain = Made()
        model, other = enn.convert(plain).per_sample(), enn.convert(plain)
        assert type(model) is type(other) is type(copy.deepcopy(model))
        model(torch.randn(4, 5)).mean().backward()
        return weakref.ref(Made)

    ref = made()
    gc.collect()
    assert ref() is None
