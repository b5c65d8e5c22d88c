"""What tests of the choice among variants share."""

from __future__ import annotations

import pytest

import cuda_impl

#: Built for every GPU of KNOWN that the cuda level runs on.
EVERYWHERE = ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120"]


@pytest.fixture
def built_everywhere(monkeypatch):
    """The cuda level as if it had been built for every GPU; on a GPU machine it is built for that GPU alone."""
    monkeypatch.setattr(cuda_impl, "architectures", lambda: EVERYWHERE)
