"""Rates that the paper model needs: to a neighbour of the ring, and of a GPU's own memory."""

from __future__ import annotations

import math

import torch

from bench.scaling.model import Machine
from bench.scaling.rows import LINK
from bench.scaling.run import Problem, Run
from bench.scaling.timing import Way
from kernel_ladder.distributed.exchange import exchange

MIB = 2**20


def measure(run: Run) -> None:
    """Emit a row of each rate, and keep them as the run's machine."""
    size = MIB // 16 if run.dry else 64 * MIB
    source = torch.ones(size, dtype=torch.uint8, device=run.device)
    target = torch.empty_like(source)
    rates = {}

    def hop() -> None:
        hops = exchange("link", None, "parts", source)
        hops.send(source)
        hops.wait()

    for op, backend, call, moved in (
        ("neighbour", "torch.distributed", hop, size),
        ("memory", "torch.builtin", lambda: target.copy_(source), 2 * size),
    ):
        if op == "neighbour" and run.gpus == 1:
            continue
        problem = Problem(op, "forward", f"{size / MIB:g} MiB", 0, moved)
        for seconds in run.measure(problem, {(LINK, backend): Way(call)}).values():
            rates[op] = moved / seconds
    if run.gpus == 1:
        rates["neighbour"] = math.inf
    if len(rates) == 2:
        run.machine = Machine(link=rates["neighbour"], memory=rates["memory"])
