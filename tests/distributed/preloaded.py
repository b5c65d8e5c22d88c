"""What each process of a group of CPUs needs, imported once, before they are forked. None computes anything."""

from __future__ import annotations

import torch._inductor.compile_fx
import torch.distributed.fsdp
import torch.distributed.tensor.parallel  # noqa: F401

from kernel_ladder import OPS, table

from . import test_groups

__all__ = ["test_groups"]  # which hastens Triton's interpreter, by way of conftest.py

for op in OPS:
    table.variants(op)  # which imports the levels
