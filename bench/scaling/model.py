"""What a problem on n GPUs should take, on paper: from one GPU's measured rate, the link's and the memory's.

Each step of a ring computes while one hop travels, so it takes the longer of the two. The last step sends nothing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """Measured rates of a GPU: bytes a second to its neighbour, beside as many that come, and of its memory."""

    link: float
    memory: float


def _ring(steps: int, compute: float, hop: float, after: float = 0.0) -> float:
    """Seconds of `steps` computations, all but the last beside a hop, each followed by `after`."""
    return (steps - 1) * max(compute + after, hop) + compute + after


def _merge_bytes(batch: int, heads: int, rows: int, width: int, itemsize: int) -> int:
    """Bytes to merge a step's result into a float32 accumulator: read both, write one."""
    return batch * heads * rows * width * (itemsize + 8)


def ring_attention_forward(
    gpus: int, machine: Machine, one_gpu: float, *, batch: int, heads: int, heads_kv: int, length: int, width: int,
    itemsize: int,
) -> float:  # fmt: skip
    """Seconds of ring attention's forward pass.

    Args:
        gpus: n, each with ``length / n`` rows of queries, keys and values.
        machine: measured rates.
        one_gpu: seconds that one GPU takes for the whole problem.
    """
    rows = length // gpus
    compute = one_gpu / gpus**2  # n steps on n GPUs, equal under zigzag
    hop = 2 * batch * heads_kv * rows * width * itemsize / machine.link
    # A step merges half of the rows or all of them, by where its keys are from: the slowest rank merges all.
    merge = _merge_bytes(batch, heads, rows, width, itemsize) / machine.memory if gpus > 1 else 0.0
    return _ring(gpus, compute, hop, merge)


def ring_attention_backward(
    gpus: int, machine: Machine, one_gpu: float, *, batch: int, heads: int, heads_kv: int, length: int, width: int,
    itemsize: int,
) -> float:  # fmt: skip
    """Seconds of ring attention's backward pass: float32 gradients follow the keys, and make one hop more."""
    rows = length // gpus
    compute = one_gpu / gpus**2
    elements = 2 * batch * heads_kv * rows * width
    gradients = elements * 4 / machine.link if gpus > 1 else 0.0
    hop = elements * itemsize / machine.link + gradients
    # Gradients of queries, keys and values are added up in float32.
    sums = (batch * heads * rows * width + elements) * 12 / machine.memory if gpus > 1 else 0.0
    return _ring(gpus, compute, hop, sums) + gradients


def all_gather_matmul(gpus: int, machine: Machine, product: float, *, m: int, k: int, itemsize: int) -> float:
    """Seconds of :func:`kernel_ladder.distributed.all_gather_matmul`.

    Args:
        gpus: n, each with m / n rows of the gathered operand.
        machine: measured rates.
        product: seconds of one GPU's product of all m rows.
        m, k: sizes of the gathered operand.
    """
    return _ring(gpus, product / gpus, m // gpus * k * itemsize / machine.link)


def matmul_reduce_scatter(gpus: int, machine: Machine, product: float, *, m: int, n: int, itemsize: int) -> float:
    """Seconds of :func:`kernel_ladder.distributed.matmul_reduce_scatter`: sums travel, and each rank adds its own."""
    part = m // gpus * n * itemsize
    add = 3 * part / machine.memory if gpus > 1 else 0.0
    return product / gpus + (gpus - 1) * (max(product / gpus, part / machine.link) + add)


def block_bytes(gpus: int, *, tokens: int, hidden: int, itemsize: int, overlapped: bool) -> int:
    """Bytes that a GPU sends in a training step of the tensor and sequence parallel block.

    Each collective gathers or scatters the rows. On DTensors each of seven projections makes one in either pass. The
    overlapped block makes four, and six in the backward pass: it gathers the inputs of two products anew.
    """
    collectives = 4 + 6 if overlapped else 2 * 7
    return collectives * (gpus - 1) * (tokens // gpus) * hidden * itemsize


def fsdp_bytes(gpus: int, *, layers: int, hidden: int, inner: int, words: int, itemsize: int) -> int:
    """Bytes that a GPU sends in a step under FSDP2.

    Weights of layers are gathered in both passes, those of the embedding and the logits once. All gradients are
    scattered. Norms are left out.
    """
    of_layers, others = layers * hidden * (4 * hidden + 3 * inner), 2 * hidden * words
    return (gpus - 1) * (3 * of_layers + 2 * others) * itemsize // gpus


def least_length(gpus: int, machine: Machine, rate: float, *, heads: int, heads_kv: int, itemsize: int) -> int:
    """The total length from which causal ring attention's forward hops are shorter than its steps.

    `rate` is one GPU's, in FLOP/s. A step computes 2·H·(S/n)²·D, a hop carries 2·H_kv·(S/n)·D elements.
    """
    return round(gpus * heads_kv * itemsize * rate / (heads * machine.link))
