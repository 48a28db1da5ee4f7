"""Every test: float64, a fixed seed, one thread."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def float64_and_seed() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)
