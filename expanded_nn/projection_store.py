"""Projections of many samples' gradients on disk, written by any number of processes, each of which may be killed."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from expanded_nn._errors import PerSampleError, complaint, refuse_no_count, refuse_no_model, refuse_other_kind
from expanded_nn.modules.held import changes_itself, first_few
from expanded_nn.projection import Projection
from expanded_nn.recording.sharded import is_shard
from expanded_nn.rows.arguments import refuse_no_rows

try:
    import fcntl
except ImportError:  # Windows: nothing tells of two writers there
    fcntl = None  # type: ignore[assignment]

VERSION = 1
SETTINGS, NUMBERS, IDS = "settings.json", "projections.float32", "ids.int64"


class ProjectionStore:
    """The projections of many samples' gradients, in a folder on disk.

    Each process writes to a folder of its own within, `rank-0`, `rank-1` and so on, under `torchrun` or where
    `torch.distributed` is initialized; reading puts them together. In each are the settings as JSON, the numbers
    `(samples, dim)` in float32 and the samples' ids in int64, both without a header, for `numpy.memmap` and the like. A
    sample is done once its id is written, after its numbers: a process that is killed loses the batch it was at, and
    the next run goes on from there, with any number of processes. Samples may be added to a store that others read.

    Args:
        folder: Where they are, or will be.
        projection: The map. By default that of the folder.
        model: The model whose gradients are projected, as it is now: the folder takes those of no other names or
            shapes of trainable parameters, and of no other weights. Without it the store is only read.

    Raises:
        PerSampleError: If the folder holds projections of another kind, `dim`, seed or model, or none and there is no
            projection; or if another process writes there.

    Example:
        >>> import tempfile, torch, expanded_nn as enn
        >>> folder, x = tempfile.mkdtemp(), torch.randn(10, 30)
        >>> model = enn.convert(torch.nn.Linear(30, 20)).per_sample(accumulate_grad=False)
        >>> store = enn.ProjectionStore(folder, enn.Projection(64), model)
        >>> for ids in store.batches(range(len(x)), 4, progress=False):
        ...     model(x[ids]).square().sum(1).mean().backward()
        ...     store.add(ids, enn.per_sample_grads(model))
        >>> enn.ProjectionStore(folder).read([3, 1]).shape
        torch.Size([2, 64])
    """

    def __init__(
        self, folder: str | os.PathLike[str], projection: Projection | None = None, model: nn.Module | None = None
    ) -> None:
        if projection is not None:
            remedy = "Give it as in ProjectionStore(folder, Projection(512), model)."
            refuse_other_kind("ProjectionStore", "projection", projection, Projection, "a Projection", remedy)
        if model is not None:
            refuse_no_model("ProjectionStore", model)
        self.folder = Path(folder)
        self._part: _Part | None = None
        self._model = model
        settings = self._settings()
        if projection is None:
            if settings is None:
                raise _complaint(
                    self.folder,
                    "it holds no projections",
                    "those of an earlier run",
                    "To write it, give a projection and a model.",
                )
            projection = Projection(settings["dim"], kind=settings["kind"], seed=settings["seed"])
        elif settings is not None:
            self._refuse_other_settings(settings, settings | _map_settings(projection))
        self.projection = projection
        if model is not None:
            of_model = {"parameters": _trainable(model), "weights": _digest(model)}
            wanted = {"version": VERSION} | _map_settings(projection) | of_model
            self._refuse_other_settings(settings or wanted, wanted)
            self._part = _Part(self.folder / f"rank-{_rank()[0]}", wanted)
            self._traits = _traits(model)

    def __repr__(self) -> str:
        return f"ProjectionStore({str(self.folder)!r}, {self.projection}, {len(self)} samples)"

    def __len__(self) -> int:
        """How many samples are done."""
        return len(self.ids)

    @property
    def ids(self) -> Tensor:
        """The ids of the samples that are done, in order, `(samples,)`."""
        done: Tensor = torch.cat([_as_ids([]), *map(_ids, self._folders())]).unique()
        return done

    def batches(self, ids: Sequence[int] | Tensor, batch_size: int, *, progress: bool = True) -> Iterator[Tensor]:
        """This process's share of the samples that are not done, batch by batch.

        Args:
            ids: All samples, the same in all processes: whole numbers from 0, such as `range(len(dataset))`; one that
                stands there twice comes once.
            batch_size: How many at once.
            progress: Whether the first process shows a progress bar, if tqdm is installed.

        Returns:
            An iterator of ids `(B,)`.
        """
        refuse_no_count("ProjectionStore.batches", "batch_size", batch_size, 1)
        rank, processes = _rank()
        numbers = _as_ids(ids)
        if len(numbers.unique()) < len(numbers):
            numbers = torch.tensor([*dict.fromkeys(numbers.tolist())])
        share = numbers[rank::processes]  # before the done ones are left out: other processes add to these
        is_done = torch.isin(share, self.ids)
        shows = progress and rank == 0 and find_spec("tqdm") is not None
        bar = import_module("tqdm").tqdm(total=len(share), initial=int(is_done.sum()), unit="sample") if shows else None
        for batch in share[~is_done].split(batch_size) if not is_done.all() else ():
            yield batch
            if bar is not None:
                bar.update(len(batch))
        if bar is not None:
            bar.close()

    def add(self, ids: Sequence[int] | Tensor, grads: Mapping[str, Tensor]) -> None:
        """Projects the rows of some samples, and writes the projections to the disk.

        Args:
            ids: The samples, `(B,)`.
            grads: Parameter name -> `(B, *shape)`, as `per_sample_grads` gives them. Parameters that these samples did
                not use may be lacking.

        Raises:
            PerSampleError: If the store is only read, if `grads` has parameters or shapes that the model had not, or
                not one row for each id, if the model's weights have changed since the store was opened or parameters
                were frozen, if a sample is done already, or if the disk is full. Then nothing was added, and what was
                there is kept.
        """
        if self._part is None or self._model is None:
            raise _complaint(
                self.folder,
                "it was opened for reading",
                "one opened for writing",
                "Open it with the model: ProjectionStore(folder, projection, model).",
            )
        refuse_no_rows("ProjectionStore.add(ids, grads)", "grads", grads)
        shapes = {name: list(rows.shape[1:]) for name, rows in grads.items()}
        settings = self._part.settings
        self._refuse_other_settings(settings, settings | {"parameters": _trainable(self._model) | shapes})
        traits = _traits(self._model)
        if traits != self._traits:  # a training's step, or the same checkpoint loaded again
            self._refuse_other_settings(settings, settings | {"weights": _digest(self._model)})
            self._traits = traits
        numbers = self.projection(grads).to("cpu", torch.float32)
        bad = (~numbers.isfinite()).any(1).nonzero().flatten().tolist()
        if bad:
            raise complaint(
                "ProjectionStore.add",
                f"the projections of the rows {first_few(bad)} are inf or NaN",
                "finite per-sample gradients",
                "Leave these samples out, or scale the loss.",
            )
        self._part.add(_as_ids(ids), numbers)

    def parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """What each process wrote: ids `(n,)`, and projections `(n, dim)`, which are mapped to memory, not read."""
        for folder in self._folders():
            dim, path = self.projection.dim, folder / NUMBERS
            ids = _ids_with_numbers(folder, dim)
            if len(ids):
                size = len(ids) * dim
                numbers = torch.from_file(str(path), shared=False, size=size, dtype=torch.float32, device="cpu")
                yield ids, numbers.view(len(ids), dim)

    def read(self, ids: Sequence[int] | Tensor) -> Tensor:
        """The projections of some samples, `(n, dim)`, in the order of `ids`.

        Raises:
            PerSampleError: If one is not done.
        """
        wanted = _as_ids(ids)
        numbers = torch.empty(len(wanted), self.projection.dim, dtype=torch.float32, device="cpu")
        is_read = torch.zeros(len(wanted), dtype=torch.bool, device="cpu")
        for part_ids, projections in self.parts():
            part_ids, order = part_ids.sort()
            places = torch.searchsorted(part_ids, wanted).clamp(max=len(part_ids) - 1)
            is_in_part = part_ids[places] == wanted
            numbers[is_in_part] = projections[order[places[is_in_part]]]
            is_read |= is_in_part
        if not is_read.all():
            lacking = wanted[~is_read].tolist()
            raise _complaint(
                self.folder,
                f"{len(lacking)} samples are not done: {first_few(lacking)}",
                "all of them",
                "Run the script to the end.",
            )
        return numbers

    def _folders(self) -> list[Path]:
        return sorted(path.parent for path in self.folder.glob(f"rank-*/{SETTINGS}"))

    def _settings(self) -> dict[str, Any] | None:
        """The settings of all parts, which have to be the same."""
        of_parts = [self._read_settings(folder / SETTINGS) for folder in self._folders()]
        for settings in of_parts:
            if settings["version"] > VERSION:
                raise _complaint(
                    self.folder,
                    f"its format is version {settings['version']}",
                    f"{VERSION}",
                    "Update expanded_nn.",
                )
            self._refuse_other_settings(settings, of_parts[0])
        return of_parts[0] if of_parts else None

    def _read_settings(self, path: Path) -> dict[str, Any]:
        settings: Any = None
        error: Exception | None = None
        try:
            settings = json.loads(path.read_text())
        except ValueError as raised:
            error = raised
        if not isinstance(settings, dict) or not isinstance(settings.get("version"), int):
            raise _complaint(
                self.folder,
                f"{str(path)!r} is damaged ({error or 'it names no version'})",
                "settings as JSON",
                "Copy the file from another part of the store, or delete this part of it.",
            ) from error
        return settings

    def _refuse_other_settings(self, settings: dict[str, Any], wanted: dict[str, Any]) -> None:
        """Raises if the settings of the projections are others than those wanted, and names the first that differ."""
        settings, wanted = _flat(settings), _flat(wanted)
        differing = sorted(name for name in settings.keys() | wanted.keys() if settings.get(name) != wanted.get(name))
        if differing:
            settings, wanted = ({name: flat.get(name) for name in differing[:10]} for flat in (settings, wanted))
            remedy = "Take another folder, or the projection and the model that this one was begun with."
            if differing == ["weights"]:
                remedy = (
                    "The model has other weights or buffers than this folder was begun with: load its checkpoint, or "
                    "seed the initialization (torch.manual_seed). For these weights take another folder."
                )
            raise _complaint(self.folder, f"it holds projections with {settings}", f"{wanted}", remedy)


class _Part:
    """What one process writes."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder, self.settings, self._process = folder, settings, os.getpid()
        folder.mkdir(parents=True, exist_ok=True)
        self._files = []
        for path in (folder / NUMBERS, folder / IDS):
            path.touch()
            self._files.append(path.open("r+b", buffering=0))  # a buffer would write later what has failed now
            weakref.finalize(self, self._files[-1].close)
        if fcntl is not None:
            try:
                fcntl.flock(self._files[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise _complaint(
                    self.folder,
                    "another process, or another store in this one, writes here",
                    "one writer at a time",
                    "In one process drop the other store first, del store. Start several processes with torchrun, or "
                    "give each its RANK and WORLD_SIZE.",
                ) from None
            except OSError:  # a file system without locks
                pass
        ids = _ids_with_numbers(folder, settings["dim"]).tolist()
        self._done_ids = set(ids)
        if len(self._done_ids) < len(ids):
            raise _complaint(self.folder, "a sample is there twice", "each once", "Delete this part, which is damaged.")
        if not (folder / SETTINGS).exists():
            draft = folder / f"{SETTINGS}.new"
            with draft.open("w") as file:
                json.dump(settings, file, indent=1)
                file.flush()
                os.fsync(file.fileno())  # before samples count as done
            draft.replace(folder / SETTINGS)

    def add(self, ids: Tensor, numbers: Tensor) -> None:
        """Writes the numbers `(B, dim)`, and behind them the ids `(B,)`, by which they count as done."""
        if os.getpid() != self._process:  # both would write at the same places
            raise _complaint(
                self.folder,
                "it was opened in another process, from which this one was forked",
                "a store of this process",
                "Open it in each process that writes, each with its RANK and WORLD_SIZE.",
            )
        new_ids = ids.tolist()
        if len(new_ids) != len(numbers) or len(set(new_ids)) < len(new_ids):
            raise _complaint(
                self.folder,
                f"it is given {len(numbers)} rows and the ids {first_few(new_ids)}",
                "as many ids as rows, and no id twice",
                "Give the ids of the samples whose rows they are.",
            )
        done = [i for i in new_ids if i in self._done_ids]
        if done:
            raise _complaint(
                self.folder, f"the ids {first_few(done)} are done already", "new ones", "Take the ids from batches()."
            )
        count = len(self._done_ids)
        try:
            self._files[1].truncate(count * ids.itemsize)  # those of a batch that failed; its numbers are written over
            for file, tensor in zip(self._files, (numbers, ids), strict=True):
                _write(file, count * tensor[:1].nbytes, tensor)
        except OSError as error:
            raise _complaint(
                self.folder,
                f"{len(new_ids)} samples could not be written ({error.strerror})",
                f"room for {numbers.nbytes + ids.nbytes} bytes",
                f"Make room and add them again, or run again: the {count} samples before them are kept.",
            ) from error
        self._done_ids.update(new_ids)


def _complaint(folder: Path, problem: str, wanted: str, remedy: str) -> PerSampleError:
    return complaint(f"ProjectionStore({str(folder)!r})", problem, wanted, remedy)


def _rank() -> tuple[int, int]:
    """This process, and how many there are."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def _as_ids(ids: Sequence[int] | Tensor) -> Tensor:
    try:
        numbers = torch.as_tensor(ids, device="cpu")
    except (TypeError, ValueError, RuntimeError):  # strings, None
        raise ValueError(f"ProjectionStore: ids are {ids!r}; wanted whole numbers, 0 or more.") from None
    is_whole = not (numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool)
    whole = numbers.to(torch.int64) if is_whole else numbers  # torch has no least number of a uint32
    if numbers.numel() and (numbers.dim() != 1 or not is_whole or whole.min() < 0):
        raise ValueError(f"ProjectionStore: ids are {numbers}; wanted whole numbers, 0 or more, as in range(n).")
    return whole.to(torch.int64)


def _ids(folder: Path) -> Tensor:
    data = (folder / IDS).read_bytes()
    count = len(data) // 8  # without one that was cut off
    return torch.frombuffer(bytearray(data), dtype=torch.int64, count=count) if count else _as_ids([])


def _ids_with_numbers(folder: Path, dim: int) -> Tensor:
    """The ids in a part of a store; raises if there are not `dim` numbers for each."""
    ids, path = _ids(folder), folder / NUMBERS
    if path.stat().st_size < 4 * len(ids) * dim:
        raise _complaint(
            folder.parent,
            f"{str(path)!r} has {path.stat().st_size} bytes",
            f"{4 * len(ids) * dim}, for {len(ids)} samples",
            "Copy the folder again, or delete this part of it.",
        )
    return ids


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _write(file: BinaryIO, start: int, tensor: Tensor) -> None:
    """Writes the numbers at a place in a file, and returns when they are on the disk."""
    tensor = tensor.contiguous()
    data = _bytes(tensor)
    file.seek(start)
    while data:
        data = data[file.write(data) :]
    os.fsync(file.fileno())


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with an entry for the shape of each parameter."""
    shapes = {f"shape of {name}": shape for name, shape in settings["parameters"].items()}
    return {name: value for name, value in settings.items() if name != "parameters"} | shapes


def _map_settings(projection: Projection) -> dict[str, Any]:
    return {"dim": projection.dim, "kind": projection.kind, "seed": projection.seed}


def _trainable(model: nn.Module) -> dict[str, list[int]]:
    """The names and shapes of the parameters whose rows are projected."""
    return {name: list(p.shape) for name, p in model.named_parameters() if p.requires_grad}


def _digest(model: nn.Module) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, value in sorted(model.state_dict().items()):
        if isinstance(value, Tensor):
            full = value.full_tensor() if hasattr(value, "full_tensor") else value  # sharded: the same on each rank
            digest.update(f"{name} {full.dtype} {tuple(full.shape)}".encode())
            full = full.detach().cpu().contiguous()
            digest.update(_bytes(full) if full.numel() else b"")
    return digest.hexdigest()


def _traits(model: nn.Module) -> tuple[list[tuple[int, int, int]], str]:
    """What changes where the weights or the buffers of a model do, at less cost than a digest.

    Of each the tensor, where it is in memory, and how often it was changed in place; and their norm and their sum, as
    fused optimizers and `.data` do not count. Not of shards, as a digest needs all ranks.
    """
    state = {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
    counted = [x for name, x in state.items() if not is_shard(x) and not changes_itself(model, name)]
    places = [(id(x), x.data_ptr(), x._version) for x in counted]
    numbers = [x.detach() for x in counted if x.is_floating_point() and x.numel()]
    total = sum((x.sum().double() for x in numbers), start=torch.zeros((), dtype=torch.float64))
    return places, f"{float(get_total_norm(numbers))} {float(total)}"  # as text, in which NaN is equal to itself
