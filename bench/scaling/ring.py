"""Ring attention against attention on one GPU."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

import kernel_ladder
from bench.scaling import model
from bench.scaling.check import hold
from bench.scaling.rows import COMMUNICATION, ONE_GPU, OURS
from bench.scaling.run import LONGEST_ALONE_S, Name, Problem, Run
from bench.scaling.timing import Way
from kernel_ladder import selection
from kernel_ladder.distributed import ring_attention, shard_sequence, unshard_sequence
from kernel_ladder.distributed.exchange import circulate, exchange
from kernel_ladder.semantics.masks import NO_WINDOW

OP = "ring_attention"
PASSES = ("forward", "forward+backward")
BACKWARD_FLOPS = 2.5  # of the forward pass: five products where that has two


@dataclass(frozen=True)
class Sizes:
    """Causal attention of B = 1 with as many heads of keys as of queries."""

    heads: int
    width: int
    length: int

    @property
    def shape(self) -> str:
        return f"B1 H{self.heads} S{self.length} D{self.width} causal zigzag"

    def flops(self, backward: bool) -> int:
        forward = 4 * self.heads * self.width * (self.length * (self.length + 1) // 2)
        return round(forward * (1 + BACKWARD_FLOPS)) if backward else forward


def sizes(run: Run) -> list[Sizes]:
    """Total lengths, shortest first: those asked for, else 16k to 128k; on four GPUs 32k to 512k, on eight to 1M."""
    if run.dry:
        return [Sizes(4, 16, 32 * run.gpus)]
    if run.lengths:
        lengths = sorted(set(run.lengths))
    elif run.quick:
        lengths = [2**14, 2**16]
    elif run.gpus < 4:
        lengths = [2**k for k in range(14, 18)]
    else:
        lengths = [2**15, 2**17, 2**18, 2**19] + [2**20] * (run.gpus >= 8)
    return [Sizes(16, 128, length) for length in lengths]


def _random(run: Run, count: int, of: Sizes, rows: int, grad: bool) -> list[torch.Tensor]:
    shape = (1, of.heads, rows, of.width)
    return [torch.randn(shape, device=run.device, dtype=run.dtype).requires_grad_(grad) for _ in range(count)]


def rung(backend: str, whole: list[torch.Tensor] | None, part: list[torch.Tensor]) -> str:
    """The rung that `backend` chooses for one GPU's problem, or else for a step of the ring, and that takes all calls.

    Raises:
        UnsupportedError: `backend` has no rung for one of the calls. ValueError: no rung takes them all.
    """
    half = part[0].shape[-2] // 2
    q, k, v = part
    options: dict[str, Any] = {"scale": None, "enable_gqa": False, "window_size": NO_WINDOW, "return_lse": True}
    calls = [
        *([] if whole is None else [(tuple(whole), {**options, "is_causal": True})]),
        (tuple(part), {**options, "is_causal": True}),
        ((q, k[..., :half, :], v[..., :half, :]), {**options, "is_causal": False}),
        ((q[..., half:, :], k, v), {**options, "is_causal": False}),
    ]
    for inputs, given in calls:
        found = selection.resolve("attention", backend, inputs, given)
        if all(found.unsupported(*x, **o) is None for x, o in calls):
            return found.name
    raise ValueError(f"no rung of {backend} takes both the whole problem and every step of the ring")


def check(run: Run, backend: str, backward: bool) -> str | None:
    """Why the output, and gradients, on this group do not agree with float64; None where they do."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, 4, 16 * run.gpus, 16) if run.dry else (1, 2, 512 * run.gpus, 128)
    q, k, v, grad = (torch.randn(shape, generator=generator).to(run.device, run.dtype) for _ in range(4))

    def whole(dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.to(dtype).requires_grad_(backward) for x in (q, k, v)]
        y = kernel_ladder.attention(*leaves, is_causal=True, backend="torch.naive")
        return [y.detach(), *(torch.autograd.grad(y, leaves, grad.to(dtype)) if backward else ())]

    parts = [shard_sequence(x).requires_grad_(backward) for x in (q, k, v)]
    y = ring_attention(*parts, is_causal=True, backend=backend)
    found = [y.detach(), *(torch.autograd.grad(y, parts, shard_sequence(grad)) if backward else ())]
    names = ("output", "grad of query", "grad of key", "grad of value")[: len(found)]
    return hold(names, [unshard_sequence(x) for x in found], whole(torch.float64), whole(run.dtype), grad)


def communication(parts: list[torch.Tensor], backward: bool, gpus: int) -> Any:
    """What travels, keys and values of one shape on every rank, without attention."""
    gradients = [torch.zeros_like(x, dtype=torch.float32) for x in parts]

    def hops() -> None:
        for _ in circulate(OP, None, *parts):
            pass
        if backward and gpus > 1:
            sums = exchange(OP, None, "sums", *gradients)
            for _ in circulate(OP, None, *parts):
                sums.send(*gradients)
                sums.wait()

    return hops


def _sent(of: Sizes, run: Run, backward: bool) -> int:
    elements = 2 * of.heads * (of.length // run.gpus) * of.width
    forward = (run.gpus - 1) * elements * run.dtype.itemsize
    return forward if not backward else 2 * forward + (run.gpus * elements * 4 if run.gpus > 1 else 0)


def measure(run: Run) -> None:
    """Emit the rows of every length and pass."""
    faults: dict[tuple[str, bool], str | None] = {}  # by rung and whether with gradients
    one: dict[tuple[str, int, str], float] = {}  # seconds of one GPU by rung, length and pass
    for of in sizes(run):
        for pass_ in PASSES:
            backward = pass_ != PASSES[0]
            problem = Problem(OP, pass_, of.shape, of.flops(backward), _sent(of, run, backward))

            def fits(name: str, of: Sizes = of, pass_: str = pass_) -> bool:
                """Whether one GPU is measured: by its time at the next shorter length, which grows with the square."""
                if run.quick or of == sizes(run)[0]:
                    return True
                known = {n: seconds for (b, n, p), seconds in one.items() if (b, p) == (name, pass_) and n < of.length}
                shorter = max(known, default=0)
                return bool(known) and known[shorter] * (of.length / shorter) ** 2 <= LONGEST_ALONE_S

            some = run.quick or of == sizes(run)[0] or any(fits(name) for name, _, _ in one)
            tensors, reason = run.group.agree(lambda of=of, b=backward, some=some: _tensors(run, of, b, some))
            if tensors is None:
                run.refuse(problem, (OURS, run.backend), str(reason))
                run.free()
                continue
            part, whole = tensors
            names: list[str] = []
            for backend in run.backends("attention", "triton", "cuda"):
                name, reason = run.group.agree(lambda backend=backend, t=tensors: rung(backend, t[1], t[0]))
                if name is None:
                    run.refuse(problem, (OURS, backend), str(reason))
                    continue
                if (name, backward) not in faults:
                    faults[name, backward] = run.fault(lambda name=name, b=backward: check(run, name, b))
                if (fault := faults[name, backward]) is not None:
                    run.wrong(problem, name, fault)
                elif name not in names:
                    names.append(name)
            ways = _ways(run, names, [name for name in names if fits(name)], part, whole, backward)

            def predict(seconds: Mapping[Name, float], name: str, of: Sizes = of, pass_: str = pass_) -> float | None:
                for (role, backend), found in seconds.items():
                    if role == ONE_GPU:
                        one[backend, of.length, pass_] = found
                return _predicted(run, of, {p: one.get((name, of.length, p)) for p in PASSES}, pass_)

            run.measure(problem, run.both_transports(ways), predict)
            del tensors, part, whole, ways
            run.free()


def _tensors(run: Run, of: Sizes, backward: bool, alone: bool) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
    """This rank's part of queries, keys and values, and one GPU's whole ones where they are measured."""
    part = _random(run, 3, of, of.length // run.gpus, backward)
    return part, _random(run, 3, of, of.length, backward) if alone else None


def _ways(
    run: Run,
    names: list[str],
    alone: list[str],
    part: list[torch.Tensor],
    whole: list[torch.Tensor] | None,
    backward: bool,
) -> dict[Name, Way]:
    grad = torch.randn_like(part[0]) if backward else None
    whole_grad = torch.randn_like(whole[0]) if backward and whole is not None else None

    def ours(name: str) -> Any:
        y = ring_attention(*part, is_causal=True, backend=name)
        return y if grad is None else torch.autograd.grad(y, part, grad)

    def one_gpu(name: str) -> Any:
        assert whole is not None
        y = kernel_ladder.attention(*whole, is_causal=True, backend=name)
        return y if whole_grad is None else torch.autograd.grad(y, whole, whole_grad)

    ways: dict[Name, Way] = {(OURS, name): Way(functools.partial(ours, name)) for name in names}
    if whole is not None:
        ways |= {(ONE_GPU, name): Way(functools.partial(one_gpu, name), alone=True) for name in alone}
    if run.gpus > 1 and names:
        ways[COMMUNICATION, "torch.distributed"] = Way(
            communication([x.detach() for x in part[1:]], backward, run.gpus)
        )
    return ways


def _predicted(run: Run, of: Sizes, one: Mapping[str, float | None], pass_: str) -> float | None:
    """The paper model's seconds. The backward pass of one GPU takes what both passes take beyond the forward."""
    if run.machine is None or one[PASSES[0]] is None:
        return None
    sizes = {
        "batch": 1, "heads": of.heads, "heads_kv": of.heads, "length": of.length, "width": of.width,
        "itemsize": run.dtype.itemsize,
    }  # fmt: skip
    forward = model.ring_attention_forward(run.gpus, run.machine, one[PASSES[0]], **sizes)
    if pass_ == PASSES[0]:
        return forward
    if one[pass_] is None:
        return None
    backward = max(one[pass_] - one[PASSES[0]], 0.0)
    return forward + model.ring_attention_backward(run.gpus, run.machine, backward, **sizes)
