"""Which files of ``csrc`` are compiled together.

A file costs 4 seconds before its first kernel, as much as many kernels. Every stage of nvcc reads the headers of CUDA
and of the C++ library for each architecture. A group is compiled as one file that includes them all. No group takes
longer than the longest file that is compiled alone, which is how long a build takes on many cores. A file that no group
names is compiled alone.

The files of a group share their namespaces, the anonymous one too: none may give a name another meaning. Kernels with
dynamic shared memory stand apart from those without. On Hopper nvcc gives every kernel of a file the kilobyte of shared
memory per block that one of them needs.
"""

from __future__ import annotations

import os
from pathlib import Path

GROUPS = {
    "flash": ["attention/flash.cu", "attention/varlen_flash.cu", "attention/flash_masked.cu"],
    "flash_backward": ["attention/flash_backward.cu", "attention/varlen_backward.cu"],
    "persistent_matmul": [
        "matmul/split_k.cu",
        "matmul/linear_split_k.cu",
        "matmul/persistent.cu",
        "matmul/linear_persistent.cu",
    ],
    "elementwise": ["add.cu", "bias_gelu.cu", "dropout.cu", "gelu.cu", "rope.cu", "sum.cu", "swiglu.cu"],
    "dynamic_shared": ["softmax/shared.cu", "softmax/cluster_two_pass.cu", "attention/split_kv.cu"],
    "hopper_attention": [
        "attention/wgmma.cu",
        "attention/warp_specialized.cu",
        "attention/pingpong.cu",
        "attention/persistent.cu",
        "attention/varlen.cu",
    ],
    "hopper_attention_backward": ["attention/wgmma_backward.cu", "attention/warp_specialized_backward.cu"],
    "hopper_matmul": [
        "matmul/hopper.cu",
        "matmul/wgmma.cu",
        "matmul/warp_specialized.cu",
        "matmul/cluster.cu",
        "matmul/stream_k.cu",
        "matmul/registers_tma.cu",
        "linear_float8/persistent.cu",
    ],
    "softmax": [
        "softmax/naive.cu",
        "softmax/online.cu",
        "softmax/registers.cu",
        "softmax/multirow.cu",
        "softmax/cluster.cu",
        "cross_entropy.cu",
    ],
    "products": [
        "attention/naive.cu",
        "linear.cu",
        "linear_float8/naive.cu",
        "matmul/matmul.cu",
        "matmul/naive.cu",
        "matmul/coalesced.cu",
        "matmul/tiled.cu",
        "matmul/thread_tile.cu",
        "matmul/vectorized.cu",
        "matmul/double_buffered.cu",
        "matmul/skinny.cu",
        "matmul/pad_operands.cu",
    ],
}

#: Compiled first, so that none is left to run on its own at the end. Each takes twice as long as most.
LONGEST = [
    "layer_norm.cu",
    "matmul/registers.cu",
    "matmul/mma.cu",
    "attention/flash_masked_backward.cu",
    "add_rms_norm.cu",
]


def sources(root: Path) -> list[str]:
    """What to compile, by paths below `root`: each group as one file in ``build/together``, and what no group names."""
    csrc = root / "csrc"
    grouped = {csrc / name for names in GROUPS.values() for name in names}
    first = [csrc / name for name in LONGEST]
    written = [_write(root / "build" / "together" / f"{group}.cu", names, csrc) for group, names in GROUPS.items()]
    every = sorted(path for path in csrc.rglob("*") if path.suffix in (".cu", ".cpp"))
    alone = [path for path in every if path not in grouped and path not in first]
    return [str(path.relative_to(root)) for path in first + written + alone]


def _write(path: Path, names: list[str], csrc: Path) -> Path:
    """A file that includes others: as new as the newest, so that it is compiled again when one of them has changed.

    A torch without CUDA has ninja build without regard to what a file includes.
    """
    text = "".join(f'#include "{name}"\n' for name in names)
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    newest = max((csrc / name).stat().st_mtime_ns for name in names)
    if path.stat().st_mtime_ns < newest:
        os.utime(path, ns=(newest, newest))
    return path
