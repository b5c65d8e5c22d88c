"""Exercises with matrix products: matmul, matmul_tiled, flash_attention."""

from __future__ import annotations

import math
from typing import Any

import torch

from kernel_ladder.exercises.exercise import Exercise, Mistake
from kernel_ladder.spec import Case


def _matrices(case: Case) -> bool:
    return all(shape is not None and len(shape) == 2 for shape in case.shapes)


def _plain_attention(case: Case) -> bool:
    options, shapes = case.options, case.shapes
    query, key, value = shapes[:3]
    if len(shapes) > 3 or query is None or key is None or len(query) != 4:
        return False
    if options["is_causal"] not in (False, True) or set(options) - {"is_causal", "scale", "enable_gqa"}:
        return False
    return query[:2] == key[:2] and key == value and query[3] <= 128


def _product(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (input.float() @ other.float()).to(input.dtype)


def _without_k_tail(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    k = input.shape[1] // 32 * 32
    return _product(input[:, :k], other[:k])


def _last_k_tile(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    k = (input.shape[1] - 1) // 32 * 32
    return _product(input[:, k:], other[k:])


def _first_k_tile(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    k = input.shape[1]
    repeats = -(-k // 32)
    return (repeats * (input[:, :32].float() @ other[:32].float())).to(input.dtype)


def _transposed(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    if other.shape[0] != other.shape[1]:
        raise ValueError("only of square matrices")
    return _product(input, other.T)


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Any, **how: Any) -> torch.Tensor:
    q, k, v = query.float(), key.float(), value.float()
    scale = query.shape[-1] ** -0.5 if options["scale"] is None else float(options["scale"])
    if how.get("unscaled"):
        scale = math.log(2)  # the powers are of two
    elif how.get("scaled_by_d"):
        scale = 1 / query.shape[-1]
    rows, columns = q.shape[-2], k.shape[-2]
    if how.get("zero_keys"):
        more = -columns % 32
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, more)) for x in (k, v))
    scores = q @ k.mT * scale
    if options["is_causal"] and not how.get("no_mask"):
        diagonal = how.get("diagonal", 0)
        if how.get("lower_right"):
            diagonal = columns - rows
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(diagonal), -torch.inf)
    if not (how.get("acc_kept") or how.get("sum_kept") or how.get("undivided")):
        return (torch.softmax(scores, -1) @ v).to(query.dtype)
    row_max = torch.full((*scores.shape[:-1], 1), -torch.inf, device=q.device)
    row_sum, acc = torch.zeros_like(row_max), torch.zeros_like(q)
    for part, values in zip(scores.split(32, dim=-1), v.split(32, dim=-2), strict=True):
        new_max = torch.maximum(row_max, part.amax(-1, keepdim=True))
        rescale, weights = torch.exp(row_max - new_max), torch.exp(part - new_max)
        row_sum = row_sum * (1 if how.get("sum_kept") else rescale) + weights.sum(-1, keepdim=True)
        acc = acc * (1 if how.get("acc_kept") else rescale) + weights @ values
        row_max = new_max
    return (acc if how.get("undivided") else acc / row_sum).to(query.dtype)


def _wrong_attention(**how: Any) -> Any:
    def wrong(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        return _attention(query, key, value, options, **how)

    return wrong


_MATMUL_MISTAKES = (
    Mistake("The last, partial tile of K is missing: round the number of steps up.", _without_k_tail),
    Mistake("Only the last tile of K is in the result: add to `acc`.", _last_k_tile),
    Mistake("Every step loads the first tile of K: advance k with `start`.", _first_k_tile),
    Mistake("The second operand is read transposed: its row length is N, its rows are k.", _transposed),
)

EXERCISES = (
    Exercise(
        "matmul",
        op="matmul",
        rung="triton.naive",
        difficulty="medium",
        teaches="a tile of the output per program, a loop over K, tl.dot",
        formula="C[m, n] = Σ_k A[m, k] · B[k, n]",
        hints=(
            "A block of rows and a block of columns make a block of pointers: a_ptr + rows[:, None] * K + k[None, :].",
            "The mask has two dimensions too: (rows < M)[:, None] & (k < K)[None, :], with other=0.0.",
            "acc = tl.dot(a, b, acc, input_precision='ieee') adds in float32. Without 'ieee', float32 becomes TF32.",
            "C has N columns: c_ptr + rows[:, None] * N + columns[None, :].",
        ),
        asks=_matrices,
        timed="4096x4096x4096",
        mistakes=_MATMUL_MISTAKES,
    ),
    Exercise(
        "matmul_tiled",
        op="matmul",
        rung="triton.tiled",
        difficulty="hard",
        teaches="which program computes which tile, so that programs share the L2 cache",
        formula="""\
C[m, n] = Σ_k A[m, k] · B[k, n]
A group has GROUP_M rows of tiles; inside it, tiles go down a column first.""",
        hints=(
            "A full group has GROUP_M · tiles_n tiles. Which group is tile number t in?",
            "group = tile // (GROUP_M * tiles_n), first_m = group * GROUP_M.",
            "The last group may have fewer rows: tl.minimum(tiles_m - first_m, GROUP_M).",
            "Inside the group, r = tile % (GROUP_M * tiles_n): row r % rows_in_group, column r // rows_in_group.",
        ),
        asks=_matrices,
        timed="4096x4096x4096",
        mistakes=_MATMUL_MISTAKES,
    ),
    Exercise(
        "flash_attention",
        op="attention",
        rung="triton.flash",
        difficulty="hard",
        teaches="attention without its matrix of scores: the online softmax over tiles of keys",
        formula="""\
S = scale · log2 e · q · kᵀ for BLOCK_M queries and BLOCK_N keys, −inf where a key is not seen
m' = max(m, max S),  P = 2^(S − m'),  r = 2^(m − m')
s' = r · s + Σ P,    O' = r · O + P · v
output = O / s""",
        hints=(
            "It is the online softmax with a matrix product: the output is rescaled as the sum is.",
            "scores = tl.dot(q, tl.trans(k), input_precision='ieee') * scale.",
            "seen = (k_rows < seqlen_k)[None, :], and if CAUSAL also k_rows[None, :] <= q_rows[:, None].",
            "new_max = tl.maximum(row_max, tl.max(scores, axis=1)); rescale = tl.exp2(row_max - new_max).",
            "acc = acc * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision='ieee').",
        ),
        asks=_plain_attention,
        timed="B4 H16 S4096 D128 causal",
        mistakes=(
            Mistake("The scale, one over the root of the head dimension, is missing.", _wrong_attention(unscaled=True)),
            Mistake("The scale is one over the root of the head dimension.", _wrong_attention(scaled_by_d=True)),
            Mistake("The causal mask is missing.", _wrong_attention(no_mask=True)),
            Mistake("The causal mask hides the diagonal: query i sees key i.", _wrong_attention(diagonal=-1)),
            Mistake("The causal mask is one key too wide: query i sees no key i + 1.", _wrong_attention(diagonal=1)),
            Mistake(
                "The diagonal starts at the lower right corner; here query 0 sees key 0 alone.",
                _wrong_attention(lower_right=True),
            ),
            Mistake("Keys past the end count with a score of 0: make them -inf.", _wrong_attention(zero_keys=True)),
            Mistake("`acc` is not rescaled when the maximum grows.", _wrong_attention(acc_kept=True)),
            Mistake("`row_sum` is not rescaled when the maximum grows.", _wrong_attention(sum_kept=True)),
            Mistake("The division by the sum is missing.", _wrong_attention(undivided=True)),
        ),
    ),
)
