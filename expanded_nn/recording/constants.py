"""What is made of buffers, tables and numbers alone: no sample went into it, also where it has B rows by chance."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from expanded_nn._errors import LIBRARIES
from expanded_nn.common.batch import contents, data_in, is_shared_by_all
from expanded_nn.common.bytecode import global_names, variables_around
from expanded_nn.common.functions import functions, is_in_place
from expanded_nn.common.own_state import attributes_of
from expanded_nn.common.shared import is_parameter
from expanded_nn.recording.leaf import Noted


class Constants:
    """The constants in a forward.

    Args:
        modules: Those of the model. Their buffers and frozen parameters are constants.
        tables: What the model has beside these, noted when per-sample mode was switched on: constants, too, but for
            what was changed in place since, which may be a state with a row for each sample.
        arguments: What the forward is called with: no constants, even if they are buffers or tables.

    Attributes:
        known: These tensors by their ids.
        arguments: The ids of the tensors that the forward is called with.
        reads: Whether other values were read into arrays, so that arrays may hold the samples'.
        reads_numbers: Whether it has read numbers of anything else, so that others may be those of samples.
    """

    def __init__(self, modules: Iterable[nn.Module], tables: Iterable[Noted], arguments: Any) -> None:
        self.known: dict[int, Tensor] = {}
        for module in modules:
            if module._buffers and getattr(module, "calls_others", True):
                self.known.update({id(buffer): buffer for buffer in module._buffers.values() if buffer is not None})
            for parameter in module._parameters.values():
                if parameter is not None and not parameter.requires_grad and isinstance(parameter, nn.Parameter):
                    self.known[id(parameter)] = parameter
        for table in tables:
            tensor = table.tensor()
            if tensor is not None and table.is_as_it_was(tensor):
                self.known[id(tensor)] = tensor
        self.arguments: set[int] = set()
        self.leave_out(arguments)
        self.reads = self.reads_numbers = False

    def leave_out(self, arguments: Any) -> None:
        """Forgets what the model is called with, which is of the samples, but for what was said to be shared by all."""
        for argument in data_in(arguments):
            if is_shared_by_all(argument):
                self.known[id(argument)] = argument
                continue
            self.known.pop(id(argument), None)
            self.arguments.add(id(argument))

    def follow(self, func: Any, arguments: Any, results: Any) -> None:
        """Notes what an operation makes of constants alone, and forgets those that something else is written into."""
        inputs = [] if func in OF_KIND else list(data_in(arguments))
        sets_numbers = func is torch.Tensor.__setitem__ and len(inputs) == 1
        if all(map(self._is_constant, inputs)) and (inputs or func in MAKES or (func in OF_ARRAYS and not self.reads)):
            if sets_numbers and self.reads_numbers:  # which may be those of samples
                self._forget(inputs[0])
            self._note(results)
        elif func in READS_NUMBERS:
            self.reads_numbers = True
            self.reads = self.reads or func in READS_ARRAYS
        elif inputs and (is_in_place(func) or func is torch.Tensor.__setitem__):
            self._forget(inputs[0])

    def follow_layer(self, arguments: Any, results: Any) -> None:
        """Notes what a layer makes of constants alone, where its parameters get no gradients by that."""
        inputs = list(data_in(arguments))
        if inputs and all(map(self._is_constant, inputs)):
            self._note(results)

    def _is_constant(self, x: Tensor) -> bool:
        return id(x) in self.known or (is_parameter(x) and id(x) not in self.arguments)

    def _note(self, results: Any) -> None:
        self.known.update({id(x): x for x in data_in(results) if not x.requires_grad})

    def _forget(self, x: Tensor) -> None:
        for changed in (x, x._base):
            self.known.pop(id(changed), None)


def tables_of(modules: Iterable[nn.Module]) -> list[Noted]:
    """The tensors in attributes of modules and of their classes, and in variables around these that methods name."""
    held = [module for module in modules if getattr(module, "calls_others", True)]
    of_classes = chain.from_iterable(map(_of_class, {type(module) for module in held}))
    found = {id(x): x for x in contents([*attributes_of(held), *of_classes]) if type(x) is Tensor}
    return [Noted(x) for x in found.values() if not (x.requires_grad or x.is_inference())]


def _of_class(cls: type) -> Iterator[Any]:
    """What methods and attributes of a class refer to; in functions that methods name, what these do."""
    functions_left = []
    for value in (value for base in cls.__mro__ for value in vars(base).values()):
        if isinstance(value, FunctionType):
            functions_left.append(value)
        elif isinstance(value, Tensor | list | tuple | dict):
            yield value
    met: set[FunctionType] = set()
    while functions_left:
        function = functions_left.pop()
        if function in met or function.__code__.co_filename.startswith(LIBRARIES):
            continue
        met.add(function)
        names = global_names(function.__code__)
        named = [*map(function.__globals__.get, names), *variables_around(function)]
        yield from (x for x in named if isinstance(x, Tensor))
        functions_left += [x for x in named if isinstance(x, FunctionType)]


# of a tensor these take the dtype and the device, and the shape at most
OF_KIND = {
    *functions("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"),
    *functions("zeros_like", "ones_like", "full_like", "empty_like"),
}
MAKES = OF_KIND | {
    *functions("arange", "linspace", "logspace", "eye", "tensor", "meshgrid", "cartesian_prod", "tril_indices"),
    *functions("zeros", "ones", "full", "empty"),
}
OF_ARRAYS = {*functions("as_tensor", "asarray")}
READS_ARRAYS = {*functions("numpy", "__array__", "tolist")}
READS_NUMBERS = READS_ARRAYS | {*functions("item", "__int__", "__index__", "__float__")}
LOOKED_AT = MAKES | OF_ARRAYS | READS_NUMBERS | {*functions("detach")}
