"""Matrix product compiled, from the naive formula and from PyTorch's own function."""

from __future__ import annotations

import torch

from compile_impl import compiled
from kernel_ladder.table import register
from torch_ref.matmul import builtin, naive

register("matmul", "compile.default", forward=compiled(naive))
