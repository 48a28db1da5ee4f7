"""Whether a forward does what that of the model from before `convert` does, with the same parameters."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from torch import Tensor

from expanded_nn._errors import PerSampleError, complaint
from expanded_nn.common.chance import WithoutChance
from expanded_nn.common.modes import without_fused_inference
from expanded_nn.common.rounding import are_like
from expanded_nn.recording.graph import leaves_behind

TRIES = 8  # of forwards that seem to leave a parameter out


def refusal_of_another_model(comparison: Any, whole: list[Any], *, is_random: bool) -> PerSampleError | None:
    """The error where the plain model gives something else, or uses a parameter that this one leaves out.

    Such a one would never be trained; where it is zero, the results do not tell. A forward may choose by chance or
    count its calls, so both run several times.

    Args:
        comparison: What runs the forwards.
        whole: The results of the forward. They are let go of, as there may be no memory for two graphs.
        is_random: Whether it has drawn random numbers.
    """
    chance, missed, module = WithoutChance() if is_random else nullcontext(), None, comparison.module
    used, results = _leaves_of(whole), [x.detach() if isinstance(x, Tensor) else x for x in whole]
    whole.clear()
    try:
        with without_fused_inference, chance:
            for number in range(TRIES):
                with comparison.recorder.in_general_rule({}):
                    plain, _ = comparison.run(
                        lambda args, kwargs: _untouched(module)(*args, **kwargs), comparison.leaves
                    )
                is_told = not number and not is_random and comparison.has_plain_model()
                if is_told and not are_like(plain, results):
                    what = "its results are not those of the plain model"
                    return None if comparison.chooses_by_chance() else _refusal(comparison, what)
                missed = (_leaves_of(plain) if missed is None else missed & _leaves_of(plain)) - used
                if not missed:
                    return None
                missed -= _leaves_of(comparison.run(comparison.forward, comparison.leaves)[0])
    except Exception:  # as with weights that come with a batch dimension, or a method of the other class
        return None
    unused = next((parameter for parameter in module.parameters() if missed and parameter in missed), None)
    if unused is None:
        return None
    name = comparison.recorder.name_of(unused)
    return _refusal(comparison, f"its results do not depend on {name}, and those of the plain model do")


def _untouched(module: Any) -> Any:
    """The plain model's forward."""
    plain = module._untouched()
    return type(plain).forward.__get__(plain)


def _refusal(comparison: Any, what: str) -> PerSampleError:
    return complaint(
        comparison.recorder.name_of(comparison.module),
        what,
        "a forward that does the same in both",
        "It may ask for the class of a layer or of a parameter, which is another one here: ask isinstance(layer, "
        "nn.Linear) in place of type(layer) is nn.Linear, and likewise for a parameter. "
        "per_sample(compare=False) leaves this comparison out.",
    )


def _leaves_of(results: list[Any]) -> set[Tensor]:
    """The leaves that require gradients, and that results depend on."""
    return set(leaves_behind(*(x.grad_fn for x in results if isinstance(x, Tensor))))
