"""The end of a post-norm transformer block: bias, dropout, residual sum and LayerNorm.

sum = residual + dropout(input + bias)
bias_dropout_add_layer_norm(input, bias, residual) = layer_norm(sum) · weight + norm_bias

LayerNorm runs over the last dimension; the dropout mask is that of :mod:`kernel_ladder.semantics.philox`. The formulas
of dropout and LayerNorm, with their sources, are in :mod:`torch_ref.dropout` and :mod:`torch_ref.layer_norm`.
"""

import math

import torch

from kernel_ladder.semantics import philox
from kernel_ladder.semantics.norms import check_eps, computation_dtype
from kernel_ladder.spec import Case, ErrorCase, Spec, check_tensors
from kernel_ladder.table import register, register_spec
from torch_ref import dropout, layer_norm
from torch_ref.norm_samples import cases, sweep


def naive(
    input: torch.Tensor,
    bias: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
    *,
    p: float = 0.5,
    seed: int | torch.Tensor,
    eps: float = 1e-5,
) -> torch.Tensor:
    """The formula in float32 or wider, one kernel per operator: every intermediate goes to memory."""
    wide = computation_dtype(input.dtype)
    branch = dropout.naive(input.to(wide) + bias.to(wide), p=p, seed=seed)
    total = residual.to(wide) + branch
    output = layer_norm.naive(total, weight, norm_bias, normalized_shape=tuple(total.shape[-1:]), eps=eps)
    return output.to(input.dtype)


def check(
    input: torch.Tensor,
    bias: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    *,
    p: float,
    seed: int,
    eps: float,
) -> None:
    op = "bias_dropout_add_layer_norm"
    rows = {"bias": bias, "weight": weight, "norm_bias": norm_bias}
    given = {name: x for name, x in rows.items() if x is not None or name == "bias"}
    check_tensors(op, optional=("weight", "norm_bias"), input=input, residual=residual, **given)
    if input.dim() == 0:
        raise ValueError(f"{op}: argument `input` must have at least one dimension, got a scalar")
    if residual.shape != input.shape:
        raise ValueError(
            f"{op}: argument `residual` must have the shape {tuple(input.shape)} of `input`, "
            f"got {tuple(residual.shape)}"
        )
    for name, x in given.items():
        if x.shape != input.shape[-1:]:
            raise ValueError(
                f"{op}: argument `{name}` must have the shape {tuple(input.shape[-1:])} of a row, got {tuple(x.shape)}"
            )
    philox.check(op, p, seed)
    check_eps(op, eps, False)


def _shapes(shape: tuple[int, ...], dims: int) -> tuple[tuple[int, ...], ...]:
    row = shape[-dims:]
    return shape, row, shape, row, row


def _options(row: tuple[int, ...]) -> dict:
    return {"p": 0.1, "seed": 42, "eps": 1e-5}


def _case(id: str, shape: tuple[int, ...], p: float = 0.5, seed: int = 0, eps: float = 1e-5, **more: str) -> Case:
    return Case(id, _shapes(shape, 1), {"p": p, "seed": seed, "eps": eps}, **more)


#: Samples of the normalisations at which the sum or the mask might go wrong.
ROWS = (
    "one", "empty-rows", "no-rows", "column", "short", "prime", "tile+1", "vector-multiple", "wide", "4d", "transposed",
    "sliced", "expanded", "large", "offset", "nan", "medium", "long", "two-clusters",
)  # fmt: skip

SAMPLES = [
    *(case for case in cases(_shapes, _options) if case.id in ROWS),
    _case("halves", (9, 136), layout="halves"),
    _case("keep-all", (17, 100), 0.0, 8),
    _case("drop-most", (17, 1000), 0.9, 2**31),
    _case("large-seed", (17, 100), 0.2, 2**63 - 1),
    _case("eps", (17, 64), eps=0.5),
    Case("no-weight", ((17, 129), (129,), (17, 129), None, (129,)), _options((129,))),
    Case("no-norm-bias", ((17, 136), (136,), (17, 136), (136,), None), _options((136,))),
    Case("bare", ((3, 16400), (16400,), (3, 16400), None, None), _options((16400,))),
    _case("eps-integer", (17, 64), eps=2**70),
]


def _bad(
    id: str, error: type[Exception], message: str, *shapes: tuple[int, ...] | None, **options: object
) -> ErrorCase:
    def arguments() -> tuple[tuple, dict]:
        tensors = tuple(None if shape is None else torch.zeros(shape) for shape in shapes or ((2, 3), (3,), (2, 3)))
        return tensors, {"seed": 0, **options}

    return ErrorCase(id, arguments, error, message)


ERRORS = [
    ErrorCase(
        "integer", lambda: ((torch.arange(3),) * 3, {"seed": 0}), TypeError, r"`input` has dtype int64; accepted are"
    ),
    ErrorCase(
        "residual-dtype",
        lambda: ((torch.zeros(2), torch.zeros(2), torch.zeros(2).half()), {"seed": 0}),
        TypeError,
        r"`input` and `residual` must have the same dtype, got float32 and float16",
    ),
    _bad("no-bias", TypeError, r"`bias` must be a torch\.Tensor, got NoneType", (2, 3), None, (2, 3)),
    _bad("scalar", ValueError, r"`input` must have at least one dimension", (), (1,), ()),
    _bad("residual", ValueError, r"`residual` must have the shape \(2, 3\) of `input`, got \(3,\)", (2, 3), (3,), (3,)),
    _bad("bias", ValueError, r"`bias` must have the shape \(3,\) of a row, got \(2,\)", (2, 3), (2,), (2, 3)),
    _bad("weight", ValueError, r"`weight` must have the shape \(3,\)", (2, 3), (3,), (2, 3), (2, 3)),
    _bad("norm-bias", ValueError, r"`norm_bias` must have the shape \(3,\)", (2, 3), (3,), (2, 3), None, (1,)),
    _bad("p", ValueError, "`p` must be at least 0 and less than 1, got 1", p=1.0),
    _bad("seed", ValueError, r"`seed` must be from 0 to 2\^63 - 1, got -1", seed=-1),
    _bad("eps", ValueError, "`eps` must be finite, got inf", eps=math.inf),
    _bad("eps-none", TypeError, "`eps` must be a number, got NoneType", eps=None),
]


def _bytes(case: Case, itemsize: int, backward: bool) -> int:
    # Forward reads input, residual and three rows and writes the output. Backward reads input, residual, gradient and
    # two rows, and writes the gradients of input, residual and three rows.
    numel, row = math.prod(case.shapes[0]), math.prod(case.shapes[1])
    return itemsize * (5 * numel + 5 * row if backward else 3 * numel + 3 * row)


def _flops(case: Case, backward: bool) -> int:
    # Those of layer_norm, plus bias, scale and sum. Philox is integer arithmetic.
    return math.prod(case.shapes[0]) * (15 if backward else 10)


SPEC = register_spec(
    Spec(
        name="bias_dropout_add_layer_norm",
        reference=naive,
        builtin=None,  # PyTorch's own dropout draws another mask
        check=check,
        samples=SAMPLES,
        errors=ERRORS,
        sweep=sweep(_shapes, _options),
        bytes=_bytes,
        flops=_flops,
    )
)

register(
    "bias_dropout_add_layer_norm", "torch.naive", forward=lambda *inputs, **options: (naive(*inputs, **options), ())
)
