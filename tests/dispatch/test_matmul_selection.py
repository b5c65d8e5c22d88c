"""The rule of `matmul` at the cuda level: known products on an H100, and plans that `split_k` takes."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kernel_ladder import gpu
from kernel_ladder.selection import linear_cross_entropy, matmul_parts, unaligned
from kernel_ladder.selection import matmul as selection
from kernel_ladder.selection.matmul_parts import MOST_BYTES, Operand, Part

#: Blocks at once on an H100, in clusters of 1, 2, 4 and 8.
AT_ONCE = (132, 132, 128, 128)


@pytest.mark.parametrize(
    ("m", "n", "k", "rung"),
    [
        (16, 4096, 4096, "cuda.split_k"),
        (512, 512, 8192, "cuda.split_k"),
        (4096, 4096, 4096, "cuda.persistent"),
        (4096, 3584, 3584, "cuda.stream_k"),
        (4096, 4096, 14336, "cuda.persistent"),  # stream_k's blocks read K at places far apart
        (6000, 6000, 6000, "cuda.persistent"),  # stream_k takes 1.11 of its time
        (8192, 8192, 8192, "cuda.persistent"),  # stream_k takes 0.99 of its time
    ],
)
def test_known_products(m, n, k, rung):
    assert selection.plan_of(m, n, k, 1, 1, 1, 2, False, AT_ONCE).rung == rung


def test_every_plan_is_one_that_split_k_takes():
    choose = random.Random(0)
    for _ in range(500):
        m, n, k = (choose.choice([choose.randint(1, 64), choose.randint(1, 9000)]) for _ in range(3))
        item, along_m = choose.choice([2, 4]), choose.random() < 0.5
        plan = selection.plan_of(m, n, k, 1, 1, 1, item, along_m and item == 2, AT_ONCE)
        assert (plan.rows, plan.columns, plan.pair) in [tile[:3] for tile in selection.TILES]
        assert plan.splits in selection.SPLITS
        assert plan.splits <= -(-k // (128 // item))
        assert not plan.pair or (along_m and plan.splits == 1)


@pytest.fixture
def hopper():
    with gpu.pretend("H100"):
        yield


def test_batches_are_counted_as_the_kernels_fold_them(hopper):
    weight = torch.empty(64, 256, dtype=torch.bfloat16)
    rows = selection.plan(torch.empty(4, 1024, 64, dtype=torch.bfloat16), weight)
    assert rows == selection.plan(torch.empty(4096, 64, dtype=torch.bfloat16), weight)
    assert rows == selection.plan(torch.empty(4, 1024, 64, dtype=torch.bfloat16), weight.expand(4, 64, 256))
    assert selection.plan(torch.empty(0, 64, dtype=torch.bfloat16), weight).rung == "cuda.split_k"


@pytest.mark.parametrize(
    ("rows", "columns", "k", "rung"),
    [
        ((777,), 768, 3072, "cuda.split_k"),
        ((3, 259), 3072, 768, "cuda.split_k"),
        ((777,), 4096, 14336, "cuda.persistent"),
        ((4096,), 4096, 4096, "cuda.persistent"),
    ],
)
def test_the_plan_of_a_linear_layer_is_that_of_its_product(hopper, rows, columns, k, rung):
    with FakeTensorMode():
        input, weight = (torch.empty(*n, k, dtype=torch.bfloat16, device="cuda:0") for n in (rows, (columns,)))
        plan = selection.plan(input, weight.mT)
        assert plan.rung == rung
        assert plan == selection.plan(input.flatten(0, -2), weight.mT)
        assert not plan.pair


@pytest.mark.parametrize(
    ("rows", "columns", "k", "dtype", "names"),
    [
        (16, 128, 64, torch.bfloat16, ()),
        (17, 128, 64, torch.bfloat16, ("cuda.split_k", "cuda.persistent")),
        (777, 768, 3072, torch.float16, ("cuda.split_k", "cuda.persistent")),
        (777, 768, 3072, torch.float32, ("cuda.persistent",)),
        (4096, 4096, 4096, torch.bfloat16, ("cuda.persistent",)),
    ],
)
def test_the_rung_of_a_linear_layer_is_that_of_its_product_but_for_few_rows(hopper, rows, columns, k, dtype, names):
    with FakeTensorMode():
        input, weight = (torch.empty(n, k, dtype=dtype, device="cuda:0") for n in (rows, columns))
        assert selection.rule_of_linear((input, weight, None), {"activation": None}) == names


def operands(m: int, n: int, k: int, layout: str) -> tuple[Operand, Operand]:
    a = Operand(m, k, 1) if layout[0] == "N" else Operand(m, 1, m)
    return a, Operand(n, 1, n) if layout[1] == "N" else Operand(n, k, 1)


def cycles(m: int, n: int, k: int, parts: list[tuple[Part, int]]) -> int:
    """What the model says of the plan of a product in bfloat16."""
    plan = selection.plan_of(m, n, k, 1, 1, 1, 2, False, AT_ONCE, parts)
    sizes = parts or [(Part(1, m, n), 1)]
    products = tuple((selection._Product(p.m, p.n, -(-k // 64), 1, 1, 1), count) for p, count in sizes)
    product = selection._Parts(products, bool(parts))
    if plan.rung == "cuda.persistent":
        return product.whole_cycles(66)
    if plan.rung == "cuda.stream_k":
        return product.streamed_cycles(66)
    (tile,) = (tile for tile in selection.TILES if tile[:3] == (plan.rows, plan.columns, plan.pair))
    return product.split_cycles(tile, plan.splits, AT_ONCE[selection.SPLITS.index(plan.splits)])


def copying(operand: Operand, k: int, times: int = 1) -> float:
    if operand.by_tma(k, 2):
        return 0.0
    return 2 * times * operand.copy_bytes(k, 2) / selection.MEMORY_BYTES_PER_CYCLE


def part_by_part(m: int, n: int, k: int, a: Operand, b: Operand) -> float:
    """Cycles of the parts with the fullest last wave, each with copies and a rung of its own (commit 640b876)."""
    tile = [0 if x.by_tma(k, 2) else x._replace(x=t).copy_bytes(k, 2) for x, t in ((a, 128), (b, 256))]
    most_m, most_n, best = -(-m // 128), -(-n // 256), (0.0, 0, 0, 0)
    for columns in range(1, most_n + 1):
        if (left := MOST_BYTES - columns * tile[1]) < 0:
            break
        rows = min(most_m, left // tile[0]) if tile[0] else most_m
        full = rows * columns
        best = max(best, (full / (-(-max(full, 1) // 132) * 132), full, rows, columns))
    step_m, step_n = best[2] * 128, best[3] * 256
    return sum(
        cycles(rows, columns, k, []) + copying(a._replace(x=rows), k) + copying(b._replace(x=columns), k)
        for rows in (min(step_m, m - m0) for m0 in range(0, m, step_m))
        for columns in (min(step_n, n - n0) for n0 in range(0, n, step_n))
    )


def in_parts(m: int, n: int, k: int, a: Operand, b: Operand) -> float | None:
    """Cycles of the parts of today with one rung for all; None where the product is computed as a whole."""
    if not (parts := matmul_parts.parts(a, b, k, 1, 2, AT_ONCE[0])):
        return None
    across = -(-n // max(part.n for part, _ in parts))
    again = 1 if all(part.m == m for part, _ in parts) else across
    return cycles(m, n, k, parts) + copying(a, k, again) + copying(b, k)


@pytest.mark.parametrize(("m", "n", "k"), [(8191, 8219, 8209), (4095, 4099, 4097), (5003, 4999, 9001)])
@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
def test_one_rung_for_all_parts_is_faster_than_a_rung_for_each(m, n, k, layout):
    a, b = operands(m, n, k, layout)
    assert in_parts(m, n, k, a, b) < 0.98 * part_by_part(m, n, k, a, b)


def test_parts_of_random_products_are_no_slower_than_before():
    choose = random.Random(0)
    ratios = []
    for _ in range(400):
        m, n, k = choose.randint(500, 16000), choose.randint(500, 16000), choose.randint(500, 10000)
        a, b = operands(m, n, k, choose.choice(["NN", "NT", "TN", "TT"]))
        if (now := in_parts(m, n, k, a, b)) is not None:
            ratios.append(now / part_by_part(m, n, k, a, b))
    ratios.sort()
    assert len(ratios) > 100
    assert math.exp(sum(map(math.log, ratios)) / len(ratios)) < 0.9
    assert ratios[len(ratios) * 95 // 100] < 1.02
    assert ratios[-1] < 1.15


def test_the_plan_of_two_tensors_counts_their_parts(hopper):
    a, b = (
        torch.empty(8191, 8209, dtype=torch.bfloat16, device="meta"),
        torch.empty(8209, 8219, dtype=torch.bfloat16, device="meta"),
    )
    parts = matmul_parts.parts(*operands(8191, 8219, 8209, "NN"), 8209, 1, 2, selection.blocks_at_once(0)[0])
    assert sum(count * part.m * part.n for part, count in parts) == 8191 * 8219
    assert selection._plan(a, b) == selection.plan_of(
        8191, 8219, 8209, 1, 1, 1, 2, False, selection.blocks_at_once(0), parts
    )
    aligned = torch.empty(8192, 8192, dtype=torch.bfloat16, device="meta")
    assert selection._plan(aligned, aligned) == selection.plan_of(
        8192, 8192, 8192, 1, 1, 1, 2, False, selection.blocks_at_once(0)
    )


#: What comes before the cuda level where the product's rows alone are unaligned.
FIRST = ("triton.persistent",)


@pytest.mark.parametrize(
    ("input", "other", "takes"),
    [
        (((4096, 4096), (4096, 1)), ((4096, 4096), (4096, 1)), False),
        (((4096, 4096), (4096, 1)), ((4096, 4099), (4099, 1)), True),  # rows of B and of the product
        (((2048, 768), (768, 1)), ((768, 50257), (1, 768)), FIRST),  # rows of the product
        (((4095, 4096), (4096, 1)), ((4096, 4096), (1, 4096)), False),  # a number of rows does no harm
        (((4096, 4095), (4095, 1)), ((4095, 4096), (4096, 1)), True),
        (((4096, 4095), (1, 4096)), ((4095, 4096), (4096, 1)), False),
        (((99, 101), (101, 1)), ((101, 103), (103, 1)), False),  # little work
    ],
)
def test_auto_gives_unaligned_products_to_the_cuda_level(hopper, input, other, takes):
    with FakeTensorMode():
        a, b = (torch.empty_strided(*of, dtype=torch.bfloat16, device="cuda:0") for of in (input, other))
        names = unaligned.matmul_where_unaligned((a, b), {})
        first = FIRST if takes is FIRST else ()
        assert names == ((*first, selection.plan(a, b).rung) if takes else ())
        assert unaligned.linear_where_unaligned((a, b.mT, None), {}) == ((*first, "cuda.persistent") if takes else ())


@pytest.mark.parametrize(
    ("rows", "classes", "dtype", "takes"),
    [
        (4096, 32000, torch.bfloat16, True),
        (2048, 32768, torch.float16, True),
        (2047, 32768, torch.bfloat16, False),
        (4096, 32000, torch.float32, False),
    ],
)
def test_auto_gives_many_logits_to_chunks(hopper, rows, classes, dtype, takes):
    with FakeTensorMode():
        x, weight = (torch.empty(n, 64, dtype=dtype, device="cuda:0") for n in (rows, classes))
        target = torch.empty(rows, dtype=torch.int64, device="cuda:0")
        names = linear_cross_entropy.chunked_where_large((x, weight, target), {})
        assert names == (("triton.chunked",) if takes else ())


@pytest.mark.parametrize(
    ("rows", "dtype", "takes"),
    [
        (2048, torch.bfloat16, False),
        (4096, torch.float16, True),
        (4096, torch.float32, False),
        (16384, torch.float32, True),
    ],
)
def test_auto_chunks_logits_that_would_fill_the_memory(rows, dtype, takes):
    """128,256 classes on a GPU with 24 GiB that is no Hopper: an eighth of it holds 3,140 rows of 8 bytes a logit."""
    with gpu.pretend("A10"), FakeTensorMode():
        x, weight = (torch.empty(n, 64, dtype=dtype, device="cuda:0") for n in (rows, 128256))
        target = torch.empty(rows, dtype=torch.int64, device="cuda:0")
        names = linear_cross_entropy.chunked_where_large((x, weight, target), {})
        assert names == (("triton.chunked",) if takes else ())
