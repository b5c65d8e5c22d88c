"""Exercises without a reduction: add, gelu, swiglu, dropout."""

from __future__ import annotations

from typing import Any

import torch

from kernel_ladder.exercises.exercise import Exercise, Mistake
from kernel_ladder.semantics import philox
from kernel_ladder.spec import Case


def _gelu(x: torch.Tensor, approximate: str) -> torch.Tensor:
    return torch.nn.functional.gelu(x.float(), approximate=approximate).to(x.dtype)


def _gelu_without_cube(input: torch.Tensor, *, approximate: str) -> torch.Tensor:
    x = input.float()
    return (x * torch.sigmoid(2 * 0.7978845608028654 * x)).to(input.dtype)


def _gelu_of_u(input: torch.Tensor, *, approximate: str) -> torch.Tensor:
    x = input.float()
    return (x * torch.sigmoid(0.7978845608028654 * (x + 0.044715 * x**3))).to(input.dtype)


def _dropped(x: torch.Tensor, p: float, seed: int, scale: float) -> torch.Tensor:
    kept = (philox.words(x.numel(), seed, x.device) >= philox.threshold(p)).view(x.shape)
    return x * kept * scale


def _dropout_unscaled(input: torch.Tensor, grad: torch.Tensor, *, p: float, seed: int) -> dict[str, Any]:
    return {"output": _dropped(input, p, seed, 1.0), "grad 0": _dropped(grad, p, seed, 1.0)}


def _dropout_of_the_dropped(input: torch.Tensor, grad: torch.Tensor, *, p: float, seed: int) -> dict[str, Any]:
    def dropped(x: torch.Tensor) -> torch.Tensor:
        return x * philox.scale(p) - _dropped(x, p, seed, philox.scale(p))

    return {"output": dropped(input), "grad 0": dropped(grad)}


def _dropout_of_one_program(input: torch.Tensor, grad: torch.Tensor, *, p: float, seed: int) -> dict[str, Any]:
    def dropped(x: torch.Tensor) -> torch.Tensor:
        words = philox.words(1024, seed, x.device).repeat(-(-x.numel() // 1024))[: x.numel()]
        return x * (words >= philox.threshold(p)).view(x.shape) * philox.scale(p)

    return {"output": dropped(input), "grad 0": dropped(grad)}


def _gradient_without_mask(input: torch.Tensor, grad: torch.Tensor, *, p: float, seed: int) -> dict[str, Any]:
    return {"grad 0": grad.clone()}


def _of_one_shape(case: Case) -> bool:
    return case.shapes[0] == case.shapes[1]


EXERCISES = (
    Exercise(
        "add",
        op="add",
        rung="triton.fused",
        difficulty="easy",
        teaches="a program's indices, the mask of the last program, the grid",
        formula="output[i] = input[i] + other[i]",
        hints=(
            "A program is one instance of the kernel; tl.program_id(0) is its number. It works on a block of BLOCK "
            "elements at once: tl.arange(0, BLOCK) is the block [0, 1, …, BLOCK-1].",
            "i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK). The int64 matters from 2³¹ elements on.",
            "A pointer plus a block of indices is a block of pointers: x = tl.load(input_ptr + i, mask=i < numel). "
            "Convert it with .to(tl.float32): the sum is rounded once, at the store.",
            "The grid is triton.cdiv(numel, BLOCK) programs: the quotient, rounded up, or the tail is never written.",
        ),
        asks=_of_one_shape,
        timed="16384x4096",
        mistakes=(
            Mistake("The second operand is missing from the result.", lambda input, other: input.clone()),
            Mistake("The operands are multiplied, not added.", lambda input, other: input * other),
            Mistake("The second operand is subtracted.", lambda input, other: input - other),
        ),
    ),
    Exercise(
        "gelu",
        op="gelu",
        rung="triton.fused",
        difficulty="easy",
        teaches="one kernel in place of the ten of torch_ref/gelu.py: one read, one write",
        formula="gelu(x) = 0.5 · x · (1 + tanh(√(2/π) · (x + 0.044715 · x³)))",
        hints=(
            "With u = √(2/π) · (x + 0.044715 · x³), the factor 0.5 · (1 + tanh(u)) is sigmoid(2u).",
            "tl.sigmoid(x) is 1 / (1 + exp(-x)). It takes float32: convert with .to(tl.float32) after the load.",
            "y = x * tl.sigmoid(2 * u); tl.store(out_ptr + i, y.to(out_ptr.dtype.element_ty), mask=mask).",
        ),
        asks=lambda case: case.options["approximate"] == "tanh",
        timed="16384x4096 tanh",
        mistakes=(
            Mistake("This is sigmoid(u), not sigmoid(2u): 0.5 · (1 + tanh(u)) has the factor two inside.", _gelu_of_u),
            Mistake("The cubic term, 0.044715 · x³, is missing.", _gelu_without_cube),
            Mistake(
                "This is the exact form, with erf. The exercise asks for the tanh form.",
                lambda input, *, approximate: _gelu(input, "none"),
            ),
            Mistake(
                "Half of the sum is missing: the result is twice what is expected.",
                lambda input, *, approximate: 2 * _gelu(input, "tanh"),
            ),
        ),
    ),
    Exercise(
        "swiglu",
        op="swiglu",
        rung="triton.fused",
        difficulty="easy",
        teaches="fusion: three operators, three transfers instead of eight",
        formula="output[i] = silu(gate[i]) · up[i],  silu(x) = x · sigmoid(x)",
        hints=(
            "PyTorch's formula writes sigmoid(gate) and silu(gate) to memory and reads them again. Here, keep them.",
            "Load gate and up with the same indices and mask, convert both to float32.",
            "y = gate * tl.sigmoid(gate) * up, then round once: y.to(out_ptr.dtype.element_ty).",
        ),
        asks=lambda case: True,
        timed="16384x4096",
        mistakes=(
            Mistake("gate and up are swapped: silu is of gate.", lambda gate, up: torch.nn.functional.silu(up) * gate),
            Mistake("silu(x) is x · sigmoid(x): the product with gate is missing.", lambda g, u: torch.sigmoid(g) * u),
            Mistake("The product with up is missing.", lambda gate, up: torch.nn.functional.silu(gate)),
        ),
    ),
    Exercise(
        "dropout",
        op="dropout",
        rung="triton.fused",
        difficulty="medium",
        teaches="counter-based random numbers: a mask that is drawn again, never stored",
        formula="""\
keep[i]   = word(seed, i) >= floor(p · 2³²)
output[i] = input[i] · keep[i] / (1 − p)
gradient of input[i] = grad[i] · keep[i] / (1 − p), with the same mask""",
        hints=(
            "random_word(i, seed) gives a block of 32-bit words, one per index. i is the element's index in the whole "
            "tensor, not in this program's block.",
            "keep = random_word(i, seed).to(tl.int64) >= threshold: the threshold may be larger than an int32.",
            "y = x * tl.where(keep, scale, 0.0). The scale 1 / (1 − p) keeps the mean of the output.",
            "Backward: (launch(grad.contiguous(), p, seed),). Nothing but p and seed was saved.",
        ),
        asks=lambda case: case.options["seed"] < 2**62,
        timed="16384x4096",
        mistakes=(
            Mistake("The factor 1 / (1 − p) is missing.", _dropout_unscaled),
            Mistake("The mask is inverted: it keeps what should be dropped.", _dropout_of_the_dropped),
            Mistake(
                "Every program draws the mask of the first: use the element's index in the whole tensor.",
                _dropout_of_one_program,
            ),
            Mistake("The gradient is passed on as it is: drop it with the same mask.", _gradient_without_mask),
        ),
        backward=True,
    ),
)
