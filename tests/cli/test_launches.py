"""The kernels of a call, as PyTorch's profiler records them."""

from __future__ import annotations

import pytest

from kernel_ladder.errors import InspectError
from kernel_ladder.inspection import launches


def kernel_event(name: str, ts: int) -> dict:
    return {"cat": "kernel", "name": name, "ts": ts, "args": {"block": [32, 2, 1], "grid": [7, 1, 1]}}


BEFORE, CALLED, AFTER = kernel_event("FillFunctor<float>", 1), kernel_event("mine", 2), kernel_event("FillFunctor", 3)


def test_a_recording_that_lost_kernels_is_made_again(monkeypatch):
    recordings = iter([[], [BEFORE], [CALLED, AFTER], [AFTER, CALLED, BEFORE, {"cat": "gpu_memset", "ts": 2}]])
    monkeypatch.setattr(launches, "_recorded", lambda call: next(recordings))
    (found,) = launches.launched(lambda: None)
    assert (found.name, found.threads, found.grid) == ("mine", 64, [7, 1, 1])
    monkeypatch.setattr(launches, "_recorded", lambda call: [BEFORE, AFTER])
    assert launches.launched(lambda: None) == [], "a call without kernels"
    monkeypatch.setattr(launches, "_recorded", lambda call: [CALLED])
    with pytest.raises(InspectError, match="lost kernels in 4 recordings"):
        launches.launched(lambda: None)
