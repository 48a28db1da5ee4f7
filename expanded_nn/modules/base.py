"""What all expanded modules share: the switch, the root that begins a pass, the layer that sees expanded weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial, update_wrapper
from types import FunctionType
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from expanded_nn._errors import complaint, named, refuse_other_kind
from expanded_nn.common.batch import batch_of, data_in, in_order, lies_turned, tensors
from expanded_nn.common.containers import listed
from expanded_nn.common.meanwhile import meanwhile
from expanded_nn.common.modes import WithoutSelection, is_selective, outside_of_graph, unseen
from expanded_nn.common.shared import as_no_view, stood_for
from expanded_nn.modules import layout
from expanded_nn.modules.twin_class import as_plain_graph, reduced_twin, twin_class, unpickled_graph, untouched
from expanded_nn.recording.escalate import Learned
from expanded_nn.recording.lift import lifted
from expanded_nn.recording.order import Order
from expanded_nn.recording.parametrized import computed_again, of_each_sample, parametrization_of
from expanded_nn.recording.recorder import Forward, Recorder, Settings, modules_in
from expanded_nn.recording.settings import refusing_other_settings

Model = TypeVar("Model", bound=nn.Module)
_ZERO_GRAD = nn.Module.zero_grad


class _AsBefore:
    """The default of each setting: it stays as it was said last."""

    def __repr__(self) -> str:
        return "<as before>"


AS_BEFORE: Any = _AsBefore()


def _show_plain_forward(kind: type[PerSampleModule]) -> None:
    """Gives the forward of a twin the signature and the docstring of the plain class's."""
    ancestors = (base for base in kind.__mro__ if not issubclass(base, PerSampleModule) and "forward" in vars(base))
    plain: Any = next(ancestors, nn.Module)
    own: Any = kind.forward
    if plain is nn.Module or getattr(own, "__wrapped__", None) is plain.forward:
        return
    shown = FunctionType(own.__code__, own.__globals__, own.__name__, own.__defaults__, own.__closure__)
    kind.forward = update_wrapper(shown, plain.forward)  # type: ignore[method-assign, unused-ignore]


class PerSampleModule(nn.Module):
    """A module that can be switched to per-sample mode.

    Attributes:
        plain_class: The class that `revert` gives back, where it is not the first `torch.nn` class in the ancestry.
        calls_others: Whether its forward runs code of the user's, which may put the samples in another order.
        compares_first: Whether its first forward compares its samples itself.
    """

    plain_class: ClassVar[type[nn.Module] | None] = None
    calls_others: ClassVar[bool] = True
    compares_first: ClassVar[bool] = False
    _alone_class: ClassVar[type[PerSampleModule]]  # the general rule for a module as a whole, which is built on this
    _recorder: Recorder | None = None
    _learned: Learned | None = None  # why it goes sample by sample, where the model found so by itself
    _settings: Settings = Settings()  # as they were said last

    def __init_subclass__(cls, **arguments: Any) -> None:
        if cls.plain_class is None:  # the user's own `__init_subclass__` is not for its twin
            super().__init_subclass__(**arguments)
        _show_plain_forward(cls)

    @refusing_other_settings
    def per_sample(
        self: Model,
        mode: bool = True,
        *,
        loss_reduction: str = AS_BEFORE,
        batch_first: bool = AS_BEFORE,
        batch_size: int | None = AS_BEFORE,
        materialize: bool = AS_BEFORE,
        accumulate_grad: bool = AS_BEFORE,
        keep_factors: bool = AS_BEFORE,
        escalate: bool = AS_BEFORE,
        compare: bool = AS_BEFORE,
    ) -> Model:
        """Switches per-sample gradients on or off for this module and all within it.

        On, a backward leaves `param.grad_sample`, `(B, *param.shape)`, beside `param.grad`: row i is the gradient
        of sample i's own loss. Off, every layer runs the very `torch.nn` code. Settings keep their last
        values, also while the mode is off; only those named in the call change.

        Args:
            mode: Whether to switch on. Either way the rows held so far are dropped.
            loss_reduction: How the loss was reduced over the samples. With `"mean"`, the default, the rows are scaled
                by B, so that `grad_sample.mean(0) == grad`; with `"sum"`, `grad_sample.sum(0) == grad`.
            batch_first: Whether samples stand first, `(B, T, …)`, as by default, or second, `(T, B, …)`, in the
                model's input and in the inputs of layers that have no `batch_first` and no fixed layout of their own.
            batch_size: B, where it is not the size of the first tensor that the model is called with (`None`).
            materialize: Whether to make `grad_sample` dense during the backward; by default it may be factored.
            accumulate_grad: Whether a backward adds to `.grad`, as always (`True`). Without it `.grad` is left alone
                and the rows are those of the last backward.
            keep_factors: Whether rows of linear layers and convolutions are always held as their factors, the layer's
                input and the gradient of its output, of which `PerSampleGrads.kronecker` and
                `gram(per_position=True)` are made. By default (`False`) small rows, 32,768 numbers in all B of them,
                and those whose factors are larger are dense from the start, which takes less time and memory.
            escalate: Whether a module goes sample by sample, with a `PerSampleWarning`, where a layer in it cannot tell
                the samples apart (`True`). Without it that is an error.
            compare: Whether forwards are compared with those of some of the samples, now and then, so that samples
                which mix are an error (`True`).

        Returns:
            The module itself.

        Raises:
            PerSampleError: If a module within holds parameters and was not converted.
            ValueError: If `loss_reduction` or `batch_size` has no meaning, or rows are to be dense and factored.
            TypeError: If `mode`, or a setting that is on or off, is neither `True` nor `False`; or if there is no such
                setting.
        """
        told = {name: value for name, value in locals().items() if value is not AS_BEFORE}
        del told["self"], told["mode"]
        refuse_other_mode(mode)
        settings = cast(Settings, self._settings)
        switch(self, replace(settings, **told, says_layout=settings.says_layout or "batch_first" in told), mode=mode)
        return self

    def _learn(self, learned: Learned | None) -> None:
        """Sends the module through the general rule, for the reason learned; with `None` makes it what it was."""
        kind = None if self._learned is None else self._learned.kind
        for attribute in ("_learned", "_trials"):
            self.__dict__.pop(attribute, None)
        if learned is not None:
            self.__dict__["_learned"] = learned
            kind = learned.kind if issubclass(learned.kind, self._alone_class) else self._alone_class
        if kind is not None and self.plain_class is not None:
            object.__setattr__(self, "__class__", twin_class(kind, self.plain_class))

    def _kind(self) -> type[PerSampleModule] | None:
        """The library's class that its own derives from, if the general rule can take its place; else `None`."""
        if self._learned is not None or "plain_class" not in vars(type(self)):
            return None if self._learned is None else self._learned.kind
        kind = next(base for base in type(self).__bases__ if issubclass(base, PerSampleModule))
        return kind if issubclass(kind, Root | self._alone_class) or issubclass(self._alone_class, kind) else None

    def _untouched(self) -> nn.Module:
        """The module as it was before `convert`, with the same parameters."""
        return untouched(self)

    @property
    def model_batch_first(self) -> bool:
        """Whether samples stand first in what has no layout of its own, as `per_sample(batch_first=...)` said."""
        return self._recorder is None or self._recorder.settings.batch_first

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if stood_for(param) is not param:  # a forward gives it a second name, which is the parameter's afterwards
            self._parameters[name] = param
            return
        super().register_parameter(name, param)
        if self._recorder is not None and param is not None:
            self._recorder.add_member(param)

    def zero_grad(self, set_to_none: bool = True) -> None:
        recorder, inherited = self._recorder, super().zero_grad
        is_torchs = set_to_none and getattr(inherited, "__func__", None) is _ZERO_GRAD
        if recorder is None or not is_torchs:  # zeros, or a method of the user's
            inherited(set_to_none)
        if recorder is not None:
            parameters = [p for module in modules_in(self) for p in module._parameters.values() if p is not None]
            recorder.drop(parameters, grads=is_torchs)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._join_recorder()

    def _join_recorder(self) -> None:
        """Makes a copy known to its recorder, which was copied with it."""
        if self._recorder is not None:
            known = self._recorder.leaves  # of a shallow copy, whose parameters are the model's own
            _prepare(p for p in self.parameters() if known.get(p) is None)  # those in a ParameterList within, too
            self._recorder.adopt(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.plain_class is None:
            return super().__reduce_ex__(protocol)
        kind = next(base for base in type(self).__bases__ if issubclass(base, PerSampleModule))
        if issubclass(self.plain_class, GraphModule):
            with as_plain_graph(self):
                return unpickled_graph, (kind, *self.__reduce_ex__(protocol)[:2])
        return reduced_twin(kind, self.plain_class, super().__reduce_ex__(protocol))

    def __prepare_scriptable__(self) -> Any:
        """Called by `torch.jit.script`, which cannot compile what a twin adds to the plain class."""
        raise complaint(
            "torch.jit.script", "the model is converted", "a plain one", "Script its plain copy: revert(model)."
        )


def _with_rows(module: Root | Expanded, recorder: Recorder, args: Any, kwargs: Any) -> Any:
    """The forward in per-sample mode: a part of the forward that runs, or else one that may start over."""
    if torch.compiler.is_compiling():
        return outside_of_graph(module.forward, *args, **kwargs)
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        raise complaint(
            "torch.jit.trace", "the model is in per-sample mode", "that mode off", "Trace it with per_sample(False)."
        )
    recorder.refuse_other_thread(module)
    args, kwargs = tuple(map(listed, args)), {name: listed(value) for name, value in kwargs.items()}
    run = module._in_pass if recorder.escalation.runs else partial(recorder.escalation.run, module)
    with WithoutSelection() if is_selective() else nullcontext():
        return run(args, kwargs)


class Root(PerSampleModule):
    """A module without parameters of its own, a model or a part of it: its forward begins a pass where none runs."""

    def samples_in(self, *args: Any, **kwargs: Any) -> int | None:
        """B, where this module is the root of a call."""
        return batch_of((args, in_order(self, kwargs)), batch_first=self.model_batch_first)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        recorder = self._recorder
        if recorder is None or recorder.general_rule is not None:
            return super().forward(*args, **kwargs)
        if not torch.is_grad_enabled():
            outer = recorder.passes.no_grad_forward  # noted for layers within it that switch gradients on
            if recorder.forward is not None or outer.call is not None or torch.compiler.is_compiling():
                return super().forward(*args, **kwargs)
            with meanwhile(outer, call=(self, self.samples_in(*args, **kwargs), (args, kwargs))):
                return super().forward(*args, **kwargs)
        return _with_rows(self, recorder, args, kwargs)

    def _in_pass(self, args: Any, kwargs: Any) -> Any:
        """The forward, as a part of the outermost one that runs, or as that itself."""
        recorder = self._recorder
        if recorder is None or recorder.forward is not None:
            return super().forward(*args, **kwargs)
        return recorder.outermost_forward(self, super().forward, args, kwargs)


class Expanded(PerSampleModule):
    """A layer whose per-sample forward sees its parameters expanded over the batch.

    A subclass names the rank of each parameter in `ranks` and writes `expanded_forward`.

    Attributes:
        ranks: Parameter name -> its number of dimensions in `torch.nn`, without a batch dimension.
        always_converted: Whether `convert` turns a layer of this class into its twin even if it has no parameters.
        positionwise: Whether the layer treats every position independently.
        feature_dims: How many dimensions at the end of an input are a sample's own at the least.
        batched_dims: How many dimensions its first input has at the least, if it has a dimension of the samples.
        fixed_layout: Whether samples stand first by definition, as in `(N, C, H, W)`, whatever the model says.
        returns_fresh: Whether nothing else holds the memory of what torch's layer returns. In a pass the result is then
            made no view, so that slices of it are recognized.
    """

    ranks: ClassVar[dict[str, int]] = {}
    calls_others: ClassVar[bool] = False
    always_converted: ClassVar[bool] = False
    positionwise: ClassVar[bool] = False
    feature_dims: ClassVar[int] = 0
    batched_dims: ClassVar[int] = 1
    fixed_layout: ClassVar[bool] = False
    returns_fresh: ClassVar[bool] = False

    def expanded_forward(self, *args: Any, **kwargs: Any) -> Any:
        """The forward in per-sample mode, with `self.expanded(name)` in place of `self.<name>`."""
        raise NotImplementedError(f"{type(self).__name__} has to define expanded_forward")

    def samples_in(self, *args: Any, **kwargs: Any) -> int | None:
        """B, where this layer is called on its own."""
        arguments = args, in_order(self, kwargs)
        first = next(data_in(arguments), None)
        are_first = not self._samples_dim or (first is not None and first.dim() <= self.feature_dims + 1)
        return batch_of(arguments, batch_first=are_first)

    def _of_samples(self, args: Any, kwargs: Any) -> Any:
        """The arguments that may have samples."""
        return args, kwargs

    def sample_dims(self, tensors: int) -> list[int]:
        """Where the samples stand in each of the first tensors among the arguments, and likewise in the result."""
        return [self._samples_dim] * tensors

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        recorder = self._recorder
        if recorder is not None and recorder.general_rule is not None:
            return self._inside_general(recorder, args, kwargs)
        if recorder is None or not torch.is_grad_enabled() or not self._has_rows():
            return self._without_rows(recorder, args, kwargs)
        return _with_rows(self, recorder, args, kwargs)

    def _without_rows(self, recorder: Recorder | None, args: Any, kwargs: Any) -> Any:
        """The forward without rows: the mode is off, gradients are off, or the parameters require none."""
        forward = None if recorder is None else recorder.forward
        if forward is not None and forward.is_of_other_thread:  # which trains, and this one evaluates
            return super().forward(*args, **kwargs)
        if recorder is not None:
            recorder.note_plain_forward()
            if torch.is_grad_enabled() and recorder.forward is None:
                recorder.passes.note_without_rows(self.samples_in(*args, **kwargs))
        if self._own_batch() is not None:  # weights of each sample's own, as by `functional_call`
            return self.expanded_forward(*args, **kwargs)
        order = None if recorder is None else recorder.order
        if order is not None and not torch.is_grad_enabled() and self._has_rows():
            order.look_at(self, self._of_samples(args, kwargs), is_plain=True)
        if order is None or self.calls_others:
            output = super().forward(*args, **kwargs)
        else:
            output = self._as_one_operation(order, super().forward, args, kwargs)
        is_kept = not self.returns_fresh or recorder is None or recorder.forward is None
        return output if is_kept else as_no_view(output)

    def _in_pass(self, args: Any, kwargs: Any) -> Any:
        """The forward, as a part of the outermost one that runs, or as that itself."""
        recorder = self._recorder
        assert recorder is not None
        order = recorder.order
        if order is not None:
            order.look_at(self, self._of_samples(args, kwargs))
        if recorder.forward is not None:
            if order is None or self.calls_others:
                return self._noting_what_is_shared(recorder.forward, args, kwargs)
            return self._as_one_operation(order, self._noting_what_is_shared, (recorder.forward, args, kwargs), {})
        return recorder.outermost_forward(self, self.expanded_forward, args, kwargs)

    def _as_one_operation(self, order: Order, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The layer's result; `order` sees the layer as one operation, and where the samples stand in the result."""
        result = order.as_one_operation(function, args, kwargs, self)
        if self.fixed_layout or type(self).sample_dims is not Expanded.sample_dims:
            results = list(data_in(result))
            order.note_layout(self, results, self.sample_dims(len(results)))
        return result

    def _noting_what_is_shared(self, forward: Forward, args: Any, kwargs: Any) -> Any:
        """The forward inside of another one; notes there a result that all samples share."""
        notes, order = forward.notes, forward.order
        if order is None:
            return self.expanded_forward(*args, **kwargs)
        before, known, broadcast = len(notes.inputs_shared), len(order.copies.known), len(notes.broadcast)
        result = self.expanded_forward(*args, **kwargs)
        inputs_shared = notes.inputs_shared[before:]
        if inputs_shared and all(inputs_shared) and len(order.copies.known) == known:
            # without `sample_dims` of its own, only a single result is known to have its samples where the input has
            says_dims = type(self).sample_dims is not Expanded.sample_dims
            results = list(tensors(result)) if says_dims else [result]
            dims = [self._samples_dim, *self.sample_dims(len(results))[1:]]
            for shared_result, dim in zip(results, dims, strict=False):
                forward.note_shared(self, shared_result, dim, is_new=len(notes.broadcast) > broadcast)
        return result

    def _inside_general(self, recorder: Recorder, args: Any, kwargs: Any) -> Any:
        """Inside the general rule's `vmap`: on the whole batch if it can be, sample by sample otherwise."""
        lent, result = recorder.general_rule, NotImplemented
        if lent and torch.is_grad_enabled() and (recorder.settings.batch_first or hasattr(self, "batch_first")):
            with meanwhile(recorder, general_rule=None):
                result = lifted(self, lent, args, kwargs)
        return super().forward(*args, **kwargs) if result is NotImplemented else result

    def expanded(self, name: str) -> Any:
        """The parameter `name` as `(B, *shape)`, or `None` where the layer has none.

        A weight that comes with a batch dimension of its own, as through `torch.func.functional_call`, is taken as
        it is.
        """
        parameter = getattr(self, name)
        if parameter is None:
            return None
        if self._is_batched(name, parameter):
            parametrization = parametrization_of(self, name)
            return parameter if parametrization is None else of_each_sample(self.qualified_name, parametrization)
        if self._recorder is None or not torch.is_grad_enabled() or self._recorder.current_pass is None:
            return parameter.expand(self.pass_batch_size, *parameter.shape)
        parametrization = None if parameter.is_leaf else parametrization_of(self, name)
        return self._recorder.expand(parameter, None if parametrization is None else computed_again(parametrization))

    @property
    def pass_batch_size(self) -> int:
        """B of the pass that this forward belongs to."""
        own = self._own_batch()
        if own is not None:
            return own
        pass_ = None if self._recorder is None else self._recorder.current_pass
        if pass_ is None:
            raise AttributeError(f"{type(self).__name__}.pass_batch_size is there during a forward in per-sample mode")
        return pass_.batch

    @property
    def qualified_name(self) -> str:
        """The layer's qualified name in the model and its class, for errors."""
        return layout.name_of(self)

    @property
    def _samples_dim(self) -> int:
        """Where the samples stand in an input that has two dimensions before its features."""
        return 0 if self.fixed_layout or getattr(self, "batch_first", self.model_batch_first) else 1

    def by_sample(self, function: Callable[..., Tensor], feature_dims: int, **inputs: Tensor) -> Tensor:
        """`function(*inputs)` with the samples moved to the front of each input, and back in the result.

        Args:
            function: An op of tensors `(B, …)`.
            feature_dims: How many dimensions at the end of an input are a sample's own at the least.
            inputs: The layer's inputs by the names it gives them, `(B, *, …)` or, with `batch_first=False`,
                `(T, B, *, …)`.

        Raises:
            PerSampleError: If the rows of an input are not the samples.
        """
        first = next(iter(inputs.values()))
        dim = self._samples_dim if first.dim() > feature_dims + 1 else 0
        is_alone = self.positionwise and self.pass_batch_size == 1 and not first.is_nested  # which has no shape
        if is_alone and (first.dim() <= feature_dims or first.shape[dim] != 1):  # all rows are of the only sample
            return function(*(x.unsqueeze(0) for x in inputs.values())).squeeze(0)
        if dim and first.dim() == 2:
            layout.refuse_square(self, first)
        moved = [self.checked(x, feature_dims, dim=dim, argument=argument) for argument, x in inputs.items()]
        if dim:
            result = function(*(x.transpose(0, dim) for x in moved)).transpose(0, dim)
            return as_no_view(result.contiguous())  # it lies in memory as torch's does
        result = function(*moved)
        if lies_turned(result):
            result = result.contiguous()  # as torch's, of which a view is taken
        if self._samples_dim and all(x.shape[0] == 1 for x in inputs.values()):
            layout.note_shared_result(self, result, is_new=False)
        return result

    def checked(self, x: Tensor, feature_dims: int, *, dim: int = 0, argument: str = "input") -> Tensor:
        """`x` with B rows in dimension `dim`: one per sample, or one that all share, broadcast; others are refused."""
        return layout.checked(self, x, feature_dims, dim, argument)

    def _is_batched(self, name: str, parameter: Tensor) -> bool:
        return name in self.ranks and parameter.dim() == self.ranks[name] + 1

    def _own_batch(self) -> int | None:
        """B of the first parameter that comes with a batch dimension of its own, `None` without one."""
        for name, rank in self.ranks.items():
            parameter = self._parameters.get(name)
            if parameter is not None and parameter.dim() == rank + 1:
                return parameter.shape[0]
        return None

    def _has_rows(self) -> bool:
        """Whether a parameter of this layer asks for gradients."""
        with unseen():
            return any(parameter is not None and parameter.requires_grad for parameter in all_parameters(self))


def all_parameters(module: nn.Module) -> Iterable[Tensor | None]:
    """The parameters of a module and of all within it."""
    return module.parameters() if module._modules else module._parameters.values()


def refuse_other_mode(mode: Any) -> None:
    """Raises if it is not `True` or `False`, as a setting that was given without its name."""
    remedy = 'Give settings by name: per_sample(loss_reduction="sum", batch_size=64).'
    refuse_other_kind("per_sample", "mode", mode, bool, "True or False", remedy)


def switch(model: nn.Module, settings: Settings, *, mode: bool) -> None:
    """Gives all modules of `model` one new recorder, or with the mode off none.

    Raises:
        PerSampleError: If a module within holds trainable parameters and is not converted.
    """
    if mode:
        _refuse_unconverted(model)
    recorder = Recorder(settings) if mode else None
    members = [module for module in model.modules() if isinstance(module, PerSampleModule)]
    former = recorders_of(members)
    for module in members:
        # the user's class may refuse new attributes
        vars(module)["_recorder"], vars(module)["_settings"] = recorder, settings
        if not settings.escalate:
            module._learn(None)
    for former_recorder in former:
        former_recorder.close(members)
    _prepare(model.parameters())
    if recorder is not None:
        recorder.adopt(model)


def recorders_of(modules: Iterable[nn.Module]) -> list[Recorder]:
    """The recorders of a model's modules: several if parts of it were switched on alone, none with the mode off."""
    recorders = [module._recorder for module in modules if isinstance(module, PerSampleModule)]
    return [recorder for recorder in dict.fromkeys(recorders) if recorder is not None]


def _refuse_unconverted(model: nn.Module) -> None:
    layers = (module for module in model.modules() if isinstance(module, Expanded))
    inside = {id(member) for layer in layers for member in layer.modules()}
    for name, module in model.named_modules():
        if id(module) not in inside and any(parameter.requires_grad for parameter in module.parameters(recurse=False)):
            raise complaint(
                named(name, module),
                "the module holds parameters but is a plain one",
                "its expanded twin",
                "Convert the model, again if this is a new part of it: convert(model, inplace=True).",
            )


def _prepare(parameters: Any) -> None:
    """Sets `grad_sample` to `None`, so that it is there from the start."""
    for parameter in parameters:
        parameter.grad_sample = None
