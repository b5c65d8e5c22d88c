"""A training step of a Llama-like block of our calls, tensor and sequence parallel, against one GPU.

On DTensors every projection gathers its input by a collective of its own, before its product. The overlapped block
gathers once for query, key and value and once for gate and up, each beside the product, and scatters sums beside it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
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
from bench.scaling.rows import ON_DTENSORS, ONE_GPU, OURS
from bench.scaling.run import Problem, Run
from bench.scaling.timing import Way
from kernel_ladder.distributed import all_gather_matmul, matmul_reduce_scatter

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


class Overlapped(torch.nn.Module):
    """A rank's part of a block: heads and inner features of its own, and between products its tokens of the sequence.

    It takes and returns ``(tokens / n, hidden)``, the rows of this rank.
    """

    def __init__(self, block: Block, rank: int, size: int) -> None:
        super().__init__()
        self.of, self.backend, self.angles, self.size = block.of, block.backend, block.angles, size
        self.norm1, self.norm2 = block.norm1, block.norm2

        def own(dim: int, *layers: Linear) -> torch.nn.Parameter:
            return torch.nn.Parameter(
                torch.cat([x.weight.detach().chunk(size, dim)[rank] for x in layers]).contiguous()
            )

        self.qkv, self.gate_up = own(0, block.q, block.k, block.v), own(0, block.gate, block.up)
        self.out, self.down = own(1, block.out), own(1, block.down)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        backend, width = self.backend, self.of.hidden // self.of.heads
        heads, heads_kv = self.of.heads // self.size, self.of.heads_kv // self.size
        qkv = all_gather_matmul(self.norm1(x), self.qkv.mT, backend=backend).unflatten(-1, (-1, width))
        q, k, v = (t.transpose(0, 1)[None] for t in qkv.split((heads, heads_kv, heads_kv), 1))
        q, k = (kl.rope(t, self.angles, backend=backend) for t in (q, k))
        a = kl.attention(q, k, v, is_causal=True, enable_gqa=True, backend=backend)[0].transpose(0, 1).flatten(1)
        x = kl.add(x, matmul_reduce_scatter(a, self.out.mT, backend=backend), backend=backend)
        gate, up = all_gather_matmul(self.norm2(x), self.gate_up.mT, backend=backend).chunk(2, -1)
        h = kl.swiglu(gate, up, backend=backend)
        return kl.add(x, matmul_reduce_scatter(h, self.down.mT, backend=backend), backend=backend)


def _overlapped_step(block: Overlapped, x: torch.Tensor) -> torch.Tensor:
    """Forward and backward, the norms' gradients summed over ranks; returns this rank's rows of the output."""
    for parameter in block.parameters():
        parameter.grad = None
    y = block(x)
    (y.float().square().mean() / block.size).backward()
    for norm in (block.norm1, block.norm2):
        dist.all_reduce(norm.weight.grad)
    return y


def _joined(x: torch.Tensor, dim: int) -> torch.Tensor:
    """The ranks' parts of a tensor, along a dimension."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, dim)


def _overlapped_results(block: Overlapped, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The whole output and gradients of a step, by the names of a block's."""
    found = {"output": _joined(_overlapped_step(block, x).detach(), 0)[None]}
    found |= {f"{name}.weight": getattr(block, name).weight.grad for name in ("norm1", "norm2")}
    width, n = block.of.hidden // block.of.heads, block.size
    rows = [count * width // n for count in (block.of.heads, block.of.heads_kv, block.of.heads_kv)]
    for name, grad in zip("qkv", block.qkv.grad.split(rows), strict=True):
        found[f"{name}.weight"] = _joined(grad, 0)
    for name, grad in zip(("gate", "up"), block.gate_up.grad.chunk(2), strict=True):
        found[f"{name}.weight"] = _joined(grad, 0)
    return found | {f"{name}.weight": _joined(getattr(block, name).grad, 1) for name in ("out", "down")}


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


def _made_overlapped(run: Run, of: Sizes, backend: str) -> tuple[Overlapped, torch.Tensor]:
    """This rank's part of the block, and its rows of the input."""
    block, x = _made(run, of, run.dtype, False, backend)
    rank = run.group.rank
    return Overlapped(block, rank, run.gpus), x[0].chunk(run.gpus)[rank].contiguous()


def check(run: Run, role: str) -> str | None:
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

    if role == OURS:
        by_name = _overlapped_results(*_made_overlapped(run, of, run.backend))
    else:
        by_name = dict(zip(*results(run.dtype, True, run.backend), strict=True))
    names, exact = results(torch.float64, False, "torch.naive")
    _, naive = results(run.dtype, True, "torch.naive")
    return hold_model(names, [by_name[name] for name in names], exact, naive)


def measure(run: Run) -> None:
    """Emit the rows of every size."""
    found = [run.fault(lambda role=role: check(run, role)) for role in (OURS, ON_DTENSORS)]
    fault = next(filter(None, found), None)
    for of in sizes(run):
        problem = Problem(OP, "forward+backward", of.shape, of.flops, 0)
        if fault is not None:
            run.wrong(problem, run.backend, fault)
            continue
        made, reason = run.group.agree(
            lambda of=of: (
                _made_overlapped(run, of, run.backend),
                *(_made(run, of, run.dtype, sharded, run.backend) for sharded in (True, False)),
            )
        )
        if made is None:
            run.refuse(problem, (OURS, run.backend), str(reason))
            continue
        ways = {
            (OURS, run.backend): Way(functools.partial(_overlapped_step, *made[0])),
            (ON_DTENSORS, run.backend): Way(functools.partial(_step, *made[1])),
            (ONE_GPU, run.backend): Way(functools.partial(_step, *made[2]), alone=True),
        }
        both = run.both_transports(ways)
        run.measure(problem, both)
        del made, ways, both
        run.free()
