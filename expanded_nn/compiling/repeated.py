"""A call of the same kind as the last one, known by the objects themselves: that is cheaper than a key."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from expanded_nn.common.steady import OWN_STATE
from expanded_nn.compiling.kinds import OF_EVERY_MODULE, of_surroundings
from expanded_nn.compiling.looks import PLAIN, StepValues, is_fixed
from expanded_nn.compiling.names import HOOKS
from expanded_nn.recording.recorder import Recorder

_LOOKED_AT = "training", "_parameters", "_buffers", "_modules", *HOOKS
_NOT_THE_USERS = {*OF_EVERY_MODULE, *OWN_STATE}
_FACTS = attrgetter("layout", "requires_grad", "shape", "dtype", "device")
_STATE_OF_PLAIN = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks", "grad")
_STATE = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks", "grad", "grad_sample")


class Repeated:
    """What the kind of a call depends on, as it was at that call.

    `holds` is stricter than the comparison of keys: objects have to be the same ones, not equal ones, and there are no
    gradients and rows. Nothing is compared by a method of the user's, nor by the numbers in a tensor.

    Attributes:
        arguments: The arguments; of tensors the facts and strides.
        surroundings: The key of torch's global state.
        referred: Gives the values that the step refers to by names.
        values: These values.
        look: What is in them.
        recorders: The recorders, with their settings.
        modules: The modules, with the number of attributes and what gets those that are looked at.
        attributes: These attributes, of one module after the other.
        mappings: Children, parameters, buffers and hooks of each module, and hooks of parameters.
        lengths: The length of each.
        filled: Those of them that hold anything.
        contents: The values in these, one after the other.
        tensors: Parameters, buffers, and tensors among the attributes.
        facts: Their shapes, dtypes and the like.
        strided: Those of them that have strides, and these.
        parameters: Parameters, with what gets their hooks, gradients and rows.
        states: These, one after the other.
    """

    def __init__(
        self, args: Sequence[Any], step_values: StepValues, modules: Sequence[nn.Module], recorders: Sequence[Recorder]
    ) -> None:
        self.arguments = [(type(arg), (arg.stride(), _FACTS(arg)) if type(arg) is Tensor else arg) for arg in args]
        self.surroundings, self.referred = of_surroundings(), step_values.referred
        self.values, self.look = self.referred.values(), step_values.looks[-1]  # that of this call's key
        self.recorders = [(recorder, recorder.settings) for recorder in recorders]
        self.modules: list[tuple[nn.Module, int, Any]] = []
        self.mappings: list[dict[Any, Any]] = []
        tensors: list[Tensor] = []
        for module in modules:
            attributes = vars(module)
            names = [name for name in attributes if name not in OF_EVERY_MODULE or name == "_recorder"]
            self.modules.append((module, len(attributes), itemgetter(*_LOOKED_AT, *names)))
            self.mappings += [attributes[name] for name in _LOOKED_AT[1:]]
            values = chain(
                attributes["_parameters"].values(), attributes["_buffers"].values(), map(attributes.get, names)
            )
            tensors += [value for value in values if isinstance(value, Tensor)]
        parameters = dict.fromkeys(tensor for tensor in tensors if isinstance(tensor, nn.Parameter))
        hooks = [(parameter._backward_hooks, parameter._post_accumulate_grad_hooks) for parameter in parameters]
        self.mappings += [mapping for mapping in chain.from_iterable(hooks) if mapping is not None]
        self.attributes = [value for module, _, get in self.modules for value in get(vars(module))]
        self.lengths = [*map(len, self.mappings)]
        self.filled = [mapping for mapping in self.mappings if mapping]
        self.contents = [value for mapping in self.filled for value in mapping.values()]
        self.tensors = tensors
        self.facts = [*map(_FACTS, tensors)]
        strided = [tensor for tensor in tensors if tensor.layout is torch.strided]
        self.strided = strided, [*map(Tensor.stride, strided)]
        self.parameters = [(p, _STATE if hasattr(p, "grad_sample") else _STATE_OF_PLAIN) for p in parameters]
        self.states = [value for parameter, get in self.parameters for value in get(parameter)]

    @staticmethod
    def serves(args: Sequence[Any], modules: Sequence[nn.Module], recorders: Sequence[Recorder]) -> bool:
        """Whether a call is simple enough.

        Only tensors and numbers are arguments, no attribute of a module holds what may change in it, and there are no
        gradients and no rows.
        """
        tensors = [arg for arg in args if type(arg) is Tensor]
        are_simple = all(type(arg) in PLAIN or type(arg) is Tensor for arg in args)
        if not are_simple or any(tensor.requires_grad for tensor in tensors) or len({*map(id, tensors)}) < len(tensors):
            return False
        if not all(isinstance(vars(module)[name], dict) for module in modules for name in _LOOKED_AT[1:]):
            return False
        if not all(is_fixed(vars(module)[name]) for module in modules for name in vars(module).keys() - _NOT_THE_USERS):
            return False
        parameters = [parameter for module in modules for parameter in module._parameters.values()]
        is_clear = all(p is None or (p.grad is None and getattr(p, "grad_sample", None) is None) for p in parameters)
        return is_clear and not any(recorder.rows_stand_alone for recorder in recorders)

    def holds(self, args: Sequence[Any]) -> bool:
        """Whether a call is of this kind, and of the same shapes; at each step, so loops are in C."""
        if len(args) != len(self.arguments) or len({*map(id, args)}) < len(args):
            return False
        for arg, (cls, facts) in zip(args, self.arguments, strict=True):
            if type(arg) is not cls:
                return False
            if cls is Tensor:
                if _FACTS(arg) != facts[1] or arg.stride() != facts[0]:
                    return False
            elif arg is not facts:
                return False
        values = self.referred.values()
        if len(values) != len(self.values) or not all(map(is_, values, self.values)):
            return False
        if not self.look.holds():
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
            and all(map(is_, chain.from_iterable([get(p) for p, get in self.parameters]), self.states))
            and of_surroundings() == self.surroundings
        )
