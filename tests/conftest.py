"""Every test: float64, a fixed seed, one thread; on the CPU, or where `--device` says."""

import gc
from collections.abc import Iterator

import pytest
import torch

from expanded_nn.common.modes import saved_tensors_are_packed
from expanded_nn.core import cost
from oracle import set_seed


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", help="where new tensors are made, as in --device cuda")


def pytest_configure(config: pytest.Config) -> None:
    gc.set_threshold(20_000)  # garbage is collected seldom: that took 6% of the time
    torch.set_default_device(config.getoption("--device"))  # already where tests are collected, which make tensors


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--device") is None:
        return
    skip = pytest.mark.skip(reason="torch turns this off under a TorchFunctionMode, which a default device is")
    for item in items:
        if item.get_closest_marker("no_modes"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def float64_and_seed() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    set_seed(0)
    yield
    torch.set_default_dtype(before)
    if saved_tensors_are_packed():  # a checkpoint of torch 2.10 that fails keeps its hooks until it is collected
        gc.collect()


@pytest.fixture(autouse=True)
def rows_stay_factored(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' layers are small: their rows would be dense from the start, and the factors left untested."""
    if not request.node.get_closest_marker("small_rows"):
        monkeypatch.setattr(cost, "SMALL_ROWS_NUMEL", 0)


@pytest.fixture
def small_heap() -> Iterator[None]:
    """What is there already is none of the collector's: among all tests' objects a collection takes half a second."""
    gc.freeze()
    yield
    gc.unfreeze()
