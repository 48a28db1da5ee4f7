"""What a forward does between its layers, seen operation by operation.

Above all it finds samples that are put in another one's place before a layer whose rows are those of the samples. A
model may sort its sequences by length, run a layer, and go back: every result is right, but row i of that layer's
parameters is another sample's than row i of the others. So a sample would be in two rows that are clipped apart.

It refuses, too: a batch norm by the statistics of the batch, a layer within a transform of `torch.func`, rows of a
layer that meet as many positions, tables that have B rows by chance. And it tells of each operation those who follow
copies (`shared_results.py`), parts of the batch (`batch_parts.py`) and constants (`constants.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import _pop_mode, _push_mode

from expanded_nn._errors import complaint
from expanded_nn.common.batch import NUMBERS, data_in, may_have_derivatives
from expanded_nn.common.bytecode import constant_index
from expanded_nn.common.functions import SIZES, attributes, functions
from expanded_nn.common.modes import FunctionMode, WithoutSelection, function_modes, has_no_values, is_selective, unseen
from expanded_nn.common.steady import Updates
from expanded_nn.common.traced import is_traced
from expanded_nn.core.cost import is_symbol
from expanded_nn.recording import callers, constants, places
from expanded_nn.recording.backward import in_transform
from expanded_nn.recording.batch_parts import LOOKED_AT, BatchParts
from expanded_nn.recording.expand import comes_from_rows, derivatives
from expanded_nn.recording.places import Move, Moved
from expanded_nn.recording.settings import RecorderLike
from expanded_nn.recording.shared_results import Copies, Form, repeat_over_samples


class BetweenLayers(FunctionMode):
    """Looks at operations between layers: it is off within one."""

    def is_on(self) -> bool:
        """Whether it sees the operations of now."""
        return any(mode is self for mode in function_modes())


class Order(FunctionMode):
    """Sees the operations between layers, and raises where samples would mix or change places.

    Invariant: it is on within a forward of the recorder's only.

    Attributes:
        recorder: The recorder of the model.
        moved: The tensors whose samples stand in another order, by their ids, and what did it.
        copies: The copies for the samples of what all of them share.
        parts: The parts of the batch.
        constants: What no sample went into.
        weights_are_outside: Whether the forward has used expanded weights outside of layers, which nobody looks at.
        is_transformed: Whether the whole forward is within a transform of `torch.func`.
    """

    def __init__(self, recorder: RecorderLike, arguments: Any = ()) -> None:
        super().__init__()
        self.recorder = recorder
        self.moved: dict[int, tuple[Tensor, list[Moved]]] = {}
        self.copies = Copies(recorder)
        self.parts = BatchParts(recorder)
        self.constants = constants.Constants(recorder.modules(), recorder.escalation.tables, arguments)
        self.weights_are_outside = False
        self.is_transformed = in_transform()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _SIZES_AND_RANKS:  # asked for more often than anything else
            if args and self.copies.known:
                self._look_at_size(func, *args, **kwargs)
            return func(*args, **kwargs)
        if func is torch.autograd.grad:
            return derivatives(args, kwargs)
        if func is Tensor.repeat and self.copies.known and len(args) > 1:
            x, times = args[0], args[1] if isinstance(args[1], Sequence) else args[1:]
            if self.copies.repeats_over_samples(x, *times):
                func, args = repeat_over_samples, (x, *times)
        if func in _BROADCASTS:
            self._look_at_broadcast(func, [x for x in (*args, *kwargs.values()) if type(x) in places.TENSORS])
        if func not in _LOOKED_AT and not self._meets_what_is_followed(args, kwargs):
            return func(*args, **kwargs)
        if not is_selective():
            return self._looked_at(func, func, args, kwargs)
        with WithoutSelection() as selection:  # a checkpoint has to count the operation alone
            return self._looked_at(func, selection.around(func), args, kwargs)

    def _looked_at(self, func: Any, call: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operation, by `call`, and notes what it has done with the samples."""
        if func in _BATCH_NORMS and (args[5] if len(args) > 5 else kwargs.get("training")):
            self._refuse_batch_norm(func, args[0] if args else kwargs["input"])
        move = places.move_of(func, args, kwargs)
        moved = self._scattered(*args, **kwargs) if func in places.SCATTERS else self._moved_by(move, func)
        result = call(*args, **kwargs)
        if self.copies.known:
            self.copies.look_at(func, args, kwargs, result, are_samples=self._seem_samples)
        if func is torch.stack and moved is None and not self.reasons((args, kwargs)):
            moved = self._stacked(result, *args, **kwargs)
        self.constants.follow(func, (args, kwargs), result)
        changed = args[:1] if func is Tensor.__setitem__ else ()
        batch = self._batch() if self.parts.known or func in LOOKED_AT else None
        joined = None
        if batch is not None and not is_symbol(batch):
            joined = self.parts.look_at(func, args, kwargs, result, batch, self._holds_samples)
        if joined is not None:
            moved, changed = Moved(func.__name__, None), (joined,)
        found = [] if moved is None else _by_user(func, moved)
        names = places.einsum_names(*args) if func is torch.einsum else None
        if names is not None:
            self._turn_by_names(names, args[1:], result)
        elif func is torch.stack and not found and self.moved:
            self._shift(result, *args, **kwargs)
        elif not found and args and func in (places.TURNS_BACK if self.moved else _MAY_TURN):
            self._turn(func, args, kwargs, result)
        elif found or self.moved:
            self._note([*self.reasons((args, kwargs)), *found], (result, changed))
        return result

    def _meets_what_is_followed(self, args: Any, kwargs: Any) -> bool:
        """Whether an operation takes a tensor whose samples stand elsewhere, or copies of what all samples share."""
        moved, copies, parts, known = self.moved, self.copies.known, self.parts.known, self.constants.known
        if not moved and not copies and not parts and not known:
            return False
        for value in (*args, *kwargs.values()):
            if type(value) not in NUMBERS:
                for x in (value,) if isinstance(value, Tensor) else data_in(value):
                    if id(x) in moved or id(x) in copies or id(x) in parts or id(x) in known:
                        return True
        return False

    def _look_at_size(self, func: Any, x: Tensor, dim: int | None = None) -> None:
        """Raises where the forward asks for a size that is another one in the plain model, which lacks a dimension."""
        forward = self.recorder.forward
        shared = None if self.recorder.general_rule is not None else self.copies.known.get(id(x))
        if shared is None or shared.form is Form.REPEATED or callers.is_called_by_libraries(func):
            return
        is_count = func in _COUNTS
        if shared.form is Form.ONE_ROW and not is_count:
            return
        if func in _OF_DIMS and dim is None:
            dim = constant_index(callers.calling_frame(func))
        if is_count or dim is None or dim >= 0 or dim % x.dim() <= shared.dim:
            raise forward.taking_apart(shared.layer, "its size")

    def _look_at_broadcast(self, func: Any, operands: list[Tensor]) -> None:
        """Raises where rows of a layer meet as many positions of each sample: all samples share them, it seems.

        So it is with a table for `range(T)[::-1]`, or computed from coordinates `(T, 2)`, where T = B. Read as samples
        they would be mixed.
        """
        dims = [*map(Tensor.dim, operands)]
        if len(dims) < 2 or min(dims) == max(dims) or not self.copies.known.keys().isdisjoint(map(id, operands)):
            return
        batch, many = self._batch(), operands[dims.index(max(dims))]
        if batch is None or many.shape[0] != batch or self._samples_dim(many.dim()) != 0 or self.reasons(many):
            return
        for few in (x for x in operands if 1 < x.dim() < many.dim() and x.grad_fn is not None):
            meets = few.shape[0] == many.shape[-few.dim()] == batch if func not in _PRODUCTS else batch in few.shape
            if meets and comes_from_rows(few):
                raise complaint(
                    self.recorder.name_of(self.recorder.forward.module),
                    f"rows that a layer, or expanded(weight), gives, {tuple(few.shape)}, meet as many positions of "
                    f"each of the {batch} samples, {tuple(many.shape)} "
                    f"({func.__name__}{callers.place(callers.line_of_user())}): they may "
                    "be samples, which mix then, or positions that all samples share",
                    "rows that are one or the other",
                    "For what all samples share call that layer with input.unsqueeze(0), and the model with "
                    "shared_by_all(x) if it is an argument; give a weight as many dimensions, "
                    "expanded(weight).unsqueeze(1); do what mixes samples outside of the model.",
                    refused_by=self,  # which layer's rows they are is not known
                )

    def _refuse_batch_norm(self, func: Any, x: Tensor) -> None:
        """Raises where the forward normalizes samples by the statistics of the batch."""
        forward, batch = self.recorder.forward, self._batch()
        if type(x) not in places.TENSORS or x.dim() < 2:
            return
        if not (torch.is_grad_enabled() or callers.is_in_reentrant_checkpoint()):
            return
        if self.recorder.general_rule is not None:
            mixes = x.numel() == x.shape[1]  # of a single sample there is nothing to normalize by
        elif batch is None or (x.shape[1] == batch and self._samples_dim(x.dim()) == 1):
            mixes = False
        else:  # positions of the samples may be folded into the rows; without gradients nothing tells their source
            mixes = x.shape[0] > 0 and x.shape[0] % batch == 0 and (not x.requires_grad or self._are_samples(x))
        if mixes:
            raise complaint(
                self.recorder.name_of(forward.module),
                f"its forward normalizes by the statistics of the batch ({func.__name__} with training=True"
                f"{callers.place(callers.line_of_user())}), which mix the samples, so that no gradient is one "
                "sample's own",
                "statistics that do not depend on the other samples",
                "Use F.group_norm or F.layer_norm in its place, or running statistics with training=False.",
            )

    def _note(self, reasons: list[Moved], results: Any) -> None:
        """Notes what has put the samples of some results in another order."""
        if reasons and self.weights_are_outside:
            self.refuse(None, reasons)
        for result in data_in(results) if reasons else ():
            self.moved[id(result)] = result, reasons

    def as_one_operation(self, function: Callable[..., Any], args: Any, kwargs: Any, layer: Any = None) -> Any:
        """Calls a function with this mode off: what is in it is not looked at, and torch's layers may run fused.

        Where it is the forward of a `layer`, its results are in order if its arguments stand where it expects them.
        """
        seen_through = BetweenLayers, Updates
        ours = takewhile(lambda mode: mode is self or isinstance(mode, seen_through), reversed(function_modes()))
        modes = [_pop_mode() for _ in ours]  # the innermost first
        try:
            result = function(*args, **kwargs)
        finally:
            for mode in reversed(modes):
                _push_mode(mode)
        if self not in modes:  # it looks on, under a mode of somebody else's
            return result
        if self._meets_what_is_followed(args, kwargs):
            arguments = list(data_in((args, kwargs))) if self.moved else []
            self._note([why for n, x in enumerate(arguments) for why in self._misplaced(layer, n, x)], result)
            self.copies.follow((args, kwargs), result)
            self.constants.follow_layer((args, kwargs), result)
        return result

    def look_at(self, layer: nn.Module, arguments: Any, *, is_plain: bool = False) -> None:
        """Raises if samples in another order reach a layer whose parameters get rows.

        A plain forward leaves no rows. But that of a reentrant checkpoint is run again in the backward, which does.
        """
        if not self.is_transformed and in_transform():
            self._refuse_transform(cast(Any, layer))
        if not (self.moved or self.parts.known or self.constants.known):
            return
        if not is_plain or callers.is_in_reentrant_checkpoint():
            for number, x in enumerate(data_in(arguments)):
                if id(x) in self.parts.known or id(x) in self.constants.known:
                    self._refuse_other_rows(cast(Any, layer), x)
                if id(x) in self.moved:
                    self.refuse(layer, self._misplaced(layer, number, x))

    def _misplaced(self, layer: Any, number: int, x: Tensor) -> list[Moved]:
        """What has put the samples of an argument, the `number`-th tensor, elsewhere than the layer expects them."""
        if layer is None:
            return self.reasons(x)
        # the states of a recurrent layer are (layers, B, features) in any case
        dim = 1 if number and isinstance(layer, nn.RNNBase) else _samples_dim_in(layer, x)
        return [moved for moved in self.reasons(x) if moved.dim is None or moved.dim != dim]

    def _refuse_transform(self, layer: Any) -> None:
        raise complaint(
            self.recorder.name_of(layer),
            "it is called within a transform of torch.func (vmap, grad, jacrev, ...), which has no batch of samples",
            "all samples at once",
            "Call it on the batch. Take derivatives by torch.autograd.grad(..., create_graph=True), which leaves rows.",
            refused_by=layer,
        )

    def _refuse_other_rows(self, layer: Any, x: Tensor) -> None:
        """Raises where B rows are no samples: the positions of a single one, or of what all samples share.

        A module of the general rule is compared with its plain forward, which tells.
        """
        batch, dim = self._batch(), _samples_dim_in(layer, x)
        if batch is None or layer.calls_others or x.dim() <= dim or x.shape[dim] != batch:
            return
        if id(x) in self.constants.known:
            if not is_traced() and not may_have_derivatives(x) and _is_range(x):  # of which an embedding says more
                return
            # B like rows are no table: a first state, the first word of each sample
            with unseen():
                source = Moved("", (x == x.narrow(dim, 0, 1)).all())
            if (not is_traced() and bool(source.stays)) or source.may_be_assumed_away("its layers"):
                return
            found, remedy = (
                "comes from buffers, attributes or numbers of the model, or from a shared_by_all argument, so that its "
                f"{batch} rows may be positions or classes that all samples share, or one for each sample",
                "Call it with input.unsqueeze(0) for what all samples share; give the model what each sample has as an "
                "argument.",
            )
        elif any(len(numbers) == 1 for numbers in self.parts.samples_in([x])):
            found, remedy = (
                f"comes from a part of the samples, so that its {batch} rows are not these",
                "Call the layer with all samples at once, not with one after the other.",
            )
        else:
            return
        problem, wanted = f"its input, {tuple(x.shape)}, {found}", "a row for each sample"
        raise complaint(self.recorder.name_of(layer), problem, wanted, remedy, refused_by=layer)

    def note_layout(self, layer: nn.Module, results: Iterable[Tensor], dims: Iterable[int]) -> None:
        """Notes results of a layer that have their samples elsewhere, and as many others in their usual place.

        So it is with the states of recurrent layers, `(layers, B, hidden)`; and in a model that has time first with a
        convolution's `(B, channels, T)`.

        Args:
            layer: The layer.
            results: The tensors that it returns.
            dims: Where the samples stand in each of them.
        """
        batch = self._batch()
        if batch is None:
            return
        for x, dim in zip(results, dims, strict=True):
            usual = self._samples_dim(x.dim())
            if 0 <= dim != usual and x.dim() > max(dim, usual) and x.shape[dim] == x.shape[usual] == batch:
                self._note(
                    [Moved(f"what {type(layer).__name__} returns", None, line=callers.line_of_user(), dim=dim)], x
                )

    def note_outside_use(self) -> None:
        """Notes that an expanded weight is used outside of layers."""
        self.weights_are_outside = True
        self.refuse(None, [reason for _, reasons in self.moved.values() for reason in reasons])

    def reasons(self, arguments: Any) -> list[Moved]:
        """What has moved the samples in any of some tensors."""
        moved = [x for x in data_in(arguments) if id(x) in self.moved] if self.moved else []
        return list({id(reason): reason for x in moved for reason in self.moved[id(x)][1]}.values())

    def _batch(self) -> int | None:
        """B, if there are several samples, whose order counts where the forward is."""
        batch = None if self.recorder.general_rule is not None else self.recorder.forward.batch_so_far
        return None if batch is None or batch < 2 else batch

    def _samples_dim(self, dims: int) -> int:
        """Where the samples stand in a tensor of so many dimensions."""
        return self.recorder.settings.samples_dim(dims)

    def _moved_by(self, move: Move | None, func: Any) -> Moved | None:
        """How an operation gives the samples another order, `None` if it does not.

        It is about samples if it chooses places in their dimension, in a tensor that has B of them there, or the
        positions of all. An index that leaves sample i in place i moves nobody.
        """
        batch = self._batch()
        if move is None or batch is None:
            return None
        rows, dims = move.rows, len(move.shape)
        if type(rows) not in places.TENSORS or rows.is_meta:
            return None
        usual = self._samples_dim(dims)
        turned = next((reason.dim for reason in self.reasons(rows) if reason.dim is not None), None)
        dim = places.dim_of_samples(rows, move.shape, usual, batch) if turned is None else turned
        if dims <= dim or dim not in [move_dim % dims for move_dim in move.dims]:
            return None
        key = places.keys_by_dim(move.index, dims)[dim]
        if isinstance(key, Tensor) and has_no_values(key):
            if not has_no_values(rows) and move.shape[dim] == batch and self._seem_samples(rows):
                self.refuse(None, _by_user(func, Moved(getattr(func, "__name__", str(func)), None)))
            return None
        index, count = places.chosen(move.index, move.shape, dim, batch)
        if index is NotImplemented or count % batch or not self._seem_samples(rows):
            return None
        name = getattr(func, "__name__", str(func))
        if count == batch or dim != usual:
            return places.moved_by(name, index, dim, dims, batch)
        return self._moved_positions(name, move, index, count, batch)

    def _moved_positions(self, name: str, move: Move, index: Any, count: int, batch: int) -> Moved | None:
        """`_moved_by`, for an index among `count` positions: several of each sample, in one dimension."""
        rows, dim = move.rows, self._samples_dim(len(move.shape))
        if index is None or index.dim() != 1 or len(index) not in (batch, count):
            return None
        is_part = rows._base is not None and rows._base.shape[:1] == (batch,)
        if move.shape[dim] != batch and not comes_from_rows(rows) and not is_part:
            return None  # of what all samples share
        if len(index) == batch:
            return places.moved_by(name, index, 0, 1, batch)
        turned_dim = None
        if not is_traced() and places.is_transposed(index, batch):
            if count != batch**2:  # then no layer takes the positions for samples
                return None
            turned_dim = 1 - dim
        samples = (index // (count // batch)).view(batch, -1)
        moved = places.moved_by(name, samples, 0, 1, batch)
        return None if moved is None else moved._replace(dim=turned_dim)

    def _scattered(self, input: Tensor, mask: Tensor, source: Tensor) -> Moved | None:
        """`_moved_by`, for a mask that is filled from a source: samples stay if each has as many numbers as places."""
        batch, counts = self._batch(), [len(x) for x in (input, source) if type(x) in places.TENSORS and x.dim()]
        if batch is None or len(counts) < 2 or counts[0] != batch or counts[1] % batch or self._samples_dim(2):
            return None
        chosen = type(source.grad_fn).__name__ == "IndexBackward0"  # as by another mask, which may take unequal numbers
        if chosen or not self._seem_samples(source):
            return None
        stays = (mask.expand(input.shape).flatten(1).sum(1) * batch == source.numel()).all()
        if not is_traced() and bool(stays):
            return None
        return Moved("masked_scatter", stays)

    def _turn(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Follows what turns dimensions: another one of size B may take the place of the samples', and give it back."""
        x, batch = args[0], self._batch()
        if batch is None or type(x) not in places.TENSORS or x.dim() < 2:
            return
        usual, sizes, reasons = self._samples_dim(x.dim()), list(x.shape), self.reasons((args, kwargs))
        # a dimension of size 1 in the samples' place would look like what all samples share
        may_turn = sizes[usual] == batch and (1 in sizes or sizes.count(batch) > 1)
        if not reasons and not may_turn:
            return
        dims = places.dims_after(func, x.dim(), args[1:], kwargs)
        if dims is None:
            self._note(reasons, result)
            return
        turned, here = next(data_in(result)), self._samples_dim(len(dims))
        size = turned.shape[here] if len(dims) > here else 0
        kept = []
        for reason in reasons:
            dim = dims.index(reason.dim) if reason.dim in dims else reason.dim
            if reason.dim is None or dim != here or size != batch:
                kept.append(reason._replace(dim=dim))
        is_turned = not reasons and size in (1, batch) and usual in dims and dims[here] != usual
        if is_turned and self._seem_samples(x):
            kept += _by_user(func, Moved(func.__name__, None, dim=dims.index(usual)))
        self._note(kept, result)

    def _turn_by_names(self, names: Sequence[str], operands: Sequence[Any], result: Tensor) -> None:
        """`_turn`, for an operation that names the dimensions of its operands, and last those of its result."""
        batch, usual, after = self._batch(), self._samples_dim(result.dim()), names[-1]
        tensors = list(data_in(operands))
        reasons = self.reasons(tensors)
        kept = [reason for reason in reasons if reason.dim is None]
        if batch is not None and len(after) > usual and result.shape[usual] in (1, batch):
            found = [self._name_of_samples(x, of_x, batch) for x, of_x in zip(tensors, names, strict=False)]
            of_samples = [name for name in found if name in after]
            if of_samples and after[usual] not in of_samples:
                kept += _by_user(torch.einsum, Moved("einsum", None, dim=after.index(of_samples[0])))
        self._note(kept, result)

    def _name_of_samples(self, x: Tensor, names: str, batch: int) -> str:
        """The name of the dimension in which the samples stand in an operand, if it has any."""
        dim = next((reason.dim for reason in self.reasons(x) if reason.dim is not None), None)
        if dim is None and type(x) in places.TENSORS and x.dim() > (usual := self._samples_dim(x.dim())):
            dim = usual if x.shape[usual] == batch and self._seem_samples(x) else None
        return "-" if dim is None or dim >= len(names) else names[dim]

    def _stacked(self, result: Tensor, tensors: Sequence[Tensor], dim: int = 0, **out: Any) -> Moved | None:
        """How `stack` has moved samples: it has put B positions where the samples are looked for."""
        usual, batch = self._samples_dim(result.dim()), self._batch()
        if batch is None or dim % result.dim() != usual or list(result.shape[:2]) != [batch, batch]:
            return None
        return Moved("stack", None, dim=1 - usual) if all(map(self._seem_samples, tensors)) else None

    def _shift(self, result: Tensor, tensors: Sequence[Tensor], dim: int = 0, **out: Any) -> None:
        """Where samples stand that were elsewhere, once `stack` has put a dimension before them, or behind."""
        usual, reasons = self._samples_dim(result.dim()), self.reasons(tensors)
        kept: list[Moved] = []
        if not all(map(self.reasons, tensors)):  # in the others they stand where they should
            kept, reasons = reasons, []
        for reason in reasons:
            after = reason.dim if reason.dim is None else reason.dim + (dim % result.dim() <= reason.dim)
            if after is None or after != usual or result.shape[usual] != self._batch():
                kept.append(reason._replace(dim=after))
        self._note(kept, result)

    def _are_samples(self, x: Tensor) -> bool:
        """Whether a tensor is an argument of the forward, or comes from a layer; others may have B rows by chance."""
        is_known = self.recorder.forward.is_argument(x) or id(x) in self.moved
        # without gradients, as in a reentrant checkpoint, nothing tells where it comes from
        return is_known or not torch.is_grad_enabled() or comes_from_rows(x)

    def _seem_samples(self, x: Tensor) -> bool:
        """`_are_samples`, or B rows that were computed from anything but constants, as those of frozen embeddings."""
        return self._are_samples(x) or id(x) not in self.constants.known

    def _holds_samples(self, x: Tensor) -> bool:
        """Whether the rows of a tensor with B rows are the samples, in their order."""
        return not self.reasons([x]) and self._seem_samples(x)

    def refuse(self, layer: nn.Module | None, reasons: Sequence[Moved]) -> None:
        """Raises for the first reason, if there is any that a trace cannot assume away."""
        moved = next((reason for reason in reasons if not reason.may_be_assumed_away("its layers")), None)
        if moved is None:
            return
        who = self.recorder.name_of(self.recorder.forward.module if layer is None else layer)
        raise complaint(who, *moved.in_words(), refused_by=self)  # no layer is to blame: the module called is tried


def _samples_dim_in(layer: Any, x: Tensor) -> int:
    """Where a layer reads the samples in one of its inputs."""
    return layer._samples_dim if x.dim() > layer.feature_dims + 1 else 0


def _by_user(func: Any, moved: Moved) -> list[Moved]:
    """What has moved samples, with its line; not in a library, as `pack_padded_sequence` notes the order itself."""
    return [] if callers.is_called_by_libraries(func) else [moved._replace(line=callers.line_of_user())]


def _is_range(index: Tensor) -> bool:
    """Whether an index counts `n, n + 1, n + 2, …`."""
    with unseen():
        return index.dim() == 1 and bool((index.diff() == 1).all())


_COUNTS = functions("numel", "nelement")
_OF_DIMS = (*functions("size"), *attributes("shape"))
_SIZES_AND_RANKS = {*SIZES, *functions("dim"), *attributes("ndim")}
_PRODUCTS = set(functions("matmul"))
_BROADCASTS = _PRODUCTS | set(
    functions(
        *("add", "sub", "mul", "div", "add_", "sub_", "mul_", "div_", "__radd__", "__rsub__", "__rmul__", "__rdiv__"),
        *("subtract", "multiply", "divide", "true_divide", "rsub", "pow", "__pow__", "__rpow__", "float_power"),
        *("where", "lerp", "lerp_", "addcmul", "addcmul_", "addcdiv", "addcdiv_", "clamp", "clamp_", "clip"),
        *("clamp_min", "clamp_max", "maximum", "minimum", "max", "min", "remainder", "fmod", "ldexp"),
        *("fmax", "fmin", "atan2", "hypot", "logaddexp", "logaddexp2", "xlogy", "copysign"),
    )
)
_MAY_TURN = {*places.TURNS, Tensor.__getitem__}
_BATCH_NORMS = {F.batch_norm, torch.batch_norm, torch.native_batch_norm}
_FOLLOWED = LOOKED_AT | constants.LOOKED_AT | places.SCATTERS | places.TURNS
_LOOKED_AT = {*_FOLLOWED, *places.MOVES, *_BATCH_NORMS, torch.einsum}
