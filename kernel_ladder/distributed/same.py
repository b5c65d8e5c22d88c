"""Check that the ranks of a group call with operands that fit together, before they wait for each other's data."""

from __future__ import annotations

import hashlib
import json
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from kernel_ladder import gpu
from kernel_ladder.distributed.exchange import lost_neighbour
from kernel_ladder.distributed.peer_copy import guarded

#: Bytes in which a rank describes its call.
_WIDTH = 2048

#: The calls that the ranks of a group found the same.
_found: WeakKeyDictionary[Any, set[tuple]] = WeakKeyDictionary()


def check_same(caller: str, group: Any, device: torch.device, **of_call: Any) -> None:
    """Raise on every rank unless all ranks of a group call with the same `of_call`.

    On a CPU every call gathers the values of all ranks, because gloo ends the process at a message of another size. On
    a GPU the first call with such values gathers them, and later calls ask a set on the host. So a rank whose earlier
    call had its values does not ask where another one's are new: both then end in the group's timeout. Nothing is
    checked while torch.compile traces or a CUDA graph is captured.

    Args:
        caller: the function that error messages name.
        group: the process group; None: the default one.
        device: where the group communicates.
        of_call: what must be the same; an argument's part is named ``shape_of_query``.

    Raises:
        ValueError: a rank has something else than rank 0. RuntimeError: a rank is gone.
    """
    if not torch.compiler.is_compiling():
        guarded(caller, group, _check_same, caller, group, device, of_call)


def _check_same(caller: str, group: Any, device: torch.device, of_call: dict[str, Any]) -> None:
    if gpu.capturing():  # the first of a call that asks CUDA
        return
    group = dist.group.WORLD if group is None else group
    if group.size() == 1:
        return
    found, key = _found.setdefault(group, set()), (caller, device, *of_call.values())
    if key in found and device.type != "cpu":
        return
    calls = _gathered(caller, group, device, {"function": caller} | of_call)
    for rank, call in enumerate(calls):
        for name, first in calls[0].items():
            if call.get(name) != first:
                what, _, argument = name.partition("_of_")
                named = f"{what} of argument `{argument}`" if argument else f"`{name}`"
                raise ValueError(
                    f"{caller}: the {named} must be the same on every rank: rank {rank} has {call.get(name)}, "
                    f"rank 0 has {first}"
                )
    found.add(key)


def _as_text(x: Any) -> str:
    text = str(x).removeprefix("torch.")
    if len(text) <= 120:
        return text
    return f"{text[:100]} … (SHA-256 {hashlib.sha256(text.encode()).hexdigest()[:8]})"


def _gathered(caller: str, group: Any, device: torch.device, of_call: dict[str, Any]) -> list[dict[str, str]]:
    """What each rank says of its call, as text."""
    text = json.dumps({name: _as_text(x) for name, x in of_call.items()}).encode()
    own = torch.frombuffer(bytearray(text.ljust(_WIDTH)), dtype=torch.uint8).to(device)
    every = [torch.empty_like(own) for _ in range(group.size())]
    try:
        dist.all_gather(every, own, group)
    except RuntimeError as error:
        raise RuntimeError(f"{lost_neighbour(caller, group)}: {error}") from error
    return [json.loads(bytes(part.tolist())) for part in every]
