"""Projections on disk, with real processes that are killed, and several that write at once."""

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import expanded_nn as enn
from processes import torchrun
from some import slow

SAMPLES, DIM, BATCH = 50, 32, 4


def mlp() -> nn.Module:
    torch.manual_seed(7)
    return enn.convert(nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))).per_sample(accumulate_grad=False)


def inputs() -> Tensor:
    return torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(8))


def grads_of(model: nn.Module, x: Tensor) -> enn.PerSampleGrads:
    model(x).sin().sum(1).mean().backward()
    return enn.per_sample_grads(model)


def fill(folder: Path, **options: bool) -> Iterator[Tensor]:
    """Projects what is not done yet, batch by batch."""
    model, x = mlp(), inputs()
    store = enn.ProjectionStore(folder, enn.Projection(DIM, seed=3), model)
    for ids in store.batches(range(SAMPLES), BATCH, **options):
        store.add(ids, grads_of(model, x[ids]))
        yield ids


def filled(folder: Path) -> enn.ProjectionStore:
    list(fill(folder, progress=False))
    return enn.ProjectionStore(folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def expected() -> Tensor:
    return enn.Projection(DIM, seed=3)(grads_of(mlp(), inputs())).float()


def test_what_was_added_is_read(tmp_path: Path) -> None:
    store = filled(tmp_path / "a" / "store")
    assert len(store) == SAMPLES
    assert store.ids.tolist() == list(range(SAMPLES))
    assert repr(store.projection) == repr(enn.Projection(DIM, seed=3))
    torch.testing.assert_close(store.read(range(SAMPLES)), expected())
    some = torch.tensor([7, 3, 3, 49], dtype=torch.int32)
    torch.testing.assert_close(store.read(some), expected()[some])
    for dtype in (torch.uint8, torch.uint32, torch.uint64):
        torch.testing.assert_close(store.read(some.to(dtype)), expected()[some])
    assert store.read([]).shape == (0, DIM)
    ((ids, numbers),) = store.parts()
    torch.testing.assert_close(numbers, expected()[ids])
    assert repr(store) == f"ProjectionStore({str(store.folder)!r}, {store.projection!r}, 50 samples)"


def test_a_sample_that_is_named_twice_comes_once(tmp_path: Path) -> None:
    model, x = mlp(), inputs()
    store = enn.ProjectionStore(tmp_path, enn.Projection(DIM, seed=3), model)
    for ids in store.batches([9, 5, 9, 6, 5], 2, progress=False):
        store.add(ids, grads_of(model, x[ids]))
        model.zero_grad()
    assert store.ids.tolist() == [5, 6, 9]


def test_the_files_are_plain(tmp_path: Path) -> None:
    filled(tmp_path)
    settings = json.loads((tmp_path / "rank-0/settings.json").read_text())
    assert {name: settings[name] for name in ("version", "dim", "kind", "seed")} == {
        "version": 1,
        "dim": DIM,
        "kind": "sketch",
        "seed": 3,
    }
    assert settings["parameters"] == {"0.weight": [9, 6], "0.bias": [9], "2.weight": [3, 9], "2.bias": [3]}
    numbers = np.memmap(tmp_path / "rank-0/projections.float32", dtype="float32", mode="r").reshape(-1, DIM)
    ids = np.fromfile(tmp_path / "rank-0/ids.int64", dtype="int64")
    np.testing.assert_allclose(numbers, expected()[ids], rtol=1e-6)


def test_a_second_run_has_nothing_to_do(tmp_path: Path) -> None:
    filled(tmp_path)
    before = contents(tmp_path)
    assert list(fill(tmp_path)) == []
    assert contents(tmp_path) == before


# --- killed, full disks -----------------------------------------------------------------------------------------


def start(folder: Path, scenario: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, __file__, str(folder), scenario], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def main() -> None:
    """What another process runs."""
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    folder, scenario = Path(sys.argv[1]), sys.argv[2]
    if scenario == "full disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))  # seven samples and a half
    if scenario.startswith("dies"):
        syncs, fsync = int(scenario.split()[1]), os.fsync

        def sync_and_die(file: int) -> None:
            nonlocal syncs
            fsync(file)
            syncs -= 1
            if syncs == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        os.fsync = sync_and_die
    if scenario == "forks":
        model, x = mlp(), inputs()
        store = enn.ProjectionStore(folder, enn.Projection(DIM, seed=3), model)
        child = os.fork()
        ids = torch.arange(BATCH) + (0 if child else BATCH)
        try:
            store.add(ids, grads_of(model, x[ids]))
        except enn.PerSampleError as error:
            print(error, flush=True)
        if child:
            os.waitpid(child, 0)
        return
    try:
        for ids in fill(folder, progress=False):
            print(ids.tolist(), flush=True)
    except enn.PerSampleError as error:
        print(error, flush=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def test_a_killed_process_is_resumed(tmp_path: Path) -> None:
    """Wherever it was; then the files are those of a process that was left alone."""
    filled(tmp_path / "whole")
    folder = tmp_path / "killed"
    for lines in (1, 3):
        process = start(folder, "run")
        assert process.stdout is not None
        assert all(process.stdout.readline() for _ in range(lines))
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    assert (folder / "rank-0/ids.int64").stat().st_size >= 8 * BATCH * 4
    filled(folder)
    assert contents(folder) == contents(tmp_path / "whole")


@pytest.mark.parametrize("syncs", [8, slow(9)])  # the first is of the settings
def test_a_process_that_dies_between_the_numbers_and_the_ids(tmp_path: Path, syncs: int) -> None:
    filled(tmp_path / "whole")
    process = start(tmp_path / "killed", f"dies {syncs}")
    printed, _ = process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert printed.count("\n") == (syncs - 2) // 2
    store = enn.ProjectionStore(tmp_path / "killed")
    assert len(store) == (syncs - 1) // 2 * BATCH  # numbers without ids do not count
    torch.testing.assert_close(store.read(store.ids), expected()[: len(store)])
    filled(tmp_path / "killed")
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def test_what_was_torn_is_written_over(tmp_path: Path) -> None:
    filled(tmp_path / "whole")
    torn = tmp_path / "torn" / "rank-0"
    for _, _ in zip(range(3), fill(tmp_path / "torn", progress=False), strict=False):
        pass
    for name, size in (("projections.float32", 4 * DIM * 2 + 5), ("ids.int64", 3)):
        with (torn / name).open("ab") as file:
            file.write(b"\xff" * size)
    assert len(enn.ProjectionStore(tmp_path / "torn")) == 3 * BATCH
    filled(tmp_path / "torn")
    assert contents(tmp_path / "torn") == contents(tmp_path / "whole")


def test_a_full_disk(tmp_path: Path) -> None:
    """The samples before are kept, and the next run goes on."""
    process = start(tmp_path / "full", "full disk")
    printed, errors = process.communicate()
    assert process.returncode == 0, errors
    assert "4 samples could not be written (File too large); wanted room for 544 bytes. Make room" in printed
    assert "the 4 samples before them are kept" in printed
    assert enn.ProjectionStore(tmp_path / "full").ids.tolist() == [0, 1, 2, 3]
    filled(tmp_path / "full")
    filled(tmp_path / "whole")
    assert contents(tmp_path / "full") == contents(tmp_path / "whole")


# --- several processes ------------------------------------------------------------------------------------------


def test_two_processes_give_what_one_gives(tmp_path: Path) -> None:
    """Also where one process had begun."""
    whole, both = filled(tmp_path / "whole"), tmp_path / "both"
    for _, _ in zip(range(2), fill(both, progress=False), strict=False):
        pass
    torchrun(__file__, 2, str(both), "run")
    store = enn.ProjectionStore(both)
    sizes = [len(ids) for ids, _ in store.parts()]
    assert len(sizes) == 2
    assert sum(sizes) == SAMPLES, "a sample was done twice"
    assert all(size >= SAMPLES // 2 - 2 * BATCH for size in sizes)
    torch.testing.assert_close(store.read(range(SAMPLES)), whole.read(range(SAMPLES)))
    assert list(fill(both, progress=False)) == []


def test_shares_are_the_same_whatever_was_added_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    first = fill(tmp_path, progress=False)
    assert next(first).tolist() == [0, 2, 4, 6]
    monkeypatch.setenv("RANK", "1")
    assert torch.cat(list(fill(tmp_path, progress=False))).tolist() == list(range(1, SAMPLES, 2))


def test_two_writers_in_one_place(tmp_path: Path) -> None:
    first = fill(tmp_path, progress=False)
    next(first)
    with pytest.raises(
        enn.PerSampleError, match=r"another process, .*, writes here; wanted one writer at a time. In one pr"
    ):
        filled(tmp_path)
    first.close()
    assert len(filled(tmp_path)) == SAMPLES


def test_a_forked_process_does_not_write_over_the_first(tmp_path: Path) -> None:
    printed, errors = start(tmp_path, "forks").communicate()
    assert printed.count("opened in another process, from which this one was forked; wanted a store of") == 1, errors
    store = enn.ProjectionStore(tmp_path)
    assert store.ids.tolist() == list(range(BATCH))
    torch.testing.assert_close(store.read(range(BATCH)), expected()[:BATCH])


# --- progress ---------------------------------------------------------------------------------------------------


def test_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm")
    list(fill(tmp_path))
    assert "50/50" in capsys.readouterr().err
    list(fill(tmp_path, progress=False))
    assert capsys.readouterr().err == ""


# --- refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("projection", "words"),
    [
        (enn.Projection(DIM + 1, seed=3), r"it holds projections with \{'dim': 32\}; wanted \{'dim': 33\}. Take anoth"),
        (enn.Projection(DIM, seed=4), r"\{'seed': 3\}; wanted \{'seed': 4\}"),
        (enn.Projection(DIM, seed=3, kind="kronecker"), r"\{'kind': 'sketch'\}; wanted \{'kind': 'kronecker'\}"),
    ],
)
def test_another_projection(tmp_path: Path, projection: enn.Projection, words: str) -> None:
    filled(tmp_path)
    before = contents(tmp_path)
    for model in (None, mlp()):
        with pytest.raises(enn.PerSampleError, match=words):
            enn.ProjectionStore(tmp_path, projection, model)
    assert contents(tmp_path) == before


def test_a_parameter_that_is_frozen_while_the_store_is_open(tmp_path: Path) -> None:
    model, x = mlp(), inputs()
    store = enn.ProjectionStore(tmp_path, enn.Projection(DIM, seed=3), model)
    store.add(range(4), grads_of(model, x[:4]))
    model[0].requires_grad_(False)
    with pytest.raises(enn.PerSampleError, match=r"0\.weight"):
        store.add(range(4, 8), grads_of(model, x[4:8]))
    assert len(store) == 4


def test_another_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path)
    before = contents(tmp_path)
    monkeypatch.setenv("RANK", "1")  # in a part of its own as well
    model = mlp()
    with torch.no_grad():
        model[0].weight[3, 4] += 1e-9
    with pytest.raises(enn.PerSampleError, match=r"projections with \{'weights': '\w+'\}; wanted \{'weights': '\w+'\}"):
        enn.ProjectionStore(tmp_path, model=model)
    model = mlp()
    model[2].bias.requires_grad_(False)
    with pytest.raises(enn.PerSampleError, match=r"\{'shape of 2.bias': \[3\]\}; wanted \{'shape of 2.bias': None\}"):
        enn.ProjectionStore(tmp_path, model=model)
    wider = enn.convert(nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 4, bias=False)))
    with pytest.raises(
        enn.PerSampleError, match=r"'shape of 1.weight': None, .*; wanted .*'shape of 1.weight': \[4, 9\]"
    ):
        enn.ProjectionStore(tmp_path, model=wider)
    assert contents(tmp_path) == before


def multiplied(model: Any) -> None:
    with torch.no_grad():
        model[0].weight.mul_(2)


def set_anew(model: Any) -> None:
    model[0].weight.data = 2 * model[0].weight.data


def stepped(model: Any) -> None:
    """A fused step, which the versions of the parameters do not tell."""
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.Adam(model.parameters(), lr=1e-3, fused=True).step()


def negated(model: Any) -> None:
    """By `.data`, which no version counts, to weights of the same norm."""
    model[0].weight.data.neg_()


def exchanged(model: Any) -> None:
    """For others that have the same numbers in other places."""
    state = {name: value.flip(0).clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def with_other_statistics(model: Any) -> None:
    model[1].running_mean.add_(1.0)


@pytest.mark.parametrize("change", [multiplied, set_anew, stepped, negated, exchanged, with_other_statistics])
def test_a_model_that_is_trained_while_the_store_is_open(tmp_path: Path, change: Callable[[Any], None]) -> None:
    """Rows of other weights do not come among those of before; those of the same checkpoint do."""
    torch.manual_seed(7)
    layers = nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 3)
    model, x = enn.convert(nn.Sequential(*layers).eval()).per_sample(accumulate_grad=False), inputs()
    wanted = enn.Projection(DIM, seed=3)(grads_of(model, x[:6])).float()
    store = enn.ProjectionStore(tmp_path, enn.Projection(DIM, seed=3), model)
    store.add(range(3), grads_of(model, x[:3]))
    checkpoint = {name: value.clone() for name, value in model.state_dict().items()}
    change(model)
    with pytest.raises(
        enn.PerSampleError, match=r"The model has other weights or buffers than this folder was begun with"
    ):
        store.add(range(3, 6), grads_of(model, x[3:6]))
    model.load_state_dict(checkpoint)
    store.add(range(3, 6), grads_of(model, x[3:6]))
    torch.testing.assert_close(store.read(range(6)), wanted)


def test_a_table_that_its_forward_changes(tmp_path: Path) -> None:
    model = enn.convert(nn.Embedding(7, 4, max_norm=0.5)).per_sample(accumulate_grad=False)
    store = enn.ProjectionStore(tmp_path, enn.Projection(DIM), model)
    for ids in torch.arange(6).split(2):
        store.add(ids, grads_of(model, ids[:, None]))
    assert len(store) == 6


def test_parts_of_two_models(tmp_path: Path) -> None:
    filled(tmp_path / "a")
    (tmp_path / "a/rank-0").rename(tmp_path / "a/rank-1")
    settings = tmp_path / "a/rank-1/settings.json"
    settings.write_text(settings.read_text().replace('"seed": 3', '"seed": 5'))
    filled(tmp_path / "b")
    (tmp_path / "b/rank-0").rename(tmp_path / "a/rank-0")
    with pytest.raises(enn.PerSampleError, match=r"\{'seed': 5\}; wanted \{'seed': 3\}"):
        enn.ProjectionStore(tmp_path / "a")


def test_nothing_to_read(tmp_path: Path) -> None:
    for model in (None, mlp()):
        with pytest.raises(enn.PerSampleError, match=r"it holds no projections; wanted those of an earlier run"):
            enn.ProjectionStore(tmp_path, model=model)
    assert contents(tmp_path) == {}
    assert len(enn.ProjectionStore(tmp_path, enn.Projection(DIM))) == 0


def test_what_cannot_be_added(tmp_path: Path) -> None:
    model, x = mlp(), inputs()
    store = enn.ProjectionStore(tmp_path, enn.Projection(DIM), model)
    grads = grads_of(model, x[:3])
    store.add([5, 6, 7], grads)
    before = contents(tmp_path)
    with pytest.raises(enn.PerSampleError, match=r"\[6\] are done already; wanted new ones. Take the ids from batches"):
        store.add([1, 6, 2], grads)
    with pytest.raises(enn.PerSampleError, match=r"3 rows and the ids \[1, 2\]; wanted as many ids as rows"):
        store.add([1, 2], grads)
    with pytest.raises(enn.PerSampleError, match=r"3 rows and the ids \[1, 1, 2\]; wanted as many ids as rows"):
        store.add([1, 1, 2], grads)
    for ids in ([-1, 2, 3], [1.0, 2.0, 3.0], [True, False, True], [[1, 2, 3]]):
        with pytest.raises(ValueError, match=r"ids are tensor\(.*\); wanted whole numbers, 0 or more"):
            store.add(ids, grads)  # type: ignore[arg-type]
    with pytest.raises(enn.PerSampleError, match=r"\{'shape of other': None\}; wanted \{'shape of other': \[2\]\}"):
        store.add([1, 2, 3], {**grads, "other": torch.ones(3, 2)})
    with pytest.raises(enn.PerSampleError, match=r"\{'shape of 0.bias': \[9\]\}; wanted \{'shape of 0.bias': \[8\]\}"):
        store.add([1, 2, 3], {**grads, "0.bias": torch.ones(3, 8)})
    with pytest.raises(
        enn.PerSampleError, match=r"it was opened for reading; wanted one opened for writing. Open it w"
    ):
        enn.ProjectionStore(tmp_path).add([1, 2, 3], grads)
    assert contents(tmp_path) == before
    store.add([1, 2, 3], {name: rows for name, rows in grads.items() if name != "0.bias"})
    assert store.ids.tolist() == [1, 2, 3, 5, 6, 7]


if __name__ == "__main__":
    main()
