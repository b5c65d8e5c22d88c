"""What each rank of a group of GPUs checks about the two ways of a hop: copies by copy engines, and NCCL's messages."""

from __future__ import annotations

import faulthandler
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from kernel_ladder.distributed import (
    all_gather_matmul,
    matmul_reduce_scatter,
    peer_copy,
    ring_attention,
    ring_attention_varlen,
    shard_packed,
)
from kernel_ladder.distributed.exchange import messages_only

Call = Callable[[], list[torch.Tensor]]


def by_messages(check: Callable[..., None], *arguments: Any) -> None:
    """Run a check with copies switched off."""
    with messages_only():
        check(*arguments)


def check_usable() -> None:
    """The GPUs of one host map each other's memory: else the checks below compare messages with messages."""
    assert peer_copy.usable("test", dist.group.WORLD, torch.device("cuda", torch.cuda.current_device()))


def _calls(dtype: torch.dtype, backend: str, rows: int, seed: int) -> dict[str, Call]:
    """Each function on this rank's parts of random tensors: outputs and gradients."""
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator(torch.device("cuda", torch.cuda.current_device())).manual_seed(100 * seed + rank)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(dtype).requires_grad_()

    def with_gradients(function: Callable[..., torch.Tensor], *leaves: torch.Tensor, **options: Any) -> Call:
        def call() -> list[torch.Tensor]:
            output = function(*leaves, backend=backend, **options)
            return [output.detach(), *torch.autograd.grad(output.square().sum(), leaves)]

        return call

    cu_seqlens = torch.tensor([0, rows // 3, size * rows], dtype=torch.int32)
    packed = shard_packed(torch.arange(size * rows), cu_seqlens).numel()
    q, k, v = (made(2, 4, rows, 64) for _ in range(3))
    x, weight = made(rows, 64 * size), made(128, 64 * size)
    return {
        "ring": with_gradients(ring_attention, q, k, v, is_causal=True),
        "ring, full": with_gradients(ring_attention, q, k, v),
        "ring, windows": with_gradients(ring_attention, q, k, v, window_size=(rows, 3)),
        "packed": with_gradients(
            lambda *x, **o: ring_attention_varlen(*x, cu_seqlens, is_causal=True, **o),
            *(made(packed, 4, 64) for _ in range(3)),
        ),
        "gather": with_gradients(lambda a, b, **o: all_gather_matmul(a, b.mT, **o), x, weight),
        "scatter": with_gradients(
            lambda a, b, **o: matmul_reduce_scatter(a, b.mT, **o), made(rows * size, 64), made(128, 64)
        ),
    }


def _assert_same(name: str, found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for i, (x, y) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(x, y), f"{name}, result {i}"


#: Calls whose sums over ranks are float32 by copies, and rounded at each addition by messages.
SUMS = ("gather", "scatter")


def _expected(name: str, call: Call) -> list[torch.Tensor]:
    """What each run by copies must give: the results by messages; of sums over ranks those of the first run."""
    if name in SUMS:
        return call()
    with messages_only():
        return call()


def check_same_bits(dtype: torch.dtype, backend: str) -> None:
    """Copies and messages give the same bits, and so do two runs. Buffers grow, and then serve small tensors again."""
    for rows in (64, 2048, 128):
        for name, call in _calls(dtype, backend, rows, seed=0).items():
            expected = _expected(name, call)
            for _ in range(3):
                _assert_same(f"{name}, {rows} rows", call(), expected)


def check_results_stay(dtype: torch.dtype, backend: str) -> None:
    """Later calls with other data leave the results of earlier ones alone, and what they saved for their gradients."""
    calls, others = (_calls(dtype, backend, 256, seed) for seed in (1, 2))
    found = {name: call() for name, call in calls.items()}
    copies = {name: [x.clone() for x in results] for name, results in found.items()}
    leaves = [torch.randn(1, 2, 256, 64, device="cuda", dtype=dtype).requires_grad_() for _ in range(3)]
    output = ring_attention(*leaves, is_causal=True, backend=backend)
    expected = torch.autograd.grad(output.sum(), leaves, retain_graph=True)
    for call in others.values():
        call()
    for name, results in found.items():
        _assert_same(name, results, copies[name])
    _assert_same("gradients after other calls", list(torch.autograd.grad(output.sum(), leaves)), list(expected))


def check_late_ranks() -> None:
    """Ranks that come late to a hop, each in its turn: nothing is overwritten before it is read."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for name, call in _calls(torch.bfloat16, "torch", 512, seed=3).items():
        expected = _expected(name, call)
        for late in range(2 * size):
            for _ in range(2):
                if late % size == rank:
                    torch.cuda._sleep(20_000_000)
                _assert_same(f"{name}, rank {late % size} late", call(), expected)


def check_two_streams() -> None:
    """A call on another stream waits for what the call before still reads."""
    calls = [_calls(torch.bfloat16, "torch", 1024, seed)["ring"] for seed in (4, 5)]
    with messages_only():
        expected = [call() for call in calls]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in calls]
    for _ in range(4):
        found = []
        for stream, call in zip(streams, calls, strict=True):
            with torch.cuda.stream(stream):
                found.append(call())
        torch.cuda.synchronize()
        for x, y in zip(found, expected, strict=True):
            _assert_same("on two streams", x, y)


def check_lost_rank(folder: str) -> None:
    """A wait for the copies of a rank that is gone ends in errors of Python; the next call names itself and the group.

    The last check: no rank's GPU is fit for another, so that both processes end here.
    """
    faulthandler.dump_traceback_later(60, exit=True)  # a rank that hangs says where, and ends
    group = dist.new_group(timeout=timedelta(seconds=10))
    x = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16)

    def call() -> torch.Tensor:
        return all_gather_matmul(x, x, group=group, backend="torch")

    call()  # makes the buffers
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    said = Path(folder, "said")
    if dist.get_rank() == 1:
        while not said.exists():
            time.sleep(0.1)
        os._exit(0)
    call()
    with pytest.raises(RuntimeError, match=peer_copy.TRAPPED):
        torch.cuda.synchronize()
    with pytest.raises(
        RuntimeError, match=r"all_gather_matmul: rank 0 of 2 lost another rank: .* timeout of 10 s"
    ) as found:
        call()
    said.write_text(str(found.value))
    os._exit(0)


def check_graphs() -> None:
    """A CUDA graph holds a ring's hops; one that needs a larger buffer is refused while it is captured."""
    q, k, v = (torch.randn(1, 2, 256, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    expected = ring_attention(q, k, v, is_causal=True, backend="triton").clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = ring_attention(q, k, v, is_causal=True, backend="triton")
    for _ in range(3):
        found.zero_()
        graph.replay()
        assert torch.equal(found, expected)
    large = torch.randn(1, 2, 2**18, 64, device="cuda", dtype=torch.bfloat16)
    refused = pytest.raises(RuntimeError, match="ring_attention: memory shared with the other ranks cannot be made")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        ring_attention(large, large, large, is_causal=True, backend="triton")
    dist.barrier()
