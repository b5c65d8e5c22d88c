"""Several inspected rungs side by side: kernels of a call, their bytes over the least, and what each of them is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kernel_ladder.inspection.inspect import Inspection

#: Why a rung has no bytes here.
NOT_COUNTED = (
    "bytes are those that the compiler counts; of other rungs the GPU counts them: "
    "python -m bench profile {op} --backend {backend} --ncu"
)


def kernels_of(found: Inspection) -> int | None:
    """The kernels that one call launches, those of libraries too; None where that is not known.

    On a GPU they were counted in a call; else compilers tell, and Triton's host code has launched them without a GPU.
    """
    level = found.backend.partition(".")[0]
    if found.launches:
        return len(found.launches)
    if found.kernel_count is not None:
        return found.kernel_count + (found.library_count or 0)
    return len(found.kernels) if level == "triton" and found.kernels else None


def parts_of(found: Inspection) -> list[str]:
    """The kernels by name, or PyTorch's operators; of several alike one, with their number.

    The names of generated kernels say what a compiler has fused.
    """
    names = [kernel.name for kernel in found.launches or found.kernels] or found.operators
    return [name if count == 1 else f"{count} × {name}" for name, count in Counter(names).items()]


def over_least(found: Inspection) -> float | None:
    """The counted bytes of a call over the least that the operation must move; None where they were not counted."""
    if found.counted_bytes is None or not found.least_bytes:
        return None
    return found.counted_bytes / found.least_bytes


def show(console: Console, every: Sequence[Inspection]) -> None:
    """Print one table, a line for each rung."""
    first = every[0]
    shown = Table(title=f"{first.op}, {first.pass_}, {first.dtype}", title_justify="left", show_lines=True)
    shown.add_column("rung")
    shown.add_column("shape")
    shown.add_column("kernels", justify="right")
    shown.add_column("bytes / least", justify="right")
    shown.add_column("what they are", overflow="fold")
    for found in every:
        kernels, ratio = kernels_of(found), over_least(found)
        shown.add_row(
            escape(found.backend),
            escape(found.shape or ""),
            "" if kernels is None else str(kernels),
            "" if ratio is None else f"{ratio:.2f}",
            escape("\n".join(parts_of(found))),
        )
    console.print(shown)
    if without := next((found for found in every if over_least(found) is None), None):
        note = NOT_COUNTED.format(op=without.op, backend=without.backend)
        console.print(note, markup=False, highlight=False, soft_wrap=True)
