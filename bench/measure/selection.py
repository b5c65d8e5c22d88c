"""What a sweep measures: a selection, and the groups of variants that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

import kernel_ladder
from bench.measure import drawn, sets
from bench.measure.cases import default_dtypes, sweep_members
from bench.rows.ratio import baseline_of
from kernel_ladder.spec import PASSES, Case, dtype_name
from kernel_ladder.table import Variant

#: Variants that tune for up to a minute per shape, dtype and pass. A quick sweep leaves them out, any other measures
#: them in the first dtype of a case alone.
LONG_TUNING = frozenset({"compile.max_autotune", "peer.quack-gemm"})
#: Levels and peers whose first calls time candidates, which nothing else on the GPU may disturb. Triton's say when.
TUNES_ITSELF = frozenset({"compile", "xla", *LONG_TUNING})
#: Variants that a sweep measures at the quick cases only, unless the user names them, and why.
AT_QUICK_CASES = {
    **dict.fromkeys(sorted(LONG_TUNING), "tuned for up to a minute a shape"),
    "compile.formula": "a lesson, compiled anew for each shape",
    "compile.reduce_overhead": "the code of compile.default, compiled anew for each shape",
}

#: Variants whose backward pass cannot be timed, and why: a pass is timed by repeating it after one forward pass.
ONE_BACKWARD = {
    "compile.reduce_overhead": "its backward pass can run once: a CUDA graph uses the memory it reads again"
}

#: Levels and variants that launch on streams, or by CUDA graphs, of their own. No other graph can hold their calls, and
#: an attempt to capture one would disturb the graphs that they keep.
NEVER_CAPTURED = frozenset(("xla", "compile.reduce_overhead"))

#: Rungs of each level that are measured beside its choice in sets other than the sweep: the last ones that take the
#: call. The time of the choice over the best of them is its regret. A naive rung takes up to a thousand times as long.
CONTENDERS = 4
NAIVE = "naive"


@dataclass(frozen=True)
class Selection:
    """What to measure, and how long."""

    ops: Sequence[str]
    backends: Sequence[str] | None = None  # levels and variants; None for all
    dtypes: Sequence[torch.dtype] | None = None  # None for the default of each case
    passes: Sequence[str] = PASSES
    quick: bool = False
    seconds: float = 0.7  # of measuring, for all variants of one case, dtype and pass in total
    settle: float = 0.5  # seconds at most before the first counted round
    ceilings: bool = True  # measure a GPU's ceilings first
    peers: Sequence[str] = ()
    named: Sequence[str] = ()  # variants and peers that are asked for by name
    share: tuple[int, int] = (1, 1)  # which of how many parts of the groups
    set: str = sets.SWEEP  # which calls: bench/measure/sets.py
    seed: int = drawn.SEED  # of the random set

    @property
    def set_name(self) -> str:
        """The set as rows name it: that of random calls with its seed."""
        return f"{self.set}:{self.seed}" if self.set == sets.RANDOM else self.set

    def takes(self, variant: Variant) -> bool:
        """Whether a variant is to be measured. The baseline always is: speedups are paired with it."""
        if self.backends is None or variant.name == baseline_of(variant.op):
            return True
        return variant.name in self.backends or variant.level in self.backends

    def has_time_for(self, name: str, group: Group) -> bool:
        """Whether there is time for a variant's tuning or compilation in a group."""
        if name in self.named or name not in AT_QUICK_CASES:
            return True
        return group.case.quick and not (name in LONG_TUNING and (self.quick or not group.in_first_dtype))


@dataclass(frozen=True)
class Group:
    """What is measured together: the variants of one case, dtype and pass."""

    op: str
    case: Case
    dtype: torch.dtype
    passes: Sequence[str]
    set: str = sets.SWEEP
    names: Sequence[str] = ()  # of those who make the call
    in_first_dtype: bool = True  # of those that the case is measured in

    @property
    def dtype_name(self) -> str:
        return dtype_name(self.dtype)

    def __str__(self) -> str:
        return f"{self.op} {self.case.id} {self.dtype_name}"


def groups(selection: Selection, device: torch.device) -> list[Group]:
    """The groups to measure, in the order of the specs.

    Each of several shares has large and small cases of every operation, so that all shares take about the same time.
    """
    part, parts = selection.share
    quick = selection.quick
    members = [
        (op, *member)
        for op in selection.ops
        for member in sweep_members(
            kernel_ladder.spec(op), sets.members(selection.set, op, selection.seed), device, quick
        )
    ]
    found = [
        Group(op, case, dtype, with_kernels(selection.passes, op, case), selection.set, names, not place)
        for op, case, names in members[part - 1 :: parts]
        for place, dtype in enumerate(selection.dtypes or default_dtypes(op, case, device, quick))
    ]
    return [group for group in found if group.passes]


def with_kernels(passes: Sequence[str], op: str, case: Case) -> list[str]:
    """The passes that launch kernels. A backward that moves no bytes returns views: there is nothing to time."""
    of_case = (pass_ for pass_ in passes if pass_ in case.passes)
    return [pass_ for pass_ in of_case if kernel_ladder.spec(op).bytes(case, 1, pass_ == "backward")]
