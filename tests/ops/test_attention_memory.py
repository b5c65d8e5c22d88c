"""Memory of attention's backward pass, of batches and of packed sequences: gradients, and a stated workspace."""

from __future__ import annotations

import itertools

import pytest
import torch

from kernel_ladder import gpu, table
from kernel_ladder.selection import attention as selection
from kernel_ladder.spec import Case
from kernel_ladder.table import Variant
from kernel_ladder.testing.samples import make_inputs

from ..conftest import DEVICE, needs_gpu, skip_unless_it_runs

#: Small tensors beside those that are stated, such as counters.
SLACK_BYTES = 2**16
#: Rows of a tile of queries in csrc/attention/hopper_backward.cuh.
TILE = 64
#: Lengths of packed sequences: a long one, one of a row, and lengths that no tile divides.
LENGTHS = (3000, 1, 5093, 99)
QUERIES, HEADS, HEADS_KV = sum(LENGTHS), 4, 2

ATTENTION = [v for v in table.variants("attention") if v.level in ("triton", "cuda") and not v.name.endswith("naive")]
VARLEN = [v for v in table.variants("attention_varlen") if v.level in ("triton", "cuda")]


def of_flash(rows: int) -> int:
    """Delta, one float32 a row of scores."""
    return 4 * rows


def of_wgmma(tiles: int) -> int:
    """Delta and the log-sum-exp of whole tiles of queries."""
    return 4 * 2 * TILE * tiles


def of_warp_specialized(tiles: int, head_dim: int) -> int:
    """These, sums of dQ in float32 for whole tiles of a padded head dimension, and one counter a tile and for all."""
    return of_wgmma(tiles) + 4 * head_dim * TILE * tiles + 4 * (tiles + 1)


def workspace(variant: Variant, d: int) -> int:
    """Bytes beside the gradients that a rung's backward may hold at once: linear in the length of the sequences."""
    if variant.op == "attention_varlen":
        tiles = HEADS * (QUERIES // TILE + len(LENGTHS))
        hopper = variant.name == "cuda.pingpong" and d <= selection.WIDEST_BACKWARD
        return of_warp_specialized(tiles, 64 if d <= 64 else 128) if hopper else of_flash(HEADS * QUERIES)
    step = variant.name.removeprefix("cuda.")
    if step in ("pingpong", "persistent"):
        step = selection.backward_on_hopper(d, QUERIES, HEADS_KV, gpu.KNOWN["H100"].multiprocessors)
    tiles = HEADS * -(-QUERIES // TILE)
    if step == "wgmma":
        return of_wgmma(tiles)
    if step == "warp_specialized":
        return of_warp_specialized(tiles, next(n for n in (64, 96, 128) if d <= n))
    return of_flash(HEADS * QUERIES)


def case(variant: Variant, d: int) -> Case:
    options = {"is_causal": True, "scale": None, "enable_gqa": True}
    if variant.op == "attention":
        queries = 2 if variant.name.endswith("split_kv") else QUERIES
        return Case("", ((1, HEADS, queries, d), *((1, HEADS_KV, QUERIES, d),) * 2), options)
    written = "offsets:" + ",".join(map(str, itertools.accumulate(LENGTHS, initial=0)))
    options |= {"max_seqlen_q": max(LENGTHS), "max_seqlen_k": max(LENGTHS)}
    shapes = (QUERIES, HEADS, d), *((QUERIES, HEADS_KV, d),) * 2, *((len(LENGTHS) + 1,),) * 2
    return Case("", shapes, options, kinds={3: written, 4: written})


@needs_gpu
@pytest.mark.parametrize("d", [64, 96, 128, 256])
@pytest.mark.parametrize("variant", ATTENTION + VARLEN, ids=lambda v: f"{v.op}-{v.name}")
def test_the_backward_holds_gradients_and_its_workspace(variant, d):
    """Scores of these lengths would take more than ten times as much."""
    of = case(variant, d)
    inputs = make_inputs(of, torch.bfloat16, DEVICE)
    skip_unless_it_runs(variant, inputs, of.options)
    output, saved = variant.forward(*inputs, **of.options)
    grad = torch.randn(output.shape, device=DEVICE).to(output.dtype)
    needs = (True,) * 3 + (False,) * (len(inputs) - 3)
    variant.backward(saved, grad, needs)  # compiles, and fills caches
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    gradients = variant.backward(saved, grad, needs)
    # What was asked for: the allocator may give a cached block that is up to a MiB larger.
    held = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    results = sum(x.nbytes for x in gradients if x is not None)
    allowed = workspace(variant, d)
    assert held <= results + allowed + SLACK_BYTES
    assert results + allowed < 4 * HEADS * QUERIES**2 / 10


def test_the_workspace_grows_as_the_sequence_does():
    """Bytes a row of queries and head, as docs/limits.md states them."""
    for rows in (2**10, 2**20):
        assert of_flash(rows) / rows == 4
        assert of_wgmma(rows // TILE) / rows == 8
        assert of_warp_specialized(rows // TILE, 128) / rows == pytest.approx(8 + 4 * 128 + 4 / TILE, rel=1e-4)
