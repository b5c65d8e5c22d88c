"""Pairs of kernels, of which the second reads at once what the first has written: norm → linear, linear → gelu.

    python -m bench.pairs              # needs a GPU; three minutes

Kernels read their input with a cache policy by which written lines leave the L2 early. That helps a kernel alone. Does
it cost the next kernel, which reads those lines? The linear layer is PyTorch's in all pairs; norm and gelu are ours or
PyTorch's. Triton kernels are timed with that policy and with the default one, each in processes of its own, which time
PyTorch's pair in the same rounds. The columns: the pair's speedup over PyTorch's, and its time over the sum of both
kernels alone, whose inputs come from memory. A policy that drops lines too early shows as a larger share of the sum.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

import kernel_ladder
from bench.measure import timing

#: Rows of the tensor between the kernels, and its columns: from 2 MiB, which the L2 holds, to 256 MiB in 16 bits.
ROWS = (256, 1024, 4096, 8192, 32768)
COLUMNS = 4096
#: The other side of the linear layer: narrow, so that the product does not hide the memory's time.
INNER = 512
TINY = (64, 32)  # both, in a test without a GPU
PAIRS = ("norm → linear", "linear → gelu")
STREAMING, DEFAULT = "evict_last", "default"
POLICIES = (STREAMING, DEFAULT)
#: Processes of each policy, which take turns; of their figures the median counts.
TURNS = 2
SECONDS = 0.6
BASELINE = "torch"

Call = Callable[[int], torch.Tensor]


class Figure(NamedTuple):
    """What one variant of a pair took at a size, in seconds."""

    pair: str
    rows: int
    variant: str  # a level, for triton with the policy
    pair_s: float
    first_s: float
    second_s: float
    speedup: float  # of the pair over PyTorch's, in the same rounds

    @property
    def of_sum(self) -> float:
        """The pair's time over that of both kernels alone."""
        return self.pair_s / (self.first_s + self.second_s)


def calls(pair: str, rows: int, level: str, copies: int, device: torch.device) -> tuple[Call, Call, Call]:
    """The pair, its first kernel and its second one; each takes the index of a copy of the inputs."""
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    columns, inner = (COLUMNS, INNER) if on_gpu else TINY

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=dtype, device=device)

    between = [made(rows, columns) for _ in range(copies)]
    norm, linear = made(columns), torch.nn.functional.linear
    if pair == PAIRS[0]:
        weight = made(inner, columns) / columns**0.5

        def first(i: int) -> torch.Tensor:
            return kernel_ladder.rms_norm(between[i], (columns,), norm, backend=level)

        return (lambda i: linear(first(i), weight)), first, (lambda i: linear(between[i], weight))
    weight = made(columns, inner) / inner**0.5
    inputs = [made(rows, inner) for _ in range(copies)]

    def second(x: torch.Tensor) -> torch.Tensor:
        return kernel_ladder.gelu(x, approximate="tanh", backend=level)

    return (
        (lambda i: second(linear(inputs[i], weight))),
        (lambda i: linear(inputs[i], weight)),
        (lambda i: second(between[i])),
    )


def measure(
    pair: str, rows: int, levels: Sequence[str], device: torch.device, seconds: float = SECONDS
) -> list[Figure]:
    """One figure for each level, PyTorch's among them, all timed in the same rounds."""
    nbytes = rows * COLUMNS * 2 if device.type == "cuda" else 1
    copies = timing.copies_needed(nbytes, device)
    with torch.no_grad(), timing.side_stream(device):
        launches: dict[str, timing.Launch] = {}
        for level in levels:
            named = zip(("pair", "first", "second"), calls(pair, rows, level, copies, device), strict=True)
            launches |= {f"{level} {name}": timing.prepare(call, copies, device) for name, call in named}
        timing.settle(list(launches.values()), seconds)
        times = timing.interleave(launches, seconds, f"{BASELINE} pair")
    return [figure(pair, rows, level, times) for level in levels]


def figure(pair: str, rows: int, level: str, times: dict[str, list[float | None]]) -> Figure:
    """The medians of a level's rounds; the speedup is that of the rounds paired."""

    def median(name: str) -> float:
        return statistics.median(t for t in times[f"{level} {name}"] if t is not None)

    rounds = zip(times[f"{BASELINE} pair"], times[f"{level} pair"], strict=True)
    speedup = statistics.median(base / own for base, own in rounds if base is not None and own is not None)
    return Figure(pair, rows, level, median("pair"), median("first"), median("second"), speedup)


def use_policy(policy: str) -> None:
    """Sets the policy of Triton kernels' loads, before any of them is imported."""
    if loaded := [name for name in ("triton_impl.gelu", "triton_impl.norm.fused") if name in sys.modules]:
        raise RuntimeError(f"bench.pairs: the cache policy must be set before {' and '.join(loaded)} is imported")
    if policy == DEFAULT:
        import triton.language as tl

        from triton_impl.common import cache_policy

        cache_policy.EVICTION_OF_SINGLE_USE = tl.constexpr("")


def in_process(policy: str) -> list[Figure]:
    """The figures of a process of its own."""
    command = [sys.executable, "-m", "bench.pairs", "--policy", policy]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return [Figure(*figure) for figure in json.loads(done.stdout.splitlines()[-1])]


def joined(found: Sequence[Figure]) -> list[Figure]:
    """The median of the processes' figures, number by number, in the order of the first."""
    alike: dict[tuple[str, int, str], list[Figure]] = {}
    for each in found:
        alike.setdefault(each[:3], []).append(each)
    return [
        Figure(*key, *(statistics.median(numbers) for numbers in zip(*(each[3:] for each in group), strict=True)))
        for key, group in alike.items()
    ]


def show(found: Sequence[Figure], console: Console) -> None:
    """A table for each pair, a line for each size and variant."""
    for pair in dict.fromkeys(each.pair for each in found):
        table = Table(title=f"{pair}, bfloat16, {COLUMNS} columns between", title_justify="left")
        for name in ("rows", "MiB between", "variant", "pair, µs", "over PyTorch's", "of the sum alone"):
            table.add_column(name, justify="left" if name == "variant" else "right")
        for each in found:
            if each.pair == pair:
                mib = each.rows * COLUMNS * 2 / 2**20
                cells = (str(each.rows), f"{mib:.0f}", each.variant, f"{each.pair_s * 1e6:.1f}")
                table.add_row(*cells, f"{each.speedup:.3f}×", f"{each.of_sum:.3f}")
        console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code, 2 where no GPU is there."""
    parser = argparse.ArgumentParser(prog="python -m bench.pairs", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--policy", choices=POLICIES, help="of this process: print its figures as JSON")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("python -m bench.pairs: no GPU is visible", file=sys.stderr)
        return 2
    if args.policy:
        use_policy(args.policy)
        # The cuda level's policy is compiled in: processes of one policy measure it.
        levels = (BASELINE, "cuda", "triton") if args.policy == STREAMING else (BASELINE, "triton")
        device = torch.device("cuda")
        found: list[Any] = [each for pair in PAIRS for rows in ROWS for each in measure(pair, rows, levels, device)]
        print(json.dumps([_named(each, args.policy) for each in found]))
        return 0
    found = [each for _ in range(TURNS) for policy in POLICIES for each in in_process(policy)]
    order = {key: place for place, key in enumerate((pair, rows) for pair in PAIRS for rows in ROWS)}
    show(sorted(joined(found), key=lambda each: order[each.pair, each.rows]), Console())
    return 0


def _named(each: Figure, policy: str) -> Figure:
    return each._replace(variant=f"triton, {policy}") if each.variant == "triton" else each


if __name__ == "__main__":
    sys.exit(main())
