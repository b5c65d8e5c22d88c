"""Run checks in several processes of one group, gloo's of CPUs or NCCL's of GPUs, and gather what they raise."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, TextIO
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

#: A collective call that some rank never reaches fails after so many seconds.
TIMEOUT = timedelta(seconds=120)

#: What one process imports, of which those of groups of CPUs are forks. Imports else take each as long as its checks.
#: Where these modules cannot be found it imports nothing, and each process does so itself.
PRELOADED = "tests.distributed.preloaded"


class Check(NamedTuple):
    """A function that every rank runs. Processes import PyTorch for seconds, so one group runs many."""

    name: str
    function: Callable[..., None]
    arguments: tuple = ()


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _work(rank: int, world_size: int, port: int, folder: str, checks: list[Check], device: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=TIMEOUT)
    try:
        with Path(folder, f"{rank}.txt").open("w", encoding="utf-8") as log:
            _run_all(checks, log)
    except BaseException:
        if device == "cuda":  # to leave a group waits for ever where a kernel has broken the GPU's context
            os._exit(1)
        raise
    finally:
        dist.destroy_process_group()


def _run_all(checks: list[Check], log: TextIO) -> None:
    for check in checks:
        begin = time.perf_counter()
        try:
            check.function(*check.arguments)
        except BaseException:
            print(f"{check.name}:\n{traceback.format_exc()}", file=log, flush=True)
            raise
        print(f"{check.name}: {time.perf_counter() - begin:.1f} s", file=log, flush=True)


def run(world_size: int, folder: Path, checks: list[Check], device: str = "cpu") -> str:
    """Run the checks on every rank, in order, up to the first that fails. Returns what rank 0 says of each.

    `device` is "cpu", or "cuda": a GPU for each rank.

    Raises:
        AssertionError: a check failed; with its name and the traceback of each rank that raised.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        # Groups of CPUs see no GPU, everywhere, so that they may lack a level which this machine must have.
        no_gpu = {"CUDA_VISIBLE_DEVICES": "", "KERNEL_LADDER_REQUIRE": ""}
        hidden = mock.patch.dict(os.environ, no_gpu) if device == "cpu" else contextlib.nullcontext()
        arguments = world_size, _free_port(), str(folder), checks, device
        multiprocessing.set_forkserver_preload([PRELOADED])
        with hidden:  # a process that has seen a GPU cannot be forked
            method = "forkserver" if device == "cpu" else "spawn"
            mp.start_processes(_work, arguments, nprocs=world_size, start_method=method)
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        said = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.txt"))]
        raise AssertionError("\n".join(each for each in said if "Traceback" in each) or str(error)) from None
    return (folder / "0.txt").read_text(encoding="utf-8")
