"""The general rule: any module with parameters of its own, by `vmap` of its forward over expanded parameters."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from torch.utils._pytree import TreeSpec, register_dataclass, tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from expanded_nn._batch import batch_dim, has_derivatives
from expanded_nn._errors import PerSampleError, complaint
from expanded_nn._lift import Place, quiet_fallbacks, swapped
from expanded_nn._module import Expanded
from expanded_nn._registry import EXPANDED
from expanded_nn._steady import RandomStates, WithoutChance, copies, without_traces
from expanded_nn.recording.backward import graph_of
from expanded_nn.recording.recorder import Recorder

ModuleClass = TypeVar("ModuleClass", bound=type[nn.Module] | str)

# torch's words where vmap gives up; the last where samples have results of different sizes
_OF_VMAP = "vmap|functorch|[Bb]atching rule|stack expects each tensor to be equal size"


class Compared(NamedTuple):
    """What came out when the results of the samples were compared with the plain forward of the whole batch.

    Attributes:
        alike: Whether they are the same; random results may not be comparable.
        dims: Where the samples stand in each result.
    """

    alike: bool
    dims: tuple[int, ...]

    def fits(self, ones: Sequence[Sequence[int]]) -> bool:
        """Whether the samples may stand there in other results."""
        return len(ones) == len(self.dims) and all(dim in where for dim, where in zip(self.dims, ones, strict=True))


PARAMETER_LISTS = (nn.ParameterList, nn.ParameterDict)  # their parameters belong to the module that holds them


class General(Expanded):
    """A module of the user's own: each sample goes through its forward alone, as a batch of one, under `vmap`.

    The parameters of the module, of its children and of its parameter lists are all expanded, and the forward may
    use them in any way; expanded layers among the children leave the `vmap` and run on the whole batch. A tensor
    argument with B rows is split into samples; any other is shared by all. Every tensor that the forward returns has
    the samples where the arguments have them.
    """

    _compared: Mapping[Any, Compared] = {}  # by the way to read the arguments and results
    _ranks: dict[str, int] | None = None  # of each own parameter, those in lists included, when it was converted

    def note_ranks(self) -> None:
        """Notes how many dimensions the parameters have without a batch dimension."""
        lists = [(f"{name}.", child) for name, child in self.named_modules() if isinstance(child, PARAMETER_LISTS)]
        self._ranks = {
            prefix + name: each.dim()
            for prefix, module in [("", self), *lists]
            for name, each in module._parameters.items()
            if each is not None
        }

    def _own_batch(self) -> int | None:
        return next((each.shape[0] for each in self._guests()), None)

    def _guests(self) -> Iterator[Tensor]:
        """The parameters that have come with a batch dimension of their own."""
        return (parameter for parameter, rank in self._ranked() if parameter.dim() == rank + 1)

    def _has_own_rows(self) -> bool:
        """Whether the module's own parameters ask for gradients, or its class was sent here as a whole."""
        own = (each.requires_grad or each.dim() > rank for each, rank in self._ranked())
        return self.watches or parametrize.is_parametrized(self) or any(own)

    def _ranked(self) -> Iterator[tuple[Tensor, int]]:
        for name, rank in (self._ranks or {}).items():
            path, _, leaf = name.rpartition(".")
            parameter = (self.get_submodule(path) if path else self)._parameters.get(leaf)
            if parameter is not None:
                yield parameter, rank

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        result, recorder = super().forward(*args, **kwargs), self._recorder
        if recorder is None or not recorder.records or recorder.originals is not None or torch.is_grad_enabled():
            return result
        if not self._has_own_rows():
            return result
        # a reentrant checkpoint's first forward: of the shapes that the second one will have
        leaves, structure = _flatten(result)
        return tree_unflatten([self._with_all_rows(each) for each in leaves], structure)

    def _with_all_rows(self, output: Any) -> Any:
        """What samples share, once for each of them."""
        if not isinstance(output, Tensor) or output.dim() == 0:
            return output
        dim, batch = self._dim_of(output), self.batch_size
        if output.shape[dim] != 1 or batch == 1:
            return output
        return output.expand(*output.shape[:dim], batch, *output.shape[dim + 1 :]).clone()

    def expanded_forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self._has_own_rows():
            return self._plain_forward(*args, **kwargs)  # its children see to theirs
        self._refuse_backward_hooks()
        batch = self.batch_size
        originals = {
            (module, name): each
            for module in self.modules()
            for name, each in module._parameters.items()
            if each is not None
        }
        places = list(originals)
        guests = {id(each) for module in self.modules() if isinstance(module, General) for each in module._guests()}
        expanded = [self._expanded_of(module, name, guests) for module, name in places]
        leaves, structure = tree_flatten((args, kwargs))
        dims = [self._sample_dim(leaf, batch) for leaf in leaves]
        self._note_input(shared=batch > 1 and all(dim is None for dim in dims))
        given = [each for each in leaves if isinstance(each, Tensor) and each.dim()]
        if given and has_derivatives(given[0]):
            self.checked(given[0], 0, dim=self._dim_of(given[0]), argument="the first tensor")
        if batch == 0:
            return self._empty(places, expanded, args, kwargs)

        def mapped(given: list[Any]) -> _Mapped:
            with self._children_inside(originals):
                return self._mapped(places, expanded, dims, structure, given, told=bool(guests))

        kind = (self.training, *dims, batch == 1, *(tuple(size == 1 for size in each.shape) for each in given))
        trial = None if guests or kind in self._compared else _Trial(self, args, kwargs, batch, mapped)
        found = mapped(leaves)
        self._refuse_mutation(leaves)
        if guests:
            return found.result()
        if trial is None and not self._compared[kind].fits(found.ones):  # another way through the forward
            trial = _Trial(self, args, kwargs, batch, mapped)
        if trial is not None:
            self._compared = {**self._compared, kind: trial.compared(found)}
        compared = self._compared[kind]
        if not compared.alike:
            self._refuse_square(given[1:], batch)
        return found.with_samples_in(compared.dims).result()

    def _mapped(
        self, places: Sequence[Place], expanded: Any, dims: Any, structure: TreeSpec, leaves: list[Any], *, told: bool
    ) -> _Mapped:
        """Sends each sample through the forward alone."""
        returned: list[Any] = []
        ones: list[list[int]] = []  # for each result: where the sample may stand, likeliest first

        def one_sample(weights: list[Tensor], inputs: list[Any]) -> list[Tensor]:
            alone = [each if dim is None else each.unsqueeze(dim) for each, dim in zip(inputs, dims, strict=True)]
            args, kwargs = tree_unflatten(alone, structure)
            with swapped(places, weights), quiet_fallbacks(), _Watch(self):
                result = self._plain_forward(*args, **kwargs)
            if Counter(_ids_of_one_sample((args, kwargs))) - Counter(_ids_of_one_sample(alone)):
                raise self._keeping("an argument")
            outputs, returned[:] = [each for each in _flatten(result)[0] if isinstance(each, Tensor)], [result]
            ones[:] = [self._dims_of_one(each, told=told) for each in outputs]
            return [each.squeeze(dims[0]) for each, dims in zip(outputs, ones, strict=True)]

        try:
            results = torch.vmap(one_sample, in_dims=(0, dims), randomness="different")(expanded, leaves)
        except RuntimeError as error:
            if isinstance(error, PerSampleError) or not re.search(_OF_VMAP, str(error)):
                raise
            remedy = "Write its per-sample forward with @expands, or keep the parameters in modules of torch.nn."
            if "setup_context" in str(error):
                remedy = "Give a checkpoint use_reentrant=False, and a Function of your own what the error says."
            raise complaint(
                self.name,
                f"its forward does what vmap cannot follow ({error})",
                "a forward that treats each sample alone and changes nothing in place that samples share",
                remedy,
            ) from error
        moved = [each.movedim(0, first) for each, (first, *_) in zip(results, ones, strict=True)]
        return _Mapped(returned[0], moved, ones)

    def _refuse_square(self, others: list[Tensor], batch: int) -> None:
        for each in others:
            if batch > 1 and each.shape == (batch, batch):
                raise complaint(
                    self.name,
                    f"an argument has shape {tuple(each.shape)}, and may be a row a sample or a matrix that all share",
                    "an argument that can be read in one way only",
                    "Give the matrix to the module as a buffer, or the batch another size.",
                )

    def _children_inside(self, originals: Mapping[Place, Tensor]) -> AbstractContextManager[None]:
        """Expanded layers called meanwhile find the parameters that `vmap` has taken from them."""
        return nullcontext() if self._recorder is None else self._recorder.inside_general(originals)

    def _inside_general(self, recorder: Recorder, args: Any, kwargs: Any) -> Any:
        return self._plain_forward(*args, **kwargs)  # sample by sample already; its layers find their own way

    def _plain_forward(self, *args: Any, **kwargs: Any) -> Any:
        return super(Expanded, self).forward(*args, **kwargs)

    def _expanded_of(self, module: nn.Module, name: str, guests: set[int]) -> Tensor:
        parameter = module._parameters[name]
        assert parameter is not None
        if id(parameter) in guests or (isinstance(module, Expanded) and module._is_batched(name, parameter)):
            return parameter
        if self._recorder is None or not torch.is_grad_enabled():
            return parameter.expand(self.batch_size, *parameter.shape)
        return self._recorder.expand(parameter)

    def _sample_dim(self, leaf: Any, batch: int) -> int | None:
        if not isinstance(leaf, Tensor) or leaf.dim() == 0:
            return None
        dim = self._dim_of(leaf)
        if dim and leaf.dim() == 2:
            self.refuse_square(leaf)
        return dim if leaf.shape[dim] == batch else None

    def _dim_of(self, tensor: Tensor) -> int:
        """Where the samples stand: as the module says, if it has a `batch_first` of its own, or as the model does."""
        return batch_dim(tensor.dim(), batch_first=getattr(self, "batch_first", self.model_batch_first))

    def _dims_of_one(self, output: Tensor, *, told: bool) -> list[int]:
        """Where the one sample may stand in what the forward returned for it, likeliest first.

        Args:
            output: `(…, 1, …)`.
            told: Whether it has to stand where the module or the model says, as no plain forward can tell.
        """
        ones = [dim for dim, size in enumerate(output.shape) if size == 1]
        usual = self._dim_of(output) if output.dim() else 0
        may_be_features = usual == 1 and output.dim() == 2 and 0 in ones  # (1, features), if not (T, 1)
        if not ones or (told and (may_be_features or usual not in ones)):
            raise complaint(
                self.name,
                f"for one sample its forward returns a tensor of shape {tuple(output.shape)}",
                f"one row in dimension {usual}, the sample's, and it alone",
                "Return tensors with a batch dimension, and reduce over the samples outside of the module. Without "
                "forward hooks on its children, another dimension may be the sample's as well.",
            )
        return sorted(ones, key=lambda dim: dim != (0 if may_be_features else usual))

    def _refuse_backward_hooks(self) -> None:
        for name, module in self.named_modules():
            if module is not self and (module._backward_hooks or module._backward_pre_hooks):
                raise complaint(
                    self.name,
                    f"its child {name!r} has a full backward hook, which a vmap does not call",
                    "no such hook inside a module with parameters of its own",
                    "Take the hook off, or hook the tensors (register_hook) outside of the module.",
                )

    def _refuse_mutation(self, leaves: list[Any]) -> None:
        """A tensor of one sample that the forward left behind in the module or in an argument."""
        for module in self.modules():
            kept = [(f"attribute {name!r}", value) for name, value in vars(module).items() if name not in _NOT_ITS_OWN]
            kept += [(f"the buffer {name!r}", value) for name, value in module._buffers.items()]
            for what, value in kept:
                if any(map(_is_of_one_sample, _inside(value))):
                    raise self._keeping(what)
        if any(map(_is_of_one_sample, _inside([leaf for leaf in leaves if not isinstance(leaf, Tensor)]))):
            raise self._keeping("an argument")

    def _keeping(self, what: str) -> PerSampleError:
        return complaint(
            self.name,
            f"its forward keeps tensors in {what}",
            "a forward that leaves nothing behind",
            "Do without the cache in per-sample mode (use_cache=False), or write the per-sample forward with @expands.",
        )

    def _empty(self, places: list[Any], expanded: list[Tensor], args: Any, kwargs: Any) -> Any:
        """No samples: the plain forward says the shapes, and every parameter gets no rows."""
        alone = [
            module._parameters[name].detach().requires_grad_(each.requires_grad)
            for (module, name), each in zip(places, expanded, strict=True)
        ]
        with swapped(places, alone), self._children_inside({}), _Watch(self):
            result = self._plain_forward(*args, **kwargs)
        leaves, structure = tree_flatten(result)
        ends = [leaf.grad_fn for leaf in leaves if isinstance(leaf, Tensor)]
        used = {id(getattr(node, "variable", None)) for end in ends for node in graph_of(end)}
        of_used = [each.abs().sum() for each, own in zip(expanded, alone, strict=True) if id(own) in used]
        nothing = sum(of_used, start=torch.zeros(()))
        return tree_unflatten(
            [
                each + nothing.to(each.dtype) if isinstance(each, Tensor) and has_derivatives(each) else each
                for each in leaves
            ],
            structure,
        )


# what the forward does not write, or is looked at by name
_NOT_ITS_OWN = {"_buffers", "_parameters", "_modules", "_recorder", "_settings", "_compared", "_ranks"}


def _flatten(result: Any) -> tuple[list[Any], TreeSpec]:
    """The leaves of a result, dataclasses taken apart as well."""
    leaves, structure = tree_flatten(result)
    unknown = {type(leaf) for leaf in leaves if dataclasses.is_dataclass(leaf)}
    for each in unknown:
        register_dataclass(each)
    return tree_flatten(result) if unknown else (leaves, structure)


@dataclasses.dataclass
class _Mapped:
    """What came out of the forward, sample by sample.

    Attributes:
        returned: What the forward has returned, with the tensors of one sample.
        tensors: Those of all samples.
        ones: For each of them, where the samples may stand, likeliest first.
    """

    returned: Any
    tensors: list[Tensor]
    ones: list[list[int]]

    def with_samples_in(self, dims: Sequence[int]) -> _Mapped:
        """The same with the samples in these dimensions."""
        moves = zip(self.tensors, self.ones, dims, strict=True)
        moved = [each.transpose(first, dim) if dim != first else each for each, (first, *_), dim in moves]
        return _Mapped(self.returned, moved, self.ones)

    def result(self) -> Any:
        """What the forward returns for the whole batch."""
        tensors = iter(self.tensors)
        leaves, structure = _flatten(self.returned)
        return tree_unflatten([next(tensors) if isinstance(each, Tensor) else each for each in leaves], structure)


class _Trial:
    """Compares the samples' results with the plain forward of the whole batch: it has to say the same.

    It does not where the forward mixes samples, or where an argument that all samples share has B rows by chance. What
    the forward leaves behind goes, and what it draws is drawn again. Where it draws random numbers they are fixed for
    the comparison; where that does not help, a derivative tells whether samples are mixed.

    Args:
        module: The module.
        args: What its forward is about to be called with; so is `kwargs`.
        batch: B.
        mapped: Sends arguments through the forward sample by sample.
    """

    def __init__(
        self, module: General, args: Any, kwargs: Any, batch: int, mapped: Callable[[list[Any]], _Mapped]
    ) -> None:
        self.module, self.batch, self.mapped = module, batch, mapped
        self.arguments = copies((args, kwargs))  # as the forward may change its own
        self.states = RandomStates([*module.modules(), self.arguments])
        self.expected = self.plain(hooks=False)
        self.is_random = self.states.restore()

    @torch.no_grad()
    def plain(self, *, hooks: bool) -> list[Tensor]:
        """The tensors that the plain forward returns for the whole batch."""
        args, kwargs = copies(self.arguments)
        with without_traces(self.module, hooks=hooks), self.module._children_inside({}):
            leaves, _ = _flatten(self.module._plain_forward(*args, **kwargs))
        return [each for each in leaves if isinstance(each, Tensor)]

    @torch.no_grad()
    def compared(self, found: _Mapped) -> Compared:
        """Where the samples stand in the results.

        Raises:
            PerSampleError: If the forward of the whole batch gives another result.
        """
        before = RandomStates([*self.module.modules(), self.arguments])
        try:
            return self._compared(found)
        finally:
            before.restore()

    def _compared(self, found: _Mapped) -> Compared:
        dims = self._dims(found)
        if not self.is_random and self._agree(found, dims, self.expected):
            return Compared(True, dims)
        self.states.restore()
        if self.is_random:
            with WithoutChance():
                fixed = self._found_again()
                self.states.restore()
                if self._agree(fixed, dims, self.plain(hooks=False)):
                    return Compared(True, dims)
            found = fixed
            self.states.restore()
        with WithoutChance() if self.is_random else nullcontext():
            expected = self.plain(hooks=True)
            if self._agree(found, dims, expected):
                return Compared(True, dims)
            self.states.restore()
            repeats = all(map(_near, expected, self.plain(hooks=True)))
        self.states.restore()
        if (repeats and not self.is_random) or self._mixes(dims):
            raise complaint(
                self.module.name,
                "on the whole batch its forward gives another result than sample by sample",
                "samples that do not depend on each other, and arguments whose rows are the samples",
                "Do what mixes samples (a mean over the batch, a similarity of all pairs) outside of the module; give "
                "a tensor that all samples share to the module as a buffer. Random numbers for the whole batch have to "
                "come from torch's generators.",
            )
        return Compared(False, dims)

    @torch.no_grad()
    def _found_again(self) -> _Mapped:
        """The samples' results once more, in the mode that is on now."""
        leaves, _ = tree_flatten(copies(self.arguments))
        with without_traces(self.module):
            return self.mapped(leaves)

    def _dims(self, found: _Mapped) -> tuple[int, ...]:
        """Where the samples stand in each result, as its shape says."""
        dims = []
        for result, (first, *_), plain in zip(found.tensors, found.ones, self.expected, strict=True):
            moved = [dim for dim in range(result.dim()) if result.transpose(first, dim).shape == plain.shape]
            dims.append(first if first in moved or not moved else moved[0])
        return tuple(dims)

    def _agree(self, found: _Mapped, dims: tuple[int, ...], expected: list[Tensor]) -> bool:
        results = found.with_samples_in(dims).tensors
        floats = [each for each in tree_leaves(self.arguments) if isinstance(each, Tensor) and has_derivatives(each)]
        sizes = (each.abs().where(each.isfinite(), 0).max() for each in floats if each.numel() and not each.is_meta)
        size = max(map(float, sizes), default=1.0)
        for result, plain, dim in zip(results, expected, dims, strict=True):
            if plain.dim() == result.dim() > 0 and plain.shape[dim] == 1:
                plain = plain.expand(*plain.shape[:dim], result.shape[dim], *plain.shape[dim + 1 :])
            if result.shape != plain.shape or not _near(plain, result.detach(), size):
                return False
        return True

    def _mixes(self, dims: tuple[int, ...]) -> bool:
        """Whether a sample's result depends on the arguments of the others, or nothing could tell."""
        leaves, structure = tree_flatten(copies(self.arguments))
        places = [self.module._sample_dim(leaf, self.batch) for leaf in leaves]
        inputs = [
            (leaf.requires_grad_(), place)
            for leaf, place in zip(leaves, places, strict=True)
            if place is not None and has_derivatives(leaf)
        ]
        args, kwargs = tree_unflatten(leaves, structure)
        with torch.enable_grad(), without_traces(self.module), self.module._children_inside({}):
            # behind an operation, as a forward may change its arguments in place
            args, kwargs = tree_map_only(Tensor, lambda each: each * 1 if each.requires_grad else each, (args, kwargs))
            result = [each for each in _flatten(self.module._plain_forward(*args, **kwargs))[0] if _is_float(each)]
            ends = [
                each.select(dim, 0)
                for each, dim in zip(result, dims, strict=False)
                if each.requires_grad and each.dim() and each.shape[dim] == self.batch
            ]
        if not inputs or not ends:
            return True
        weights = [torch.randn(each.shape, generator=torch.Generator().manual_seed(0)).to(each) for each in ends]
        grads = torch.autograd.grad(ends, [leaf for leaf, _ in inputs], weights, allow_unused=True)
        of_others = [
            grad.narrow(dim, 1, self.batch - 1)
            for grad, (_, dim) in zip(grads, inputs, strict=True)
            if grad is not None and self.batch > 1
        ]
        return any(bool(part.any()) for part in of_others)


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and has_derivatives(leaf)


def _near(plain: Tensor, other: Tensor, size: float = 0.0) -> bool:
    """Whether two results differ by no more than rounding, of themselves or of inputs of such a size."""
    if not has_derivatives(plain) or plain.is_meta:
        return plain.shape == other.shape
    epsilon = torch.finfo(plain.dtype).eps
    finite = plain.isfinite()
    scale = plain.where(finite, 0).abs().max() if plain.numel() else torch.ones(())
    limit = 100 * epsilon**0.5 * scale + 1000 * epsilon * size
    return bool(((other - plain).abs() <= limit).logical_or(~finite).all())


class Alone(General):
    """A module that goes through the general rule as a whole, whether it has parameters of its own or not."""

    watches: ClassVar[bool] = True


def alone(module_class: ModuleClass) -> ModuleClass:
    """Sends the modules of a class through the general rule as a whole, with all that is in them.

    For a class whose forward folds samples into rows, looks up an index without a batch dimension, or otherwise does
    what the layers inside cannot take apart: each sample goes through it alone, as a batch of one. It is slower than
    layers of their own, and needs a forward that `vmap` can follow.

    Args:
        module_class: The class, or its full name `"package.module.Class"`; also usable as a decorator.

    Returns:
        What was given.

    Example:
        >>> import torch, expanded_nn as enn
        >>> @enn.alone
        ... class Folded(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.linear = torch.nn.Linear(3, 2)
        ...     def forward(self, x):  # (B, T, 3)
        ...         return self.linear(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        >>> model = enn.convert(Folded()).per_sample()
        >>> model(torch.randn(5, 4, 3)).square().sum((1, 2)).mean().backward()
        >>> model.linear.weight.grad_sample.shape
        torch.Size([5, 2, 3])
    """
    EXPANDED[module_class] = Alone
    return module_class


class _Watch(TorchFunctionMode):
    """Corrects operations whose gradient is wrong under `vmap`, and names shared tensors that the forward changes."""

    def __init__(self, module: General) -> None:
        super().__init__()
        self.module, self.hooks = module, _saved_tensors_hooks()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        hooks = _saved_tensors_hooks()
        if hooks != self.hooks and hooks is not None and hooks[0].__module__ == checkpoint.__name__:
            # once the vmap is over, nothing of it can be computed again
            with saved_tensors_hooks(_as_it_is, _as_it_is):
                return self._corrected(func, args, kwargs or {})
        return self._corrected(func, args, kwargs or {})

    def _corrected(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is F.embedding:
            return _embedding(*args, **kwargs)
        if func is F.embedding_bag and ((len(args) > 2 and args[2] is not None) or kwargs.get("offsets") is not None):
            raise self._offsets()
        if func is F.scaled_dot_product_attention and any(
            map(_is_floating_mask, (*args[3:4], kwargs.get("attn_mask")))
        ):
            with sdpa_kernel(SDPBackend.MATH):  # the fused kernels refuse a mask that may need gradient
                return func(*args, **kwargs)
        if _is_in_place(func) and not _is_of_one_sample(args[0]) and any(map(_is_of_one_sample, tree_leaves(args))):
            raise self._shared_change(args[0])
        return func(*args, **kwargs)

    def _offsets(self) -> PerSampleError:
        return complaint(
            self.module.name,
            "its forward looks up bags by offsets, which tell the samples apart for the whole batch only",
            "one row a sample",
            "Give the bags to EmbeddingBag as a 2-D input (B, N), filled up with its padding_idx, without offsets.",
        )

    def _shared_change(self, tensor: Tensor) -> PerSampleError:
        names = [f"the buffer {name!r}" for name, buffer in self.module.named_buffers() if buffer is tensor]
        return complaint(
            self.module.name,
            f"its forward writes what belongs to one sample into {names[0] if names else 'a tensor that all share'}",
            "a forward that changes nothing that samples share",
            "Do without that buffer or cache in per-sample mode (use_cache=False), or write the per-sample forward "
            "with @expands.",
        )


def _saved_tensors_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """What packs and unpacks the tensors that autograd saves now."""
    hooks: tuple[Callable[..., Any], Callable[..., Any]] | None = torch._C._autograd._top_saved_tensors_default_hooks(
        True
    )
    return hooks


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _is_floating_mask(mask: Any) -> bool:
    return _is_of_one_sample(mask) and mask.is_floating_point()


def _is_in_place(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


_IN_PLACE = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__idiv__", "__itruediv__", "__ipow__"}


def _embedding(input: Tensor, weight: Tensor, padding_idx: int | None = None, *args: Any, **kwargs: Any) -> Tensor:
    """`F.embedding` with constant padding rows: the gradient of its own `padding_idx` is wrong under `vmap`."""
    rows = F.embedding(input, weight, None, *args, **kwargs)
    if padding_idx is None:
        return rows
    padding_idx = padding_idx % weight.shape[0]
    return torch.where((input == padding_idx).unsqueeze(-1), rows.detach(), rows)


def _inside(value: Any, depth: int = 4) -> Iterator[Any]:
    """What is inside containers and plain objects, to some depth."""
    for leaf in tree_leaves(value):
        yield leaf
        if depth and hasattr(leaf, "__dict__") and not isinstance(leaf, Tensor | nn.Module | type):
            yield from _inside(list(vars(leaf).values()), depth - 1)


def _ids_of_one_sample(values: Any) -> list[int]:
    return [id(leaf) for leaf in tree_leaves(values) if _is_of_one_sample(leaf)]


def _is_of_one_sample(value: Any) -> bool:
    return isinstance(value, Tensor) and torch._C._functorch.is_batchedtensor(value)
