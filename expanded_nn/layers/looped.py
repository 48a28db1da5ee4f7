"""The general rule where `vmap` cannot follow a forward: the samples go through it one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from expanded_nn._batch import contents
from expanded_nn._errors import complaint
from expanded_nn.layers.trial import flatten
from expanded_nn.recording.backward import graph_of


def in_a_loop(
    module: Any, one_sample: Callable[..., list[Tensor]], dims: Sequence[int | None], returned: list[Any]
) -> Callable[..., list[Tensor]]:
    """What `vmap` does, for one sample after the other.

    Args:
        module: The module, of the general rule.
        one_sample: Its forward, from the parameters and the arguments of one sample.
        dims: Where the samples stand in each argument, if it has any.
        returned: Where `one_sample` puts what the forward has returned; a second entry says that results were shorter
            for some samples.
    """

    def over_samples(expanded: list[Tensor], leaves: list[Any]) -> list[Tensor]:
        mapped = [
            [leaf] * module.pass_batch_size if dim is None else leaf.unbind(dim)
            for leaf, dim in zip(leaves, dims, strict=True)
        ]
        weights = [each.unbind() for each in expanded]
        results, others = [], []
        for i in range(module.pass_batch_size):
            results.append(one_sample([each[i] for each in weights], [each[i] for each in mapped]))
            leaves = flatten(returned)[0]
            if any(isinstance(each, Tensor) for leaf in leaves for each in contents(leaf) if each is not leaf):
                raise module._keeping("an object that it returns")
            others.append([each for each in leaves if isinstance(each, bool | int | float | str)])
        if any(each != others[0] for each in others):
            raise module._refusal(
                "its forward returns numbers that differ from sample to sample", "tensors", "Return tensors."
            )
        ends = (result.grad_fn for of_sample in results for result in of_sample)
        if any(type(node).__name__ == "CheckpointFunctionBackward" for node in graph_of(*ends)):
            raise complaint(  # not seen: what `vmap` could not follow is said instead
                module.qualified_name,
                "its samples go through it one after the other, and it holds a reentrant checkpoint",
                "a checkpoint that is not reentrant",
                "Give the checkpoint use_reentrant=False.",
            )
        by_result = list(zip(*results, strict=True))
        if any(len({each.shape for each in of_samples}) > 1 for of_samples in by_result):
            returned.append(True)
        return list(map(_stacked, by_result))

    return over_samples


def _stacked(results: Sequence[Tensor]) -> Tensor:
    """What samples have returned, one after the other, as one tensor; shorter ones are filled up with zeros.

    So `pad_packed_sequence` fills a batch up. Whether it is right is for the comparison with the whole batch to say.
    """
    shapes = {each.shape for each in results}
    if len(shapes) > 1 and len({len(shape) for shape in shapes}) == 1:
        sizes = [max(sizes) for sizes in zip(*shapes, strict=True)]
        results = [_filled_up(each, sizes) for each in results]
    return torch.stack(list(results))


def _filled_up(part: Tensor, sizes: Sequence[int]) -> Tensor:
    missing = [size - own for size, own in zip(sizes, part.shape, strict=True)]
    return F.pad(part, [number for each in reversed(missing) for number in (0, each)])
