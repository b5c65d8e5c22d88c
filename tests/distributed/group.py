"""Run a function in several processes of one gloo group, and gather what it raises."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

#: A collective call that some rank never reaches fails after so many seconds.
TIMEOUT = timedelta(seconds=60)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _work(rank: int, world_size: int, port: int, folder: str, function: Callable[..., None], arguments: tuple) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=TIMEOUT)
    try:
        function(*arguments)
    except BaseException:
        Path(folder, f"{rank}.txt").write_text(traceback.format_exc(), encoding="utf-8")
        raise
    finally:
        dist.destroy_process_group()


def run(world_size: int, folder: Path, function: Callable[..., None], *arguments: object) -> None:
    """Run ``function(*arguments)`` on every rank. AssertionError with the first rank's traceback where one raises."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        mp.spawn(_work, (world_size, _free_port(), str(folder), function, arguments), nprocs=world_size)
    except mp.ProcessRaisedException as error:
        found = sorted(folder.glob("*.txt"))
        raise AssertionError(found[0].read_text(encoding="utf-8") if found else str(error)) from None
