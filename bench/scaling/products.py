"""Products beside their communication: ours, NCCL and then a product, and torch's symmetric-memory operators."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

import kernel_ladder
from bench.scaling import model
from bench.scaling.check import hold
from bench.scaling.rows import COMMUNICATION, OURS, PRODUCT, SYMMETRIC, UNFUSED
from bench.scaling.run import Name, Problem, Run
from bench.scaling.timing import Way
from kernel_ladder.distributed import all_gather_matmul, matmul_reduce_scatter

GATHER, SCATTER = "all_gather_matmul", "matmul_reduce_scatter"
LIBRARY = "torch.builtin"


@dataclass(frozen=True)
class Sizes:
    """M×K by K×N over all ranks. A gathering product splits M and N, a scattering one splits K and the M of its result.

    `layers` names the layers of Llama 70B that it is, at 8192 tokens.
    """

    op: str
    m: int
    k: int
    n: int
    layers: str = ""

    @property
    def shape(self) -> str:
        return f"M{self.m} K{self.k} N{self.n}"


def sizes(run: Run) -> list[Sizes]:
    """The cube of 8192, and Llama 70B's layers."""
    if run.dry:
        return [Sizes(op, 16 * run.gpus, 16 * run.gpus, 32 * run.gpus) for op in (GATHER, SCATTER)]
    found = [Sizes(GATHER, 8192, 8192, 8192), Sizes(SCATTER, 8192, 8192, 8192, "out")]
    found += [Sizes(GATHER, 8192, 8192, 28672, "gate, up"), Sizes(SCATTER, 8192, 28672, 8192, "down")]
    return found[:2] if run.quick else [*found, Sizes(GATHER, 8192, 8192, 10240, "query, key, value")]


def operands(run: Run, of: Sizes, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Both operands, whole and the same on every rank; the second as its transpose, as a layer holds its weight."""
    generator = torch.Generator(run.device).manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator, device=run.device).to(run.dtype)

    return matrix(of.m, of.k), matrix(of.n, of.k)


def _parts(run: Run, of: Sizes, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    dim = 0 if of.op == GATHER else 1
    return tuple(t.chunk(run.gpus, dim)[run.group.rank].contiguous() for t in (x, weight))  # type: ignore[return-value]


def _unfused(of: Sizes, x: torch.Tensor, weight: torch.Tensor, backend: str) -> torch.Tensor:
    """The collective and the product, one after the other."""
    size = dist.get_world_size()
    if of.op == GATHER:
        gathered = x.new_empty((of.m, of.k))
        dist.all_gather_into_tensor(gathered, x)
        return kernel_ladder.matmul(gathered, weight.mT, backend=backend)
    summands = kernel_ladder.matmul(x, weight.mT, backend=backend)
    output = summands.new_empty((of.m // size, of.n))
    dist.reduce_scatter_tensor(output, summands)
    return output


def _ours(of: Sizes, x: torch.Tensor, weight: torch.Tensor, backend: str) -> torch.Tensor:
    return (all_gather_matmul if of.op == GATHER else matmul_reduce_scatter)(x, weight.mT, backend=backend)


@functools.cache
def _in_symmetric_memory() -> str:
    """The name of the group of all ranks, which torch's operators may use from now on."""
    import torch.distributed._symmetric_memory as symmetric_memory  # defines the operators

    name = dist.group.WORLD.group_name
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PyTorch 2.13 no longer needs it, 2.11 does
        symmetric_memory.enable_symm_mem_for_group(name)
    return name


def _symmetric(of: Sizes, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """torch's own fused operators."""
    name = _in_symmetric_memory()
    if of.op == GATHER:
        return torch.ops.symm_mem.fused_all_gather_matmul(x, [weight.mT], 0, name, return_A=False)[1][0]
    return torch.ops.symm_mem.fused_matmul_reduce_scatter(x, weight.mT, "sum", 0, name)


def check(run: Run, of: Sizes, backend: str) -> str | None:
    """Why our result does not agree with float64; None where it does.

    The standard is the collective and the product in the same dtype: its sums over ranks round as often.
    """
    x, weight = operands(run, of)
    part, own = _parts(run, of, x, weight)
    exact = x.double() @ weight.double().mT
    exact = exact.chunk(run.gpus, 1 if of.op == GATHER else 0)[run.group.rank]
    return hold(
        ["output"],
        [_ours(of, part, own, backend)],
        [exact],
        [_unfused(of, part, own, LIBRARY)],
    )


def small(run: Run, op: str) -> Sizes:
    """Sizes that float64 takes quickly."""
    return Sizes(op, 16 * run.gpus, 16 * run.gpus, 32 * run.gpus) if run.dry else Sizes(op, 1024, 1024, 2048)


def measure(run: Run) -> None:
    """Emit the rows of every size."""
    backends = run.backends("matmul", "cuda")
    faults = {
        (op, backend): run.fault(lambda op=op, backend=backend: check(run, small(run, op), backend))
        for op in (GATHER, SCATTER)
        for backend in backends
    }
    for of in sizes(run):
        part = of.m // run.gpus * (of.k if of.op == GATHER else of.n) * run.dtype.itemsize
        options = {"layers": of.layers} if of.layers else {}
        problem = Problem(of.op, "forward", of.shape, 2 * of.m * of.k * of.n, (run.gpus - 1) * part, options)
        right = [backend for backend in backends if faults[of.op, backend] is None]
        for backend in backends:
            if backend not in right:
                run.wrong(problem, backend, str(faults[of.op, backend]))
        ways, reason = run.group.agree(lambda of=of, right=right: _ways(run, of, right))
        if ways is None:
            run.refuse(problem, (OURS, run.backend), str(reason))
            continue
        both = run.both_transports(ways)
        run.measure(problem, both, lambda seconds, backend, of=of: _predicted(run, of, seconds, backend))
        ways.clear()
        both.clear()
        run.free()


def _ways(run: Run, of: Sizes, backends: list[str]) -> dict[Name, Way]:
    x, weight = _parts(run, of, *operands(run, of))
    whole = x if of.op == SCATTER else torch.randn(of.m, of.k, device=run.device).to(run.dtype)
    # What travels: rows that are gathered, or rows that are summed and scattered.
    sent = x if of.op == GATHER else torch.zeros(of.m, of.n, device=run.device, dtype=run.dtype)
    if of.op == GATHER:
        target = x.new_empty((of.m, of.k))
        floor = lambda: dist.all_gather_into_tensor(target, sent)  # noqa: E731
    else:
        target = x.new_empty((of.m // run.gpus, of.n))
        floor = lambda: dist.reduce_scatter_tensor(target, sent)  # noqa: E731
    ways: dict[Name, Way] = {}
    for backend in backends:
        ways[OURS, backend] = Way(lambda backend=backend: _ours(of, x, weight, backend))
    for backend in dict.fromkeys((*backends, LIBRARY)):
        ways[PRODUCT, backend] = Way(lambda backend=backend: kernel_ladder.matmul(whole, weight.mT, backend=backend))
        ways[UNFUSED, backend] = Way(lambda backend=backend: _unfused(of, x, weight, backend))
    if run.gpus > 1:
        ways[COMMUNICATION, "torch.distributed"] = Way(floor)
        ways[SYMMETRIC, "torch.symm_mem"] = Way(lambda: _symmetric(of, x, weight))
    return ways


def _predicted(run: Run, of: Sizes, seconds: Mapping[Name, float], backend: str) -> float | None:
    product = seconds.get((PRODUCT, backend))
    if run.machine is None or product is None:
        return None
    if of.op == GATHER:
        return model.all_gather_matmul(run.gpus, run.machine, product, m=of.m, k=of.k, itemsize=run.dtype.itemsize)
    return model.matmul_reduce_scatter(run.gpus, run.machine, product, m=of.m, n=of.n, itemsize=run.dtype.itemsize)
