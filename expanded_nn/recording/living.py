"""The recorders of all models that are there: from an unwatched parameter no hook leads to its own."""

from threading import Lock
from typing import Any
from weakref import WeakSet

from expanded_nn.recording.settings import RecorderLike

_LIVING: WeakSet[Any] = WeakSet()
_LOCK = Lock()  # other threads may make models meanwhile


def note_living(recorder: RecorderLike) -> None:
    """Notes a new recorder, as long as it lives."""
    with _LOCK:
        _LIVING.add(recorder)


def living() -> list[Any]:
    """All recorders."""
    with _LOCK:
        return list(_LIVING)
