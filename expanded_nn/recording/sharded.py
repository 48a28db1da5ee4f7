"""Parameters that FSDP2 has sharded: `DTensor`s over the ranks, whole only inside their layer's forward."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from expanded_nn._errors import complaint
from expanded_nn.common.traced import known_zero, refuse_values


def _distributed() -> Any:
    """`torch.distributed.tensor`, if it is imported: that takes long, and without it there are no shards."""
    return sys.modules.get("torch.distributed.tensor")


def is_shard(parameter: Any) -> bool:
    """Whether each rank holds a part of the parameter."""
    distributed = _distributed()
    kind = getattr(distributed, "DTensor", None)  # not there yet while another thread imports the module
    return kind is not None and isinstance(parameter, kind)


def is_sharded(module: Any) -> bool:
    """Whether FSDP2 gathers parameters for a module's forward."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return kind is not None and isinstance(module, kind)


def holds_back(module: Any) -> bool:
    """Whether FSDP2 keeps gradients of a module until a later backward; nothing public tells."""
    if not is_sharded(module):
        return False
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # one, up to torch 2.10
    return any(group is not None and not (group.reduce_grads and group.all_reduce_grads) for group in groups)


def is_zero(grad: Tensor) -> bool:
    """Whether a gradient is zero, on all ranks where it is sharded."""
    known = known_zero(grad)
    if known is not None:
        return known
    refuse_values("a parameter has a gradient and no per-sample gradients")
    nonzero = (grad._values() if grad.is_sparse else grad).any()
    return not bool(nonzero.full_tensor() if is_shard(nonzero) else nonzero)  # type: ignore[attr-defined]


def scattered(
    total: Tensor,  # shape
    parameter: Any,  # a DTensor
) -> Tensor:
    """The sum over the ranks of a tensor of the whole parameter's shape, sharded as the parameter is.

    Raises:
        PerSampleError: If the rows are of another shape, as under tensor parallelism.
    """
    if total.shape != parameter.shape or is_shard(total):
        raise complaint(
            "clip_grad_sample_norms_",
            f"per-sample gradients of shape {tuple(total.shape)}, and a sharded parameter of {tuple(parameter.shape)}",
            "those of the whole parameter",
            "Shard by torch.distributed.fsdp.fully_shard alone.",
        )
    part = _part_of_a_sum(total.to(parameter.dtype), parameter.device_mesh)
    return part.redistribute(placements=parameter.placements)  # type: ignore[no-any-return]


def added_over_ranks(count: int, parameter: Any) -> int:
    """The sum of a number over the ranks that share a parameter."""
    mesh = parameter.device_mesh
    return int(_part_of_a_sum(torch.tensor(count, device=mesh.device_type), mesh).full_tensor())


def true_on_all_ranks(condition: bool, parameter: Any) -> bool:
    """Whether something is true on all ranks that share a parameter; here, if it is no shard.

    Each rank has rows of its own samples, and all have to come to the same verdict: else one waits for the others.
    """
    return added_over_ranks(not condition, parameter) == 0 if is_shard(parameter) else condition


def _part_of_a_sum(local: Tensor, mesh: Any) -> Any:
    """A DTensor that is the sum of what the ranks hold."""
    distributed = _distributed()
    return distributed.DTensor.from_local(local, mesh, [distributed.Partial()] * mesh.ndim, run_check=False)
