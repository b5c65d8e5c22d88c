"""What is often said of compilers, each sentence with what the rows measured and a verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.rows.store import Row
from bench.show import markdown
from bench.show.fusion import CHAINS, EQUAL, NAIVE, chosen
from kernel_ladder.spec import PASSES

BLOCK = "compiler claims"
HEADER = ("it is said that", "measured", "verdict")
#: What a compiler is said to gain on a chain.
GAIN = (1.5, 3.0)
#: "Far" from the formula call by call: this many times faster, and more.
FAR = 2.0
BUILTIN = "torch.builtin"
#: Fused kernels of gelu: what each is called, and its rung.
FUSED = {"torch.compile": "compile.default", "XLA": "xla.jit", "Triton": "triton.fused"}

Times = Mapping[str, float]


def write(_: Path, found: Sequence[Row]) -> str:
    """A Markdown table of the sentences that the rows can judge, forward, at each operation's headline shape."""
    chains = {op: _times(op, found) for op in CHAINS}
    lines = [*_of_gelu(chains["gelu"]), *_of_chains(chains)]
    return markdown.grid(HEADER, lines, [False, False, False]) if lines else ""


def _times(op: str, found: Sequence[Row]) -> Times:
    shown = chosen(op, found)[PASSES[0]]
    some = next(iter(shown.values()), None)
    if some is None:
        return {}
    at = (op, PASSES[0], some.dtype, some.shape)
    return {row.backend: row.us for row in found if (row.op, row.pass_, row.dtype, row.shape) == at and row.us}


def _of_gelu(times: Times) -> list[list[str]]:
    lines = []
    for name, rung in FUSED.items():
        if rung in times and BUILTIN in times:
            ratio = times[rung] / times[BUILTIN]
            verdict = "holds" if ratio <= EQUAL else f"off by {100 * (ratio - 1):.0f} %"
            lines.append([f"gelu by {name} is near PyTorch's own", f"{ratio:.2f} × its time", verdict])
    fused = [times[rung] for rung in (BUILTIN, *FUSED.values()) if rung in times]
    if NAIVE in times and fused:
        least = times[NAIVE] / max(fused)
        said = f"{least:.3g} to {times[NAIVE] / min(fused):.3g} × faster"
        lines.append(["every fused gelu is far from the formula", said, "holds" if least >= FAR else "does not hold"])
    return lines


def _of_chains(chains: Mapping[str, Times]) -> list[list[str]]:
    lines = []
    for name, rung in (("torch.compile", "compile.default"), ("XLA", "xla.jit")):
        for other, than in ((NAIVE, "the formula call by call"), (BUILTIN, "PyTorch's own functions")):
            gains = {op: t[other] / t[rung] for op, t in chains.items() if other in t and rung in t}
            if gains:
                claim = f"{name} makes chains {GAIN[0]:g} to {GAIN[1]:g} × faster than {than}"
                low, high = (pick(gains, key=gains.__getitem__) for pick in (min, max))
                said = f"{gains[low]:.3g} × ({low}) to {gains[high]:.3g} × ({high})"
                lines.append([claim, said, _counted(list(gains.values()))])
    return lines


def _counted(gains: Sequence[float]) -> str:
    """Of how many operations a claimed gain holds."""
    below, above = sum(gain < GAIN[0] for gain in gains), sum(gain > GAIN[1] for gain in gains)
    parts = [f"holds for {len(gains) - below - above} of {len(gains)}"]
    parts += [f"{below} gain less"] if below else []
    parts += [f"{above} gain more"] if above else []
    return ", ".join(parts)
