"""The limits of one SM of each NVIDIA architecture, and the occupancy of a kernel that follows from them.

Sources: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; allocation granularities from
``cuda_occupancy.h`` in the CUDA toolkit.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from kernel_ladder.errors import InspectError

WARP = 32
#: Registers per SM, the same since compute capability 3.5, and the granularity of a warp's allocation.
REGISTERS = 65536
REGISTERS_STEP = 256
#: An SM has four schedulers, each with a quarter of the registers.
SCHEDULERS = 4
#: Shared memory that the driver reserves per block, and the allocation granularity, in bytes.
SHARED_RESERVED = 1024
SHARED_STEP = 128


@dataclass(frozen=True)
class Architecture:
    """The limits of one SM. Memory in bytes."""

    number: int  # 90 for compute capability 9.0
    threads: int
    blocks: int
    shared: int

    @property
    def name(self) -> str:
        return f"sm_{self.number}"

    @property
    def shared_per_block(self) -> int:
        """Maximum shared memory of one block."""
        return self.shared - SHARED_RESERVED


ARCHITECTURES = {
    a.number: a
    for a in (
        Architecture(80, 2048, 32, 164 * 1024),
        Architecture(86, 1536, 16, 100 * 1024),
        Architecture(87, 1536, 16, 164 * 1024),
        Architecture(89, 1536, 24, 100 * 1024),
        Architecture(90, 2048, 32, 228 * 1024),
        Architecture(100, 2048, 32, 228 * 1024),
        Architecture(103, 2048, 32, 228 * 1024),
        Architecture(110, 1536, 24, 228 * 1024),
        Architecture(120, 1536, 24, 100 * 1024),
        Architecture(121, 1536, 24, 100 * 1024),
    )
}

#: Features with the first compute capability that has them, and the last one if later ones lack them.
FEATURES = (
    ("mma.sync in bf16 and tf32", 80, None),
    ("cp.async", 80, None),
    ("mma.sync in fp8", 89, None),
    ("TMA", 90, None),
    ("thread-block clusters, distributed shared memory", 90, None),
    ("wgmma", 90, 90),
    ("tcgen05 and tensor memory, fp8, fp6 and fp4", 100, 110),
    ("mma.sync in fp6 and fp4", 120, None),
)


@dataclass(frozen=True)
class Occupancy:
    """How much of an SM a kernel fills: resident blocks, the share of warps, and the limiting resources."""

    blocks: int
    share: float
    limited_by: tuple[str, ...]


def named(text: str) -> Architecture:
    """The architecture that ``sm_90``, ``sm_90a``, ``90`` or ``9.0`` names."""
    found = re.fullmatch(r"(?:sm_?)?(\d+)(?:\.(\d))?[af]?", text.lower())
    number = int("".join(part for part in found.groups() if part)) if found else None
    if number in ARCHITECTURES:
        return ARCHITECTURES[number]
    known = [a.name for a in ARCHITECTURES.values()]
    near = difflib.get_close_matches(text, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise InspectError(f"unknown `arch` {text!r}; {hint}Known are {', '.join(known)}")


def features(number: int) -> list[str]:
    """The features of a compute capability (90 for 9.0), beyond those of 7.5."""
    return [name for name, first, last in FEATURES if first <= number <= (last or number)]


def occupancy(arch: Architecture, threads: int, registers: int, shared: int) -> Occupancy:
    """Occupancy of a kernel with `threads` per block, `registers` per thread and `shared` bytes per block in all.

    Zero blocks if one block exceeds a limit. Barriers are not counted. An SM has two for each block that it can
    hold, which limits only small blocks that use several. No tool lists a kernel's count.
    """
    warps = -(-threads // WARP)
    per_warp = -(-registers * WARP // REGISTERS_STEP) * REGISTERS_STEP
    bytes_per_block = -(-(shared + SHARED_RESERVED) // SHARED_STEP) * SHARED_STEP
    limits = {
        "threads": arch.threads // WARP // warps,
        "blocks": arch.blocks,
        "registers": REGISTERS // SCHEDULERS // per_warp * SCHEDULERS // warps if per_warp else arch.blocks,
        "shared memory": arch.shared // bytes_per_block,
    }
    blocks = min(limits.values())
    share = blocks * warps / (arch.threads // WARP)
    return Occupancy(blocks, share, tuple(name for name, limit in limits.items() if limit == blocks))
