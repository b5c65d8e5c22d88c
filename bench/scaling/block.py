"""A training step of a Llama-like block of our calls, tensor and sequence parallel, against one GPU."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import kernel_ladder as kl
from bench.scaling.check import hold_model
from bench.scaling.rows import ONE_GPU, OURS
from bench.scaling.run import Problem, Run
from bench.scaling.timing import Way

OP = "tensor_parallel_block"


@dataclass(frozen=True)
class Sizes:
    """Of a block: widths, heads, and tokens of the one sequence."""

    hidden: int
    heads: int
    heads_kv: int
    inner: int
    tokens: int

    @property
    def shape(self) -> str:
        return f"B1 S{self.tokens} hidden {self.hidden} H{self.heads}/{self.heads_kv} inner {self.inner}"

    @property
    def flops(self) -> int:
        """Of both passes: every product three times, and attention's forward 3.5 times."""
        width = self.hidden // self.heads
        weights = self.hidden * (2 * self.hidden + 2 * self.heads_kv * width + 3 * self.inner)
        scores = 4 * self.hidden * (self.tokens * (self.tokens + 1) // 2)
        return 6 * self.tokens * weights + round(3.5 * scores)


def sizes(run: Run) -> list[Sizes]:
    """Llama 3's 8B, and 70B without --quick."""
    if run.dry:
        return [Sizes(32 * run.gpus, 2 * run.gpus, run.gpus, 48 * run.gpus, 16 * run.gpus)]
    eight = Sizes(4096, 32, 8, 14336, 8192)
    return [eight] if run.quick else [eight, Sizes(8192, 64, 8, 28672, 8192)]


class Linear(torch.nn.Linear):
    backend: str

    def forward(self, input: torch.Tensor) -> Any:
        return kl.linear(input, self.weight, None, backend=self.backend)


class RMSNorm(torch.nn.RMSNorm):
    backend: str

    def forward(self, input: torch.Tensor) -> Any:
        return kl.rms_norm(input, self.normalized_shape, self.weight, self.eps, backend=self.backend)


class Block(torch.nn.Module):
    """Pre-norm attention with grouped heads and rotary positions, and a SwiGLU network."""

    def __init__(self, of: Sizes, backend: str, device: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.of, self.backend = of, backend
        width = of.hidden // of.heads
        where = {"device": device, "dtype": dtype}
        self.norm1, self.norm2 = RMSNorm(of.hidden, **where), RMSNorm(of.hidden, **where)

        def linear(fan_in: int, fan_out: int) -> Linear:
            return Linear(fan_in, fan_out, bias=False, **where)

        self.q, self.out = linear(of.hidden, of.hidden), linear(of.hidden, of.hidden)
        self.k, self.v = linear(of.hidden, of.heads_kv * width), linear(of.hidden, of.heads_kv * width)
        self.gate, self.up = linear(of.hidden, of.inner), linear(of.hidden, of.inner)
        self.down = linear(of.inner, of.hidden)
        angles = torch.outer(
            torch.arange(of.tokens, device=device, dtype=torch.float32),
            10000.0 ** -(torch.arange(0, width, 2, device=device, dtype=torch.float32) / width),
        )
        self.angles = torch.polar(torch.ones_like(angles), angles)
        for module in self.modules():
            module.backend = backend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        width = self.of.hidden // self.of.heads
        h = self.norm1(x)
        q, k, v = (m(h).unflatten(-1, (-1, width)).transpose(1, 2) for m in (self.q, self.k, self.v))
        q, k = (kl.rope(t, self.angles, backend=self.backend) for t in (q, k))
        a = kl.attention(q, k, v, is_causal=True, enable_gqa=True, backend=self.backend)
        x = kl.add(x, self.out(a.transpose(1, 2).flatten(-2)), backend=self.backend)
        h = self.norm2(x)
        return kl.add(x, self.down(kl.swiglu(self.gate(h), self.up(h), backend=self.backend)), backend=self.backend)


def parallel(block: Block, mesh: Any) -> Block:
    """Heads and inner features shared among the ranks; between products, the sequence."""
    first = ColwiseParallel(input_layouts=Shard(1), use_local_output=False)
    last = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
    plan = dict.fromkeys(("q", "k", "v", "gate", "up"), first) | dict.fromkeys(("out", "down"), last)
    plan |= dict.fromkeys(("norm1", "norm2"), SequenceParallel(sequence_dim=1, use_local_output=False))
    block.angles = distribute_tensor(block.angles, mesh, [Replicate()])
    return parallelize_module(block, mesh, plan)


def _step(block: Block, x: torch.Tensor) -> torch.Tensor:
    """Forward and backward; returns the output."""
    for parameter in block.parameters():
        parameter.grad = None
    y = block(x)
    y.float().square().mean().backward()
    return y


def _whole(x: torch.Tensor) -> torch.Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach()


def _made(run: Run, of: Sizes, dtype: torch.dtype, sharded: bool, backend: str) -> tuple[Block, torch.Tensor]:
    """The block and its input, of the same numbers on every rank."""
    torch.manual_seed(0)
    block = Block(of, backend, run.device, run.dtype)
    x = torch.randn(1, of.tokens, of.hidden, device=run.device, dtype=run.dtype)
    block, x = block.to(dtype), x.to(dtype)
    if not sharded:
        return block, x
    mesh = init_device_mesh(run.device.type, (run.gpus,))
    return parallel(block, mesh), distribute_tensor(x, mesh, [Shard(1)])


def check(run: Run) -> str | None:
    """Why output and gradients on this group do not agree with float64 on one GPU; None where they do.

    The standard is the formulas' in the same dtype on the same group: sums over ranks round as often.
    """
    n, width = run.gpus, 16 if run.dry else 64
    of = Sizes(2 * n * width, 2 * n, n, 3 * n * width, width * n)

    def results(dtype: torch.dtype, sharded: bool, backend: str) -> tuple[list[str], list[torch.Tensor]]:
        block, x = _made(run, of, dtype, sharded, backend)
        y = _step(block, x)
        named = dict(block.named_parameters())
        return ["output", *named], [_whole(y), *(_whole(p.grad) for p in named.values())]

    names, found = results(run.dtype, True, run.backend)
    _, exact = results(torch.float64, False, "torch.naive")
    _, naive = results(run.dtype, True, "torch.naive")
    return hold_model(names, found, exact, naive)


def measure(run: Run) -> None:
    """Emit the rows of every size."""
    fault = run.fault(lambda: check(run))
    for of in sizes(run):
        problem = Problem(OP, "forward+backward", of.shape, of.flops, 0)
        if fault is not None:
            run.wrong(problem, run.backend, fault)
            continue
        made, reason = run.group.agree(
            lambda of=of: (_made(run, of, run.dtype, True, run.backend), _made(run, of, run.dtype, False, run.backend))
        )
        if made is None:
            run.refuse(problem, (OURS, run.backend), str(reason))
            continue
        ways = {
            (OURS, run.backend): Way(functools.partial(_step, *made[0])),
            (ONE_GPU, run.backend): Way(functools.partial(_step, *made[1]), alone=True),
        }
        run.measure(problem, ways)
        del made, ways
        run.free()
