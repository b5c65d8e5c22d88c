"""What each rank of a group checks about DTensors: every operation and placement against the call on one GPU."""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

import kernel_ladder
from kernel_ladder.spec import Case, Inputs, as_tuple
from kernel_ladder.testing.samples import make_inputs


def placements(inputs: Inputs) -> Iterator[tuple[Placement, ...]]:
    """Placements of a call's inputs over one dimension of a mesh: one input sharded, each way; then all alike."""
    given = [x for x in inputs if x is not None]
    whole = (Replicate(),) * len(given)
    yield whole
    for i, x in enumerate(given):
        for dim in range(x.dim()):
            yield (*whole[:i], Shard(dim), *whole[i + 1 :])
        if x.is_floating_point():
            yield (*whole[:i], Partial(), *whole[i + 1 :])
    for dim in range(max(x.dim() for x in given)):
        yield tuple(Shard(dim) if dim < x.dim() else Replicate() for x in given)
        yield tuple(Shard(x.dim() - 1 - dim) if dim < x.dim() else Replicate() for x in given)


def distributed(x: torch.Tensor, mesh: Any, placement: Placement) -> DTensor:
    """`x` as a DTensor leaf. A partial one has `x` on the first rank and zeros on the others."""
    if placement.is_partial():
        summand = x if dist.get_rank() == 0 else torch.zeros_like(x)
        made = DTensor.from_local(summand, mesh, [placement], run_check=False)
    else:
        made = distribute_tensor(x, mesh, [placement])
    return made.detach().requires_grad_(x.is_floating_point())


def whole(x: Any) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def compare(op: str, backend: str, case: Case, dtype: torch.dtype, most: int, tolerance: float) -> dict[str, str]:
    """Outputs and gradients of a case for up to `most` placements, as a fault a placement."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    inputs = make_inputs(case, dtype, torch.device("cpu"))
    names = list(kernel_ladder.spec(op).named(inputs))
    given = [x.detach() for x in inputs if x is not None]
    function = getattr(kernel_ladder, op)

    def evaluate(leaves: list[torch.Tensor]) -> list[torch.Tensor]:
        outputs = as_tuple(function(**dict(zip(names, leaves, strict=True)), **case.options, backend=backend))
        wanted = [x for x in leaves if x.requires_grad]
        # A loss whose gradient differs at each element, the same on every rank.
        loss = sum((whole(y).float().sin() * (i + 1)).sum() for i, y in enumerate(outputs))
        return [whole(x).detach() for x in (*outputs, *torch.autograd.grad(loss, wanted))]

    expected = evaluate([x.clone().requires_grad_(x.is_floating_point()) for x in given])
    faults = {}
    for chosen in list(dict.fromkeys(placements(inputs)))[:most]:
        found = evaluate([distributed(x, mesh, p) for x, p in zip(given, chosen, strict=True)])
        try:
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        except AssertionError as error:
            faults[f"{op} {backend} {case.id} {chosen}"] = str(error)
    return faults


def check_all(calls: list[tuple[str, str, Case, torch.dtype, int, float]], report: Path) -> None:
    """Rank 0 writes the faults of all calls, by operation, and the operations that were checked."""
    faults: dict[str, dict[str, str]] = {}
    for op, backend, *call in calls:
        found = faults.setdefault(f"{op} {backend}", {})
        try:
            found.update(compare(op, backend, *call))
        except Exception:
            found[call[0].id] = traceback.format_exc()
    if dist.get_rank() == 0:
        report.write_text(json.dumps(faults), encoding="utf-8")
