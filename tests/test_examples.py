"""The examples run, and write their pictures."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.parametrize(
    ("example", "arguments"),
    [
        pytest.param("quickstart.py", ["--epochs", "1"], id="quickstart"),
        pytest.param("dp_sgd.py", [], id="dp_sgd", marks=pytest.mark.slow),
    ],
)
def test_example(example: str, arguments: list[str], tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    command = [sys.executable, "-W", "error", str(EXAMPLES / example), *arguments, "--out", str(picture)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert picture.stat().st_size > 10_000


@pytest.mark.slow
def test_distributed_example() -> None:
    command = [sys.executable, str(EXAMPLES / "distributed_dp.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
