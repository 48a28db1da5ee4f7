"""A call of the same kind as the last one, known by the objects themselves: that is cheaper than a key."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any, cast

import torch
from torch import Tensor, nn

from expanded_nn.compiling.kinds import NOT_THE_USERS, of_gradient, of_surroundings, own_attributes
from expanded_nn.compiling.looks import Look, StepValues, is_fixed
from expanded_nn.compiling.names import HOOKS, names_in_class
from expanded_nn.recording.recorder import Recorder

_LOOKED_AT = "training", "_parameters", "_buffers", "_modules", *HOOKS
_FACTS = attrgetter("layout", "requires_grad", "shape", "dtype", "device")
_HOOKS_OF_PARAMETER = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")


class Repeated:
    """What the kind of a call depends on, as it was at that call.

    `holds` is stricter than the comparison of keys: objects have to be the same ones, not equal ones. Nothing is
    compared by a method of the user's, nor by the numbers in a tensor.

    Attributes:
        arguments: The key of the arguments, and the shapes of the tensors among them.
        surroundings: The key of torch's global state.
        referred: Gives the values that the step refers to by names.
        values: These values.
        looks: What is in them, and in what the attributes of modules hold.
        recorders: The recorders, with their settings.
        modules: The modules, with the number of attributes and what gets those that are looked at.
        attributes: These attributes, of one module after the other.
        mappings: Children, parameters, buffers and hooks of each module, hooks of parameters; and their attributes, of
            which there are no others than `grad_sample`.
        lengths: The length of each.
        filled: Those of them that hold anything.
        contents: The values in these, one after the other.
        tensors: Parameters, buffers, and tensors among the attributes.
        facts: Their shapes, dtypes and the like.
        strided: Those of them that have strides, and these.
        parameters: The parameters.
        hooks: Their hooks.
        gradients: Which gradients and rows they have.
    """

    def __init__(
        self,
        arguments: Hashable,
        step_values: StepValues,
        modules: Sequence[nn.Module],
        recorders: Sequence[Recorder],
    ) -> None:
        self.arguments = arguments
        self.surroundings, self.referred = of_surroundings(), step_values.referred
        self.values, looks = self.referred.values(), {(0, 0): step_values.looks[-1]}  # that of this call's key
        self.recorders = [(recorder, recorder.settings) for recorder in recorders]
        self.modules: list[tuple[nn.Module, int, Any]] = []
        self.mappings: list[dict[Any, Any]] = []
        tensors: list[Tensor] = []
        for module in modules:
            attributes = vars(module)
            names = [name for name in attributes if name not in NOT_THE_USERS or name == "_recorder"]
            self.modules.append((module, len(attributes), itemgetter(*_LOOKED_AT, *names)))
            self.mappings += [attributes[name] for name in _LOOKED_AT[1:]]
            values = chain(
                attributes["_parameters"].values(), attributes["_buffers"].values(), map(attributes.get, names)
            )
            tensors += [value for value in values if isinstance(value, Tensor)]
            for value in [attributes[name] for name in attributes.keys() - NOT_THE_USERS]:
                if not is_fixed(value):
                    named = names_in_class(cast(Any, type(module)))
                    looks.setdefault((id(value), id(named)), Look([value], named))
        self.looks = [*looks.values()]
        self.parameters = [*dict.fromkeys(tensor for tensor in tensors if isinstance(tensor, nn.Parameter))]
        self.hooks = self._hooks_of_parameters()
        self.mappings += [mapping for mapping in self.hooks if mapping is not None]
        self.attributes = [value for module, _, get in self.modules for value in get(vars(module))]
        self.filled = [mapping for mapping in self.mappings if mapping]
        self.contents = [value for mapping in self.filled for value in mapping.values()]
        self.mappings += map(vars, self.parameters)
        self.lengths = [*map(len, self.mappings)]
        self.tensors = tensors
        self.facts = [*map(_FACTS, tensors)]
        strided = [tensor for tensor in tensors if tensor.layout is torch.strided]
        self.strided = strided, [*map(Tensor.stride, strided)]
        self.gradients = self._gradients()

    def _hooks_of_parameters(self) -> list[Any]:
        return [*chain.from_iterable(map(_HOOKS_OF_PARAMETER, self.parameters))]

    def _gradients(self) -> list[Hashable]:
        recorders = [recorder for recorder, _ in self.recorders]
        return [of_gradient(parameter, recorders) for parameter in self.parameters]

    @staticmethod
    def serves(modules: Sequence[nn.Module], recorders: Sequence[Recorder]) -> bool:
        """Whether a call is simple enough."""
        parameters = [parameter for module in modules for parameter in module._parameters.values()]
        if any(parameter is not None and own_attributes(parameter) for parameter in parameters):
            return False
        are_dicts = all(isinstance(vars(module)[name], dict) for module in modules for name in _LOOKED_AT[1:])
        return are_dicts and not any(recorder.rows_stand_alone for recorder in recorders)

    def holds(self, arguments: Hashable) -> bool:
        """Whether a call is of this kind, and of the same shapes; at each step, so loops are in C."""
        if arguments != self.arguments:
            return False
        values = self.referred.values()
        if len(values) != len(self.values) or not all(map(is_, values, self.values)):
            return False
        if not all(look.holds() for look in self.looks):
            return False
        for recorder, settings in self.recorders:
            if recorder.settings is not settings or recorder.rows_stand_alone:
                return False
        attributes: list[Any] = []
        for module, count, get in self.modules:
            namespace = module.__dict__
            if len(namespace) != count:
                return False
            try:
                attributes += get(namespace)
            except KeyError:
                return False
        return (
            all(map(is_, attributes, self.attributes))
            and [*map(len, self.mappings)] == self.lengths
            and all(map(is_, chain.from_iterable(map(dict.values, self.filled)), self.contents))
            and [*map(_FACTS, self.tensors)] == self.facts
            and [*map(Tensor.stride, self.strided[0])] == self.strided[1]
            and all(map(is_, self._hooks_of_parameters(), self.hooks))
            and self._gradients() == self.gradients
            and of_surroundings() == self.surroundings
        )
