"""The table from a class to its expanded twin."""

from collections.abc import Callable
from typing import TypeVar

from torch import nn

from expanded_nn._errors import complaint, shown

ExpandedClass = TypeVar("ExpandedClass", bound=type[nn.Module])

# a class, or its name "package.module.Class" -> its twin; or, by name, the first of the two bases of its twin
EXPANDED: dict[type[nn.Module] | str, type[nn.Module]] = {}


def expands(torch_class: type[nn.Module] | str) -> Callable[[ExpandedClass], ExpandedClass]:
    """Registers the decorated class as the expanded twin of `torch_class`.

    The twin derives from `Expanded` and from `torch_class`, has no `__init__` of its own and writes its
    per-sample forward in `expanded_forward`, where `self.expanded("weight")` is the parameter expanded over the
    batch, `(B, *shape)`. It lines the weight's B up with the samples of the input, whatever is between them and the
    features: broadcasting would do so for `(B, features)` only. `check` compares its rows with a loop.

    Args:
        torch_class: The class whose instances `convert` turns into the decorated one. Or its full name,
            `"package.module.Class"`, where the package is not to be imported for it: the twin then derives from
            `Expanded` alone, and `convert` makes the class of both when it meets such a module.

    Raises:
        TypeError: If `torch_class` is no class of modules or full name of one, as where the decorator is written
            without it; or if what is decorated does not derive from it and from `Expanded`.

    Example:
        >>> import torch, expanded_nn as enn
        >>> class Scale(torch.nn.Module):
        ...     def __init__(self, size):
        ...         super().__init__()
        ...         self.weight = torch.nn.Parameter(torch.ones(size))
        ...     def forward(self, x):
        ...         return x * self.weight
        >>> @enn.expands(Scale)
        ... class ExpandedScale(enn.Expanded, Scale):
        ...     ranks = {"weight": 1}  # its number of dimensions in the plain layer
        ...     def expanded_forward(self, x):
        ...         def scaled(x):  # (B, *, size)
        ...             weight = self.expanded("weight")  # (B, size)
        ...             return x * weight.view(weight.shape[0], *[1] * (x.dim() - 2), -1)
        ...         return self.by_sample(scaled, 1, x=x)  # x has one dimension of features
        >>> model = enn.convert(torch.nn.Sequential(Scale(3))).per_sample()
        >>> model(torch.ones(4, 3)).sum(1).mean().backward()
        >>> model[0].weight.grad_sample.shape
        torch.Size([4, 3])
    """
    refuse_no_class("expands", torch_class, "Write @expands(TheClass) above class Mine(Expanded, TheClass).")

    def register(expanded_class: ExpandedClass) -> ExpandedClass:
        decorated: object = expanded_class
        is_class = isinstance(decorated, type) and issubclass(decorated, nn.Module)
        if is_class and isinstance(torch_class, type) and not issubclass(expanded_class, torch_class):
            raise TypeError(
                f"{expanded_class.__name__} expands {torch_class.__name__} but does not derive from it. "
                f"Declare it as `class {expanded_class.__name__}(Expanded, {torch_class.__name__})`."
            )
        if not is_class or not hasattr(decorated, "per_sample"):
            wanted = "a class that derives from expanded_nn.Expanded"
            remedy = "Write it above class Mine(Expanded, TheClass)."
            raise TypeError(str(complaint("expands", f"it decorates {shown(decorated)}", wanted, remedy)))
        EXPANDED[torch_class] = expanded_class
        return expanded_class

    return register


def refuse_no_class(who: str, value: object, remedy: str) -> None:
    """Raises a `TypeError` for what is neither a class of plain modules nor the full name of one."""
    is_class = isinstance(value, type) and issubclass(value, nn.Module) and not hasattr(value, "expanded_forward")
    if not is_class and not (isinstance(value, str) and "." in value):
        wanted = 'a class of modules, or its full name, "package.module.Class"'
        raise TypeError(str(complaint(who, f"it is given {shown(value)}", wanted, remedy)))


def registered(module_class: type[nn.Module]) -> tuple[type[nn.Module], type[nn.Module]] | None:
    """The nearest class in the ancestry that has an entry, and the entry: its twin, or the first base of its twin."""
    for base in module_class.__mro__:
        twin = EXPANDED.get(base) or EXPANDED.get(f"{base.__module__}.{base.__qualname__}")
        if twin is not None:
            return base, twin
    return None


def plain_class_of(module_class: type[nn.Module]) -> type[nn.Module] | None:
    """The class that modules of a class had before `convert`; `None` if there is none."""
    plain: type[nn.Module] | None = vars(module_class).get("plain_class")
    base, twin = registered(module_class) or (None, None)
    return plain or (base if twin is module_class else None)
