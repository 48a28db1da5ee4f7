"""What is made of buffers, tables and numbers alone: no sample went into it, also where it has B rows by chance."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from itertools import chain
from types import FunctionType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from expanded_nn._errors import LIBRARIES
from expanded_nn.common.batch import contents, data_in
from expanded_nn.common.bytecode import global_names
from expanded_nn.common.functions import functions, is_in_place
from expanded_nn.common.steady import attributes_of


class Table(NamedTuple):
    """A tensor that a model has beside its buffers when per-sample mode is switched on.

    Attributes:
        tensor: The tensor; a weak reference, as the model may give it up.
        version: Its version then. What is changed in place may be a state, with a row for each sample.
    """

    tensor: ref[Tensor]
    version: int


class Constants:
    """The constants in a forward.

    Args:
        modules: Those of the model. Their buffers are constants.
        tables: What the model has beside its buffers: constants, too.
        arguments: What the forward is called with: no constants, even if they are buffers or tables.

    Attributes:
        known: These tensors by their ids.
        reads: Whether it has read the values of anything else, so that arrays may be those of samples.
    """

    def __init__(self, modules: Iterable[nn.Module], tables: Iterable[Table], arguments: Any) -> None:
        holders = (module for module in modules if module._buffers and getattr(module, "calls_others", True))
        buffers = (buffer for module in holders for buffer in module._buffers.values())
        self.known: dict[int, Tensor] = {id(buffer): buffer for buffer in buffers if buffer is not None}
        for table in tables:
            tensor = table.tensor()
            if tensor is not None and tensor._version == table.version:
                self.known[id(tensor)] = tensor
        self.leave_out(arguments)
        self.reads = False

    def leave_out(self, arguments: Any) -> None:
        """Forgets what the model is called with, which is of the samples."""
        for argument in data_in(arguments) if self.known else ():
            self.known.pop(id(argument), None)

    def follow(self, func: Any, arguments: Any, results: Any) -> None:
        """Notes what an operation makes of constants alone, and forgets those that something else is written into."""
        inputs = list(data_in(arguments))
        if all(id(x) in self.known for x in inputs) and (inputs or self._makes(func)):
            self.known.update({id(x): x for x in data_in(results)})
        elif func in READS_ARRAYS:
            self.reads = True
        elif inputs and (is_in_place(func) or func is torch.Tensor.__setitem__):
            for x in (inputs[0], inputs[0]._base):
                self.known.pop(id(x), None)

    def _makes(self, func: Any) -> bool:
        return func in MAKES or (func in OF_ARRAYS and not self.reads)


def tables_of(modules: Iterable[nn.Module]) -> list[Table]:
    """The tensors in attributes of modules and of their classes, and in variables around these that methods name."""
    held = [module for module in modules if getattr(module, "calls_others", True)]
    values = chain.from_iterable(attributes_of(module) for module in held)
    of_classes = chain.from_iterable(map(_of_class, {type(module) for module in held}))
    found = {id(x): x for x in contents([*values, *of_classes]) if type(x) is Tensor}
    return [Table(ref(x), x._version) for x in found.values() if not (x.requires_grad or x.is_inference())]


def _of_class(cls: type) -> Iterator[Any]:
    for value in (value for base in cls.__mro__ for value in vars(base).values()):
        if isinstance(value, FunctionType) and not value.__code__.co_filename.startswith(LIBRARIES):
            named = [value.__globals__.get(name) for name in _global_names(value.__code__)]
            with suppress(ValueError):  # of a variable that has no value yet
                named += [cell.cell_contents for cell in value.__closure__ or ()]
            yield from (x for x in named if isinstance(x, Tensor))
        elif isinstance(value, Tensor | list | tuple | dict):
            yield value


_global_names = lru_cache(maxsize=2**12)(global_names)  # the mode may be switched often
MAKES = {*functions("arange", "linspace", "logspace", "eye", "tensor", "meshgrid", "cartesian_prod", "tril_indices")}
OF_ARRAYS = {*functions("as_tensor", "asarray")}
READS_ARRAYS = {*functions("numpy", "__array__", "tolist")}
LOOKED_AT = MAKES | OF_ARRAYS | READS_ARRAYS
