"""What several GPUs measured, and what the paper model predicts of more of them, as Markdown."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from bench.scaling import block, fsdp, model
from bench.scaling.rows import (
    FOLDER,
    LINK,
    ON_DTENSORS,
    ONE_GPU,
    OURS,
    PRODUCT,
    ROLES,
    UNPATCHED,
    ScalingRow,
    latest,
    read,
)
from bench.scaling.show import cells
from bench.show import markdown
from bench.show.table import microseconds

COMMAND = "torchrun --nproc-per-node N -m bench.scaling"
#: Bytes a second of a GPU's network adapter, 400 Gb/s: the link between hosts.
BETWEEN_HOSTS = 50e9
#: GPUs of a host, and numbers of GPUs of the predictions.
HOST = 8
PREDICTED = (8, 64, 1024)
#: Time of a step over its computation that gives 1.7 times one GPU on two.
TARGET = 2 / 1.7
#: Of the predictions: tokens of one sequence, heads and their width; M, K and N of Llama 70B's `up` at 8192 tokens.
LENGTH = 2**20
HEADS = 16
WIDTH = 128
UP = (8192, 8192, 28672)
ITEMSIZE = 2


def write(name: str, machines: Mapping[Path, object]) -> str:
    """A block of :data:`BLOCKS` from the rows in the folder `scaling` beside the machines' files."""
    folders = list(dict.fromkeys(path.parent / FOLDER for path in machines))
    files = [file for folder in folders for file in sorted(folder.glob("*.jsonl"))]
    return "\n\n".join(filter(None, (BLOCKS[name](latest(read(file))) for file in files)))


def _head(rows: Sequence[ScalingRow]) -> str:
    newest = max(rows, key=lambda row: row.when)
    counts = sorted({row.gpus for row in rows if row.gpus > 1})
    software = f"PyTorch {newest.torch}, CUDA {newest.cuda}, Triton {newest.triton}"
    commits = ", ".join(f"`{commit[:12]}`" for commit in dict.fromkeys(row.commit for row in rows if row.commit))
    number = " and ".join(map(str, counts)) or "1"
    return f"{number} × {newest.gpu}, {software}; source {commits or 'unknown'}; {newest.when[:10]}."


def measured(rows: Sequence[ScalingRow]) -> str:
    """A table for each operation."""
    parts = [_head(rows)] if rows else []
    header = ["problem", "what", "backend", "GPUs", "time", "host", "TFLOP/s a GPU", "GB/s sent", "efficiency"]
    header += ["of product", "hidden", "model (measured / model)"]
    ordered = sorted(rows, key=lambda row: row.op)
    for op, members in groupby(ordered, lambda row: row.op):
        mine = list(members)
        places = {key: i for i, key in reversed(list(enumerate((row.shape, row.pass_) for row in mine)))}
        mine.sort(key=lambda row: (places[row.shape, row.pass_], ROLES.index(row.role), row.gpus))
        lines = []
        for row in mine:
            figures = cells(row)
            if row.us is None:
                figures[0] = f"wrong: {row.wrong}" if row.wrong else f"not here: {row.unsupported}"
            lines.append([f"{row.shape} {row.pass_}", row.role, row.backend, str(row.gpus), *figures])
        kept = [i for i in range(len(header)) if i < 5 or any(line[i] for line in lines)]
        table = [[line[i] for i in kept] for line in lines]
        right = [i > 2 for i in kept]
        parts.append(f"`{op}`, {mine[0].dtype}:\n\n{markdown.grid([header[i] for i in kept], table, right)}")
    return "\n\n".join(parts)


def _rate(rows: Iterable[ScalingRow], **wanted: object) -> float | None:
    """FLOP/s of one GPU: the best of the timed rows with these fields."""
    found = [
        row.tflops_per_gpu * 1e12
        for row in rows
        if row.tflops_per_gpu and all(getattr(row, name) == value for name, value in wanted.items())
    ]
    return max(found, default=None)


def predicted(rows: Sequence[ScalingRow]) -> str:
    """What the model says of 8, 64 and 1024 GPUs, from one GPU's rates and the link's; nothing where one is missing."""
    links = {row.op: row.gbs * 1e9 for row in rows if row.role == LINK and row.gbs}
    forward = _rate(rows, op="ring_attention", role=ONE_GPU, pass_="forward")
    both = _rate(rows, op="ring_attention", role=ONE_GPU, pass_="forward+backward")
    product = _rate(rows, op="all_gather_matmul", role=PRODUCT)
    if not {"neighbour", "memory"} <= set(links) or not forward or not both or not product:
        return ""
    attention = 2 * HEADS * WIDTH * LENGTH**2
    one_forward, one_both = attention / forward, 3.5 * attention / both
    sizes = {"batch": 1, "heads": HEADS, "heads_kv": HEADS, "length": LENGTH, "width": WIDTH, "itemsize": ITEMSIZE}
    m, k, n = UP
    lines = []
    for gpus in PREDICTED:
        link = links["neighbour"] if gpus <= HOST else min(links["neighbour"], BETWEEN_HOSTS)
        machine = model.Machine(link, links["memory"])
        ahead = model.ring_attention_forward(gpus, machine, one_forward, **sizes)
        back = model.ring_attention_backward(gpus, machine, max(one_both - one_forward, 0.0), **sizes)
        alone = 2 * m * k * n / gpus / product
        gather = model.all_gather_matmul(gpus, machine, alone, m=m, k=k, itemsize=ITEMSIZE)
        scatter = model.matmul_reduce_scatter(gpus, machine, alone, m=m, n=k, itemsize=ITEMSIZE)
        least = model.least_length(gpus, machine, forward, heads=HEADS, heads_kv=HEADS, itemsize=ITEMSIZE)
        shares = (one_forward / gpus / ahead, one_both / gpus / (ahead + back), alone / gather, alone / scatter)
        lines.append([str(gpus), f"{link / 1e9:.0f} GB/s", f"{least:,}", *(f"{share:.2f}" for share in shares)])
    header = [
        "GPUs", "link", "least tokens that hide the hops", "ring, forward", "ring, both passes",
        "all-gather matmul", "matmul reduce-scatter",
    ]  # fmt: skip
    return f"{_head(rows)}\n\n{markdown.grid(header, lines, [True] * len(header))}"


_BLOCK = re.compile(r"B1 S(\d+) hidden (\d+) H\d+/\d+ inner \d+")
_FSDP = re.compile(r"(\d+) layers, hidden (\d+) H\d+ inner (\d+), S\d+ a GPU")


def _sent(row: ScalingRow) -> int | None:
    """Bytes that a GPU sends in a training step; None for other rows."""
    if row.op == block.OP and row.role in (OURS, ON_DTENSORS) and (found := _BLOCK.fullmatch(row.shape)):
        tokens, hidden = map(int, found.groups())
        overlapped = row.role == OURS
        return model.block_bytes(row.gpus, tokens=tokens, hidden=hidden, itemsize=ITEMSIZE, overlapped=overlapped)
    if row.op == fsdp.OP and row.role in (OURS, UNPATCHED) and (found := _FSDP.fullmatch(row.shape)):
        layers, hidden, inner = map(int, found.groups())
        sizes = {"layers": layers, "hidden": hidden, "inner": inner, "words": fsdp.WORDS}
        return model.fsdp_bytes(row.gpus, **sizes, itemsize=ITEMSIZE)
    return None


def steps(rows: Sequence[ScalingRow]) -> str:
    """Of each training step: one GPU's share of the computation, what is sent, and what neither explains."""
    links = {row.gpus: row.gbs * 1e9 for row in rows if row.op == "neighbour" and row.role == LINK and row.gbs}
    one = {(row.op, row.shape, row.backend): row.us for row in rows if row.role == ONE_GPU and row.us}
    lines = []
    for row in sorted(rows, key=lambda row: (row.op, row.shape, ROLES.index(row.role), row.gpus)):
        sent, link, alone = _sent(row), links.get(row.gpus), one.get((row.op, row.shape, row.backend))
        if sent is None or link is None or alone is None or row.us is None:
            continue
        compute = alone if row.op == fsdp.OP else alone / row.gpus  # under FSDP2 each GPU has a sequence
        travel = 1e6 * sent / link
        target = compute * TARGET
        times = [microseconds(t) for t in (row.us, compute, travel)]
        rest, best = (f"{t / row.us:+.0%}" for t in (row.us - compute - travel, row.us - target))
        speedup = f"{row.gpus * compute / row.us:.2f}"
        lines.append(
            [f"{row.op} {row.shape}", row.role, str(row.gpus), *times, f"{sent / 1e9:.2f} GB", speedup, rest, best]
        )
    header = [
        "step",
        "what",
        "GPUs",
        "time",
        "computation",
        "travel",
        "sent a GPU",
        "times one GPU",
        "rest",
        "to target",
    ]
    return f"{_head(rows)}\n\n{markdown.grid(header, lines, [i > 1 for i in range(len(header))])}" if lines else ""


BLOCKS: dict[str, Callable[[Sequence[ScalingRow]], str]] = {
    "scaling": measured,
    "scaling model": predicted,
    "scaling steps": steps,
}
