"""Cross-entropy of a linear layer's output: the loss of a language model from its last hidden states.

loss = cross_entropy(input · weightᵀ, target). The logits are larger than all else of the call: 128,256 for a row of
4,096. Kernels that make them a chunk of rows at a time never have them whole in memory.

The formula of the loss and its sources are in :mod:`torch_ref.cross_entropy`.
"""

import dataclasses
import math

import torch
import torch.nn.functional as F

from kernel_ladder.semantics.cross_entropy import check_labels, check_options
from kernel_ladder.semantics.norms import computation_dtype
from kernel_ladder.spec import TOGETHER, Case, ErrorCase, Spec, check_tensors
from kernel_ladder.table import register, register_spec
from torch_ref import cross_entropy, linear


def naive(
    input: torch.Tensor, linear_weight: torch.Tensor, target: torch.Tensor, *, wide_loss: bool = False, **options
) -> torch.Tensor:
    """The logits, rounded to the inputs' dtype, and the formula of their loss in float32 or wider."""
    logits = linear.naive(input, linear_weight).to(computation_dtype(input.dtype))
    return _rounded(cross_entropy.naive(logits, target, **options), input, wide_loss)


def builtin(
    input: torch.Tensor, linear_weight: torch.Tensor, target: torch.Tensor, *, wide_loss: bool = False, **options
) -> torch.Tensor:
    """PyTorch's product, its conversion of 16-bit logits to float32, and its loss: what models do."""
    logits = F.linear(input, linear_weight).to(computation_dtype(input.dtype))
    return _rounded(cross_entropy.builtin(logits, target, **options), input, wide_loss)


def running_sum(
    input: torch.Tensor, linear_weight: torch.Tensor, target: torch.Tensor, *, wide_loss: bool = False, **options
) -> torch.Tensor:
    """The formula over a product with one running sum per element. See :func:`torch_ref.matmul.running_sum`."""
    logits = linear.running_sum(input, linear_weight, None).to(computation_dtype(input.dtype))
    return _rounded(cross_entropy.naive(logits, target, **options), input, wide_loss)


def _rounded(loss: torch.Tensor, input: torch.Tensor, wide_loss: bool) -> torch.Tensor:
    return loss if wide_loss else loss.to(input.dtype)


def check(
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    wide_loss: bool,
) -> None:
    op = "linear_cross_entropy"
    check_tensors(op, input=input, linear_weight=linear_weight)
    check_options(op, ignore_index, reduction, label_smoothing, z_loss, wide_loss, " or None")
    if input.dim() not in (1, 2):
        raise ValueError(f"{op}: argument `input` must be (K,) or (N, K), got shape {tuple(input.shape)}; flatten rows")
    if linear_weight.dim() != 2 or linear_weight.shape[1] != input.shape[-1]:
        raise ValueError(
            f"{op}: argument `linear_weight` must be (C, K) with the {input.shape[-1]} features of `input`, "
            f"got shape {tuple(linear_weight.shape)}"
        )
    classes = linear_weight.shape[0]
    if classes == 0:
        raise ValueError(f"{op}: argument `linear_weight` must have at least one class, got (0, {input.shape[-1]})")
    check_labels(op, input, target, tuple(input.shape[:-1]), classes, ignore_index)


def _case(
    id: str,
    input: tuple[int, ...],
    classes: int,
    labels: str = "classes",
    layout: str | tuple[str, ...] = "contiguous",
    values: str = "normal",
    quick: bool = False,
    **options: object,
) -> Case:
    given = {"ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0, "z_loss": 0.0, "wide_loss": False}
    shapes = (input, (classes, input[-1]), input[:-1])
    return Case(id, shapes, {**given, **options}, layout=layout, values=values, kinds={2: f"{labels}@1"}, quick=quick)


SAMPLES = [
    _case("vector", (7,), 5),
    _case("no-rows", (0, 8), 5),
    _case("no-features", (3, 0), 5),
    _case("mean", (45, 40), 67, "some_classes"),
    _case("none", (45, 24), 33, reduction="none"),
    _case("sum", (19, 65), 129, reduction="sum", z_loss=1e-2),
    _case("smoothed", (33, 16), 50, "some_classes", label_smoothing=0.1, wide_loss=True),
    _case("all-ignored", (5, 16), 50, "no_classes", layout="sliced"),
    _case("transposed", (37, 53), 41, layout="transposed", reduction="none"),
    _case("strided", (17, 24), 40, layout=("strided", "contiguous", "contiguous")),
    _case("nan", (9, 16), 30, values="nan", reduction="none"),
]


_X, _W, _Y = torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(3, dtype=torch.int64)

_bad = ErrorCase.of
ERRORS = [
    _bad("not-a-tensor", TypeError, r"`linear_weight` must be a torch\.Tensor, got list", _X, [1.0], _Y),
    _bad("dtypes", TypeError, "`input` and `linear_weight` must have the same dtype", _X, _W.half(), _Y),
    _bad("dims", ValueError, r"`input` must be \(K,\) or \(N, K\), got shape \(1, 3, 4\); flatten", _X[None], _W, _Y),
    _bad("features", ValueError, r"with the 4 features of `input`, got shape \(5, 3\)", _X, _W[:, :3], _Y),
    _bad("weight-dims", ValueError, r"`linear_weight` must be \(C, K\)", _X, _W[None], _Y),
    _bad("no-classes", ValueError, r"at least one class, got \(0, 4\)", _X, _W[:0], _Y),
    _bad("rows", ValueError, r"`target` must have shape \(3,\), .* got \(2,\)", _X, _W, _Y[:2]),
    _bad("probabilities", TypeError, "`target` has dtype float32; accepted is int64", _X, _W, torch.zeros(3)),
    _bad("class", IndexError, "classes from 0 to 4, or -100 in rows to ignore, got 5", _X, _W, _Y + 5),
    _bad("ignore-type", TypeError, "`ignore_index` must be an int or None", _X, _W, _Y, ignore_index=1.0),
    _bad("reduction", ValueError, "`reduction` must be 'none' or", _X, _W, _Y, reduction="max"),
    _bad("smoothing", ValueError, "from 0 to 1, got -0.5", _X, _W, _Y, label_smoothing=-0.5),
    _bad("wide", TypeError, "`wide_loss` must be a bool, got int", _X, _W, _Y, wide_loss=1),
    _bad("bias", ValueError, "`linear_bias` must be None, got Tensor", _X, _W, _Y, linear_bias=torch.zeros(5)),
]


def _sweep() -> list[Case]:
    shapes = [(8192, 4096, 32000), (4096, 4096, 128256), (8192, 2048, 50257)]
    found = [_case(f"{n}x{k} C{c}", (n, k), c, quick=c == 32000) for n, k, c in shapes]
    # Rungs that compute gradients in the forward pass leave nothing to time in the backward pass alone.
    both = [dataclasses.replace(x, id=f"{x.id} {TOGETHER}", passes=("backward",), together=True) for x in found]
    return [*(dataclasses.replace(case, passes=("forward",)) for case in found), *both]


def _sizes(case: Case) -> tuple[int, int, int]:
    """Rows, features and classes."""
    (*rows, features), (classes, _) = case.shapes[0] or (0,), case.shapes[1] or (0, 0)
    return math.prod(rows), features, classes


def _bytes(case: Case, itemsize: int, backward: bool) -> int:
    # Forward reads input and weight; backward also writes their gradients. No logits need to move.
    rows, features, classes = _sizes(case)
    return (rows + classes) * features * itemsize * (2 if backward else 1) + 8 * rows


def _flops(case: Case, backward: bool) -> int:
    # The products: logits forward, and two gradients backward.
    products = 2 + case.together if backward else 1
    return 2 * math.prod(_sizes(case)) * products


SPEC = register_spec(
    Spec(
        name="linear_cross_entropy",
        reference=naive,
        builtin=builtin,
        check=check,
        samples=SAMPLES,
        errors=ERRORS,
        sweep=_sweep(),
        bytes=_bytes,
        flops=_flops,
        yardstick=running_sum,
    )
)

register("linear_cross_entropy", "torch.naive", forward=lambda *inputs, **options: (naive(*inputs, **options), ()))
register("linear_cross_entropy", "torch.builtin", forward=lambda *inputs, **options: (builtin(*inputs, **options), ()))
