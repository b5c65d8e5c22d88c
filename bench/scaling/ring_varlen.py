"""Ring attention of packed sequences against ``attention_varlen`` on one GPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import kernel_ladder
from bench.scaling.check import hold
from bench.scaling.ring import BACKWARD_FLOPS, PASSES, communication
from bench.scaling.rows import COMMUNICATION, ONE_GPU, OURS
from bench.scaling.run import Name, Problem, Run
from bench.scaling.timing import Way
from kernel_ladder.distributed import ring_attention_varlen, shard_packed, unshard_packed
from kernel_ladder.distributed.packed import cut_of

OP = "ring_attention_varlen"


@dataclass(frozen=True)
class Sizes:
    """Causal attention of packed sequences, with as many heads of keys as of queries."""

    heads: int
    width: int
    lengths: tuple[int, ...]

    @property
    def rows(self) -> int:
        return sum(self.lengths)

    @property
    def shape(self) -> str:
        return f"T{self.rows} in {len(self.lengths)} sequences H{self.heads} D{self.width} causal"

    @property
    def offsets(self) -> torch.Tensor:
        """``(B + 1,)``, int32, on the CPU."""
        return torch.tensor((0, *itertools.accumulate(self.lengths)), dtype=torch.int32, device="cpu")

    def flops(self, backward: bool) -> int:
        forward = 4 * self.heads * self.width * sum(n * (n + 1) // 2 for n in self.lengths)
        return round(forward * (1 + BACKWARD_FLOPS)) if backward else forward


def sizes(run: Run) -> Sizes:
    """64k tokens of eight sequences, the longest 24 times the shortest."""
    if run.dry:
        return Sizes(4, 16, (3, 17, 32 * run.gpus))
    return Sizes(16, 128, (1024, 1536, 3000, 4648, 7000, 10328, 14000, 24000))


def _one_gpu(of: Sizes, tensors: list[torch.Tensor], backend: str, offsets: torch.Tensor) -> torch.Tensor:
    longest = max(of.lengths)
    return kernel_ladder.attention_varlen(
        *tensors, offsets, offsets, max_seqlen_q=longest, max_seqlen_k=longest, is_causal=True, backend=backend
    )


def check(run: Run, backend: str, backward: bool) -> str | None:
    """Why the output, and gradients, on this group do not agree with float64; None where they do."""
    small = Sizes(2, 16, (3, 17, 12 * run.gpus)) if run.dry else Sizes(2, 128, (37, 500, 487))
    generator, offsets = torch.Generator().manual_seed(0), small.offsets
    shape = small.rows, small.heads, small.width
    q, k, v, grad = (torch.randn(shape, generator=generator).to(run.device, run.dtype) for _ in range(4))

    def whole(dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.to(dtype).requires_grad_(backward) for x in (q, k, v)]
        y = _one_gpu(small, leaves, "torch.naive", offsets.to(run.device))
        return [y.detach(), *(torch.autograd.grad(y, leaves, grad.to(dtype)) if backward else ())]

    parts = [shard_packed(x, offsets).requires_grad_(backward) for x in (q, k, v)]
    y = ring_attention_varlen(*parts, offsets, is_causal=True, backend=backend)
    found = [y.detach(), *(torch.autograd.grad(y, parts, shard_packed(grad, offsets)) if backward else ())]
    names = ("output", "grad of query", "grad of key", "grad of value")[: len(found)]
    return hold(names, [unshard_packed(x, offsets) for x in found], whole(torch.float64), whole(run.dtype), grad)


def measure(run: Run) -> None:
    """Emit the rows of both passes."""
    of = sizes(run)
    rows = cut_of(tuple(of.offsets.tolist()), run.gpus).rows
    part_bytes = 2 * of.heads * max(rows) * of.width * run.dtype.itemsize
    for pass_ in PASSES:
        backward = pass_ != PASSES[0]
        sent = (run.gpus - 1) * part_bytes
        if backward and run.gpus > 1:  # keys and values again, and their float32 gradients
            sent += sent + run.gpus * part_bytes // run.dtype.itemsize * 4
        problem = Problem(OP, pass_, of.shape, of.flops(backward), sent)
        right = []
        for backend in run.backends("attention_varlen", "triton", "cuda"):
            fault = run.fault(lambda backend=backend, b=backward: check(run, backend, b))
            if fault is None:
                right.append(backend)
            else:
                run.wrong(problem, backend, fault)
        ways, reason = run.group.agree(lambda b=backward, right=right: _ways(run, of, rows, right, b))
        if ways is None:
            run.refuse(problem, (OURS, run.backend), str(reason))
            continue
        run.measure(problem, run.both_transports(ways))
        del ways
        run.free()


def _ways(run: Run, of: Sizes, rows: tuple[int, ...], backends: list[str], backward: bool) -> dict[Name, Way]:
    offsets = of.offsets
    on_device = offsets.to(run.device)

    def random(count: int) -> list[torch.Tensor]:
        shape = count, of.heads, of.width
        return [torch.randn(shape, device=run.device, dtype=run.dtype).requires_grad_(backward) for _ in range(3)]

    def passes(tensors: list[torch.Tensor], forward: Callable[[], torch.Tensor]) -> Callable[[], Any]:
        grad = torch.randn_like(tensors[0]) if backward else None

        def call() -> Any:
            y = forward()
            return y if grad is None else torch.autograd.grad(y, tensors, grad)

        return call

    part, whole = random(rows[run.group.rank]), random(of.rows)
    ways: dict[Name, Way] = {}
    for backend in backends:

        def ours(backend: str = backend) -> torch.Tensor:
            return ring_attention_varlen(*part, offsets, is_causal=True, backend=backend)

        ways[OURS, backend] = Way(passes(part, ours))
        alone = passes(whole, lambda backend=backend: _one_gpu(of, whole, backend, on_device))
        ways[ONE_GPU, backend] = Way(alone, alone=True)
    if run.gpus > 1 and backends:
        sent = [x.detach() for x in random(max(rows))[1:]]
        ways[COMMUNICATION, "torch.distributed"] = Way(communication(sent, backward, run.gpus))
    return ways
