"""What a call says after a wait for another rank has trapped: the GPU is pretended, and so is the group."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from kernel_ladder import gpu
from kernel_ladder.distributed import peer_copy
from kernel_ladder.distributed.same import check_same

GPU = torch.device("cuda", 1)


class Group:
    """Rank 0 of 2, whose waits end after 10 seconds."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2

    def _get_backend(self, device: torch.device) -> SimpleNamespace:
        assert device == GPU
        return SimpleNamespace(options=SimpleNamespace(_timeout=timedelta(seconds=10)))


@pytest.fixture
def trapped(monkeypatch):
    """After a kernel has trapped, whatever asks CUDA raises."""

    def fail(*_):
        raise RuntimeError(f"CUDA error: {peer_copy.TRAPPED}\nmore")

    monkeypatch.setattr(gpu, "capturing", fail)
    monkeypatch.setattr(torch.cuda, "current_device", fail)
    return fail


def with_buffers(group: Group) -> Group:
    peer_copy._buffers[group] = {("ring", GPU): SimpleNamespace()}
    return group


def test_the_first_question_to_cuda_names_the_lost_rank(trapped):
    group = with_buffers(Group())
    said = r"matmul: rank 0 of 2 lost another rank: a wait on cuda:1 for its copies, .* timeout of 10 s, .* failure$"
    with pytest.raises(RuntimeError, match=said):
        check_same("matmul", group, GPU, rows=3)
    with pytest.raises(RuntimeError, match=said):
        peer_copy.guarded("matmul", group, trapped)


def test_errors_of_another_kind_stay_what_they_are(trapped):
    def fail():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match=r"^CUDA error: an illegal memory access"):
        peer_copy.guarded("matmul", with_buffers(Group()), fail)
    with pytest.raises(RuntimeError, match=f"^CUDA error: {peer_copy.TRAPPED}"):  # no copies, no wait for them
        peer_copy.guarded("matmul", Group(), trapped)
