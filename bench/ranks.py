"""The processes that ``torchrun`` starts: which one this is, its GPU, and the group of all of them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

VISIBLE = "CUDA_VISIBLE_DEVICES"

T = TypeVar("T")


class RanksError(RuntimeError):
    """The processes do not form the group that was asked for. The message says why."""


@dataclass(frozen=True)
class Launched:
    """What ``torchrun`` tells a process: its rank among `size`, and its place among those of its host."""

    rank: int
    size: int
    local: int


def launched() -> Launched | None:
    """This process's place, or None where ``torchrun`` did not start it."""
    given = [os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
    if not all(given):
        return None
    return Launched(*(int(value or 0) for value in given))


def leave(code: int) -> NoReturn:
    """End the process with an exit code: one of a group's at once, without destructors.

    gloo's threads may hold tensors that the interpreter releases while it ends, which aborts the process
    (pytorch/pytorch, pull request 179291).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if launched() is not None:
        os._exit(code)
    sys.exit(code)


def take_own_gpu() -> None:
    """Leave this process one visible GPU, by its place on the host. Call it before anything asks CUDA for its GPUs.

    Everything that takes the first GPU, JAX included, then takes this process's. A place without a GPU sees none.
    """
    place = launched()
    if place is None or place.size == 1:
        return
    visible = os.environ.get(VISIBLE)
    gpus = [str(place.local)] if visible is None else [gpu for gpu in visible.split(",") if gpu][place.local :][:1]
    os.environ[VISIBLE] = ",".join(gpus)


class Group:
    """All processes, joined by gloo for the host and by NCCL for GPUs where there are any.

    Args:
        device: this process's own.
        timeout_s: seconds after which a call that another process never reaches is an error.
        patience_s: the same for the calls of this class, once all have come; None: `timeout_s`.

    Raises:
        RanksError: not all processes came within the timeout.
    """

    def __init__(self, device: Any, timeout_s: float, patience_s: float | None = None) -> None:
        import torch.distributed as dist

        place = launched()
        assert place is not None
        self.rank, self.size, self.device = place.rank, place.size, device
        self._on_host: Any = None
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        if os.environ.get("LOCAL_WORLD_SIZE") == str(self.size):  # one host, whose own name need not resolve
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        try:
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
            self.wait()
            if patience_s is not None:
                self._on_host = dist.new_group(backend="gloo", timeout=timedelta(seconds=patience_s))
        except (RuntimeError, ValueError) as error:
            raise RanksError(
                f"rank {self.rank}: no group of {self.size} processes within {timeout_s:g} s: {first_line(error)}"
            ) from error

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in the order of ranks, on every rank. The host waits; GPUs go on."""
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(values, value, group=self._on_host)  # by gloo, the host's part of a group
        except RuntimeError as error:
            raise RanksError(f"rank {self.rank} of {self.size} lost another: {first_line(error)}") from error
        return values

    def wait(self) -> None:
        """Wait on the host until every rank is here."""
        self.gather(None)

    def agree(self, attempt: Callable[[], T]) -> tuple[T | None, str | None]:
        """What `attempt` returns here, if it raised on no rank; else None and the first rank's reason, on all ranks."""
        result, reason = None, None
        try:
            result = attempt()
        except RanksError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {first_line(error)}"
        reasons = self.gather(reason)
        for rank, found in enumerate(reasons):
            if found is not None:
                return None, found if len(set(reasons)) == 1 else f"rank {rank}: {found}"
        return result, None

    def close(self) -> None:
        """Leave the group."""
        import torch.distributed as dist

        dist.destroy_process_group()


class Board:
    """Notes that any rank writes and all ranks read, and work that they share out.

    Args:
        shared: among the ranks of the group that was joined; else of this process alone.
    """

    def __init__(self, shared: bool = False) -> None:
        self._own: dict[str, str] = {}
        self._store: Any = None
        if shared:
            from torch.distributed import distributed_c10d

            self._store = distributed_c10d._get_default_store()

    def write(self, name: str, value: Any) -> None:
        """Note `value`, which JSON can hold, under `name`."""
        if self._store is None:
            self._own[name] = json.dumps(value)
        else:
            self._store.set(f"note {name}", json.dumps(value))

    def read(self, name: str) -> Any:
        """What a rank has noted under `name`, or None."""
        if self._store is None:
            return json.loads(self._own.get(name, "null"))
        return json.loads(self._store.get(f"note {name}")) if self._store.check([f"note {name}"]) else None

    def shared_out(self, todo: Sequence[T]) -> Iterator[T]:
        """The members that this rank takes: always the next one that no rank has taken."""
        if self._store is None:
            yield from todo
            return
        while (place := self._store.add("taken", 1) - 1) < len(todo):
            yield todo[place]


def first_line(error: BaseException) -> str:
    """The first line of an error's message, at most 200 characters of it."""
    line = str(error).strip().partition("\n")[0]
    return line if len(line) <= 200 else f"{line[:199]}…"
