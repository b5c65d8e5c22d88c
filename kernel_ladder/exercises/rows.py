"""Exercises that reduce rows: row_sum, softmax, softmax_online, rms_norm, add_rms_norm, rms_norm_backward."""

from __future__ import annotations

from typing import Any

import torch

from kernel_ladder.exercises.exercise import Exercise, Mistake
from kernel_ladder.semantics.norms import eps_or_default
from kernel_ladder.spec import Case


def _padded(n: int) -> int:
    """The power of two from `n` on, as a kernel's BLOCK is."""
    return 1 << max(0, n - 1).bit_length()


def _matrix(case: Case) -> bool:
    shape = case.shapes[0]
    return shape is not None and len(shape) == 2


def _rows_of_matrix(case: Case) -> bool:
    return _matrix(case) and case.options["dim"] == -1


def _row_of_few_blocks(case: Case) -> bool:
    """One running sum of more blocks than these loses digits that a tree of sums keeps."""
    return _rows_of_matrix(case) and case.shapes[0][1] <= 2**17  # type: ignore[index]


def _row_fits(case: Case) -> bool:
    return _rows_of_matrix(case) and case.shapes[0][1] <= 4096  # type: ignore[index]


def _weighted(case: Case) -> bool:
    weight = case.shapes[-1]
    return weight is not None and len(weight) == 1 and weight[0] <= 4096


# ---- wrong sums and softmaxes ----------------------------------------------------------------------------------------


def _sum_in_16_bits(input: torch.Tensor, *, dim: int, keepdim: bool) -> torch.Tensor:
    total = torch.zeros(input.shape[0], 1024, dtype=input.dtype, device=input.device)
    for part in input.split(1024, dim=1):
        total[:, : part.shape[1]] += part
    return total.float().sum(1).to(input.dtype)


def _sum_of_the_last_block(input: torch.Tensor, *, dim: int, keepdim: bool) -> torch.Tensor:
    return input.split(1024, dim=1)[-1].float().sum(1).to(input.dtype)


def _sum_of_the_first_block(input: torch.Tensor, *, dim: int, keepdim: bool) -> torch.Tensor:
    return input[:, :1024].float().sum(1).to(input.dtype)


def _softmax_without_max(input: torch.Tensor, *, dim: int) -> torch.Tensor:
    e = input.float().exp()
    return (e / e.sum(-1, keepdim=True)).to(input.dtype)


def _softmax_with_zeros_at_the_tail(input: torch.Tensor, *, dim: int) -> torch.Tensor:
    n = input.shape[-1]
    x = torch.nn.functional.pad(input.float(), (0, _padded(n) - n))
    return torch.softmax(x, -1)[..., :n].to(input.dtype)


def _softmax_undivided(input: torch.Tensor, *, dim: int) -> torch.Tensor:
    x = input.float()
    return torch.exp(x - x.amax(-1, keepdim=True)).to(input.dtype)


def _online(input: torch.Tensor, rescaling: str) -> torch.Tensor:
    """An online softmax in blocks of 256 that treats the old sum in a wrong way."""
    x = input.float()
    row_max = torch.full((*x.shape[:-1], 1), -torch.inf, device=x.device)
    row_sum = torch.zeros_like(row_max)
    for part in x.split(256, dim=-1):
        new_max = part.amax(-1, keepdim=True)
        if rescaling != "local":
            new_max = torch.maximum(row_max, new_max)
        added = torch.exp(part - new_max).sum(-1, keepdim=True)
        if rescaling == "none":
            row_sum = row_sum + added
        elif rescaling == "inverted":
            row_sum = torch.where(row_sum == 0, 0, row_sum * torch.exp(new_max - row_max)) + added
        elif rescaling == "local":
            row_sum = row_sum * torch.exp(row_max - new_max) + added
        elif rescaling == "forgotten":
            row_sum = added
        row_max = new_max
    return (torch.exp(x - row_max) / row_sum).to(input.dtype)


# ---- wrong norms -----------------------------------------------------------------------------------------------------


def _norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float | None, **how: Any) -> torch.Tensor:
    dtype, e = x.dtype, eps_or_default(eps, x.dtype)
    x = x.float()
    if how.get("centred"):
        x = x - x.mean(-1, keepdim=True)
    length = _padded(x.shape[-1]) if how.get("of_block") else x.shape[-1]
    square = x.square().sum(-1, keepdim=True) / length
    if how.get("eps_outside"):
        y = x / (square.sqrt() + e)
    elif how.get("no_root"):
        y = x / (square + e)
    else:
        y = x / (square + e).sqrt()
    return (y if weight is None else y * weight.float()).to(dtype)


def _rms(**how: Any) -> Any:
    def wrong(input: torch.Tensor, weight: torch.Tensor, *, normalized_shape: Any, eps: float | None) -> torch.Tensor:
        return _norm(input, None if how.get("unweighted") else weight, eps, **how)

    return wrong


def _add_rms(**how: Any) -> Any:
    def wrong(
        input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = input + residual
        normed = input if how.get("of_input") else total
        output = _norm(normed, None if how.get("unweighted") else weight, eps, **how)
        return output, residual if how.get("residual_out") else total

    return wrong


def _rms_gradients(**how: Any) -> Any:
    def wrong(
        input: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor, *, normalized_shape: Any, eps: float | None
    ) -> dict[str, torch.Tensor]:
        x, n = input.float(), input.shape[-1]
        rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps_or_default(eps, input.dtype))
        normalized, g = x * rstd, grad.float() * weight.float()
        if how.get("unweighted"):
            g = grad.float()
        length = _padded(n) if how.get("of_block") else n
        mean = (g * normalized).sum(-1, keepdim=True) / length
        grad_input = rstd * (g if how.get("no_mean") else g - normalized * mean)
        if how.get("no_rstd"):
            grad_input = g - normalized * mean
        of_weight = (grad.float() * (x if how.get("of_x") else normalized)).reshape(-1, n)
        if how.get("one_program"):
            of_weight = of_weight[::4]
        return {"grad 0": grad_input.to(input.dtype), "grad 1": of_weight.sum(0).to(input.dtype)}

    return wrong


_EPS_OUTSIDE = "eps stands inside the root: √(mean + eps), not √mean + eps."
_OF_BLOCK = "The mean is over n_cols elements. Dividing by BLOCK counts the masked lanes too."
_CENTRED = "RMSNorm does not subtract the mean; that is LayerNorm."
_UNWEIGHTED = "The product with the weight is missing."

EXERCISES = (
    Exercise(
        "row_sum",
        op="sum",
        rung="triton.two_stage",
        difficulty="easy",
        teaches="a loop over blocks, partial sums in float32, one reduction at the end",
        formula="output[r] = Σ_c input[r, c]",
        hints=(
            "Keep BLOCK partial sums, one per lane, and add a block of the row to them in each round of the loop.",
            "tl.zeros([BLOCK], tl.float32) is the start. In 16 bits, small terms vanish beside a large sum.",
            "Masked lanes must add nothing: tl.load(…, mask=i < n_cols, other=0.0).",
            "tl.sum(partial, axis=0) reduces the lanes to one number, after the loop.",
        ),
        asks=lambda case: _rows_of_matrix(case) and not case.options["keepdim"],
        timed="16384x4096 dim=-1",
        mistakes=(
            Mistake("Only the last block of each row is summed: add to `partial`.", _sum_of_the_last_block),
            Mistake("Only the first block of each row is summed: does the loop advance?", _sum_of_the_first_block),
            Mistake("The partial sums are kept in 16 bits: convert to float32 before adding.", _sum_in_16_bits),
        ),
    ),
    Exercise(
        "softmax",
        op="softmax",
        rung="triton.fused",
        difficulty="easy",
        teaches="a row per program in registers; what masked lanes must hold",
        formula="softmax(x)[i] = exp(x[i] − max x) / Σ_j exp(x[j] − max x)",
        hints=(
            "exp(89) overflows float32. Subtracting the maximum changes nothing in the quotient.",
            "A masked lane must not become the maximum, and its exponential must be zero. Which number does both?",
            "other=-float('inf'): exp(-inf) is 0, and the maximum of it and any number is that number.",
            "x - tl.max(x, axis=0), then tl.exp, then divide by tl.sum(…, axis=0).",
        ),
        asks=_row_fits,
        timed="16384x4096",
        mistakes=(
            Mistake("The maximum is not subtracted: large inputs overflow.", _softmax_without_max),
            Mistake(
                "Masked lanes count as 0, so the tail adds exp(0 − max) to the sum: load it as other=-inf.",
                _softmax_with_zeros_at_the_tail,
            ),
            Mistake("The division by the sum is missing.", _softmax_undivided),
        ),
    ),
    Exercise(
        "softmax_online",
        op="softmax",
        rung="triton.online",
        difficulty="medium",
        teaches="maximum and sum in one pass, for rows of any length",
        formula="""\
for each block x of the row:
    m' = max(m, max x)
    s' = s · exp(m − m') + Σ exp(x − m')
softmax(x)[i] = exp(x[i] − m) / s""",
        hints=(
            "s is a sum of exp(x − m). With another maximum m', each term is exp(m − m') times what it was.",
            "The factor is exp(row_max − new_max), at most 1. Before the first block row_max is -inf and the factor 0.",
            "row_sum = row_sum * tl.exp(row_max - new_max) + tl.sum(tl.exp(x - new_max), axis=0).",
            "The second pass loads the same blocks again; the row is in the L2 cache by then.",
        ),
        asks=_row_of_few_blocks,
        timed="4096x65536",
        mistakes=(
            Mistake(
                "The old sum is not rescaled when the maximum grows.", lambda input, *, dim: _online(input, "none")
            ),
            Mistake(
                "The factor is inverted: exp(old maximum − new maximum), which is at most 1.",
                lambda input, *, dim: _online(input, "inverted"),
            ),
            Mistake(
                "The sums of earlier blocks are lost: add to row_sum.",
                lambda input, *, dim: _online(input, "forgotten"),
            ),
            Mistake(
                "new_max is the maximum of one block: it must be that of all blocks so far, so take row_max into it.",
                lambda input, *, dim: _online(input, "local"),
            ),
            Mistake("The division by the sum is missing.", _softmax_undivided),
        ),
    ),
    Exercise(
        "rms_norm",
        op="rms_norm",
        rung="triton.fused",
        difficulty="easy",
        teaches="a statistic of the row, then the row again from registers",
        formula="rms_norm(x)[i] = x[i] / √(mean(x²) + eps) · weight[i]",
        hints=(
            "The row is in registers as x: use it twice, load it once. Masked lanes are zero and add nothing to Σ x².",
            "The mean divides by n_cols. BLOCK is the next power of two.",
            "rstd = 1 / tl.sqrt(tl.sum(x * x, axis=0) / n_cols + eps); y = x * rstd * weight.",
        ),
        asks=_weighted,
        timed="16384x4096",
        mistakes=(
            Mistake(_OF_BLOCK, _rms(of_block=True)),
            Mistake(_EPS_OUTSIDE, _rms(eps_outside=True)),
            Mistake(_CENTRED, _rms(centred=True)),
            Mistake("The root is missing.", _rms(no_root=True)),
            Mistake(_UNWEIGHTED, _rms(unweighted=True)),
        ),
    ),
    Exercise(
        "add_rms_norm",
        op="add_rms_norm",
        rung="triton.fused",
        difficulty="medium",
        teaches="fusing a residual sum with the norm after it; two outputs",
        formula="""\
sum    = input + residual, rounded to the dtype
output = rms_norm(sum)""",
        hints=(
            "Separate kernels write the sum and read it back. Here it stays in registers between both outputs.",
            "The norm is of the rounded sum, which the backward pass has: convert to sum_ptr.dtype.element_ty first.",
            "total = (x + residual).to(sum_ptr.dtype.element_ty); store it; then go on with total.to(tl.float32).",
        ),
        asks=_weighted,
        timed="16384x4096",
        mistakes=(
            Mistake("The norm is of the input alone, not of the sum.", _add_rms(of_input=True)),
            Mistake("The second output is the residual, not the sum.", _add_rms(residual_out=True)),
            Mistake(_OF_BLOCK, _add_rms(of_block=True)),
            Mistake(_EPS_OUTSIDE, _add_rms(eps_outside=True)),
            Mistake(_CENTRED, _add_rms(centred=True)),
            Mistake(_UNWEIGHTED, _add_rms(unweighted=True)),
        ),
    ),
    Exercise(
        "rms_norm_backward",
        op="rms_norm",
        rung="triton.fused",
        difficulty="hard",
        teaches="a fused backward: both gradients in one pass, column sums without atomics",
        formula="""\
normalized = x · rstd
grad_input  = rstd · (g − normalized · mean(g · normalized)),  g = grad · weight
grad_weight = Σ over rows of grad · normalized""",
        hints=(
            "Rows share the weight, so its gradient is a sum over rows. A program keeps its rows' share in registers.",
            "grad_weight += grad * normalized: the gradient of the output, without the weight.",
            "g = grad * weight; mean = tl.sum(g * normalized, axis=0) / n_cols.",
            "tl.store(partial_ptr + program * n_cols + columns, grad_weight, mask=mask); the host sums the rows.",
            "partial.sum(0).to(weight.dtype): deterministic, where atomic additions would not be.",
        ),
        asks=_weighted,
        timed="16384x4096",
        mistakes=(
            Mistake("The term with the mean is missing: x is in rstd too.", _rms_gradients(no_mean=True)),
            Mistake("g is grad · weight: the weight is missing from grad_input.", _rms_gradients(unweighted=True)),
            Mistake(_OF_BLOCK, _rms_gradients(of_block=True)),
            Mistake("The factor rstd of grad_input is missing.", _rms_gradients(no_rstd=True)),
            Mistake("grad_weight sums grad · normalized, not grad · x.", _rms_gradients(of_x=True)),
            Mistake(
                "grad_weight has the share of one program only: sum the rows of `partial`.",
                _rms_gradients(one_program=True),
            ),
        ),
        backward=True,
    ),
)
