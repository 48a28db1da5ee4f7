"""Real processes: a test file starts itself under torchrun, and each process runs the file's scenarios."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

Scenario = Callable[[int, int], None]  # (rank, world size)
TESTS = Path(__file__).parent


def torchrun(script: str | Path, processes: int, *arguments: str, timeout: int = 120) -> str:
    """Runs a script in so many processes; what they printed.

    Raises:
        AssertionError: If a process failed, with its traceback.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [*command, str(script), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert run.returncode == 0, f"{run.stdout[-4000:]}\n{run.stderr[-8000:]}"
    return run.stdout


def run_scenarios(scenarios: Iterable[Scenario]) -> None:
    """What each process does: one scenario after the other, from the same seed; then it ends.

    It ends at once, as threads of gloo may outlive the group, and what destroys them at the interpreter's end aborts
    ("terminate called without an active exception"), once in a few runs on an idle machine.
    """
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.set_default_dtype(torch.float64)
    for scenario in scenarios:
        torch.manual_seed(0)
        scenario(dist.get_rank(), dist.get_world_size())
        dist.barrier()
        print(f"passed {scenario.__name__}", flush=True)
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def gathered(tensor: torch.Tensor) -> list[torch.Tensor]:
    """A tensor of the same shape from each rank."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return parts


def averaged(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack(gathered(tensor)).mean(0)
