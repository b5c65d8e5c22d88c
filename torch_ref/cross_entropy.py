"""Cross-entropy of logits and labels: the negative log-probability that softmax gives to each row's label.

lossᵢ = (1 − s) · (lse − x_y) + s / C · Σⱼ (lse − xⱼ) + z · lse²,   lse = log Σⱼ exp(xⱼ)

y is the label of row i, s the label smoothing over C classes (Szegedy et al., arXiv:1512.00567). z is the factor of the
z-loss, which keeps lse near zero (Chowdhery et al., PaLM, arXiv:2204.02311).
"""

import math

import torch
import torch.nn.functional as F

from kernel_ladder.semantics.cross_entropy import check_labels, check_options, class_dim, rows_of
from kernel_ladder.semantics.norms import computation_dtype, on_cpu_in_16_bits
from kernel_ladder.spec import Case, ErrorCase, Spec, check_tensors
from kernel_ladder.table import register, register_spec


def _reduced(loss: torch.Tensor, kept: torch.Tensor, reduction: str) -> torch.Tensor:
    if reduction == "none":
        return loss
    return loss.sum() / kept.sum() if reduction == "mean" else loss.sum()


def naive(
    input: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    wide_loss: bool = False,
) -> torch.Tensor:
    """The formula in float32 or wider, one kernel per operator. Rows whose label is no class are not read."""
    x = rows_of(input).to(computation_dtype(input.dtype))
    kept, is_class = target != ignore_index, (target >= 0) & (target < x.shape[-1])
    counts = kept & is_class
    x, label = x.where(counts.unsqueeze(-1), 0.0), target.where(counts, 0)
    row_max = x.amax(-1, keepdim=True).detach()
    shifted = x - row_max
    log_sum = shifted.exp().sum(-1, keepdim=True).log()
    loss = (1 - label_smoothing) * (log_sum - shifted.gather(-1, label.unsqueeze(-1))).squeeze(-1)
    if label_smoothing:
        loss = loss + label_smoothing * (log_sum - shifted).mean(-1)
    if z_loss:
        loss = loss + z_loss * (log_sum + row_max).squeeze(-1).square()
    loss = loss.where(is_class, math.nan).where(kept, 0.0)
    loss = _reduced(loss, kept, reduction)
    return loss if wide_loss else loss.to(input.dtype)


def builtin(
    input: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    wide_loss: bool = False,
) -> torch.Tensor:
    """PyTorch's two kernels, and its logsumexp for the z-loss. On a GPU a label that is no class stops the process."""
    options = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing}
    wide = computation_dtype(input.dtype)
    no_room = input.dtype is torch.float16 and (
        label_smoothing or (reduction == "mean" and target.numel() > torch.finfo(torch.float16).max)
    )
    if on_cpu_in_16_bits(input) or no_room or (wide_loss and input.dtype != wide):
        # PyTorch adds up smoothed rows in the input's dtype, on a CPU exponentials and losses too. A mean's gradient is
        # divided by the number of rows in that dtype. float16 has no room.
        loss = builtin(input.to(wide), target, **options, z_loss=z_loss)
        return loss if wide_loss else loss.to(input.dtype)
    loss = F.cross_entropy(input, target, **options)
    if not z_loss:
        return loss
    kept = target != ignore_index
    square = input.to(wide).logsumexp(class_dim(input)).square().where(kept, 0.0)
    return (loss.to(wide) + z_loss * _reduced(square, kept, reduction)).to(input.dtype)


def check(
    input: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    wide_loss: bool = False,
) -> None:
    op = "cross_entropy"
    check_tensors(op, input=input)
    check_options(op, ignore_index, reduction, label_smoothing, z_loss, wide_loss)
    if input.dim() == 0:
        raise ValueError(f"{op}: argument `input` must have a dimension of classes, got none")
    classes = input.shape[class_dim(input)]
    if classes == 0:
        raise ValueError(f"{op}: argument `input` must have at least one class, got shape {tuple(input.shape)}")
    rows = (*input.shape[:1], *input.shape[2:]) if input.dim() > 1 else ()
    check_labels(op, input, target, rows, classes, ignore_index)


def _case(
    id: str,
    shape: tuple[int, ...],
    labels: str = "classes",
    layout: str = "contiguous",
    values: str = "normal",
    quick: bool = False,
    **options: object,
) -> Case:
    given = {"ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0, "z_loss": 0.0, **options}
    rows = (*shape[:1], *shape[2:]) if len(shape) > 1 else ()
    return Case(id, (shape, rows), given, layout=layout, values=values, kinds={1: labels}, quick=quick)


SAMPLES = [
    _case("vector", (7,)),
    _case("no-rows", (0, 5)),
    _case("one-class", (5, 1), reduction="none"),
    _case("mean", (9, 1000), "some_classes"),
    _case("none", (45, 211), reduction="none"),
    _case("ignored-class", (33, 5), ignore_index=3),
    _case("all-ignored", (5, 50), "no_classes", layout="sliced"),
    _case("smoothed", (17, 257), "some_classes", label_smoothing=0.1),
    _case("only-smoothed", (5, 37), reduction="none", label_smoothing=1.0),
    _case("z-loss", (17, 257), "some_classes", reduction="sum", z_loss=1e-2),
    _case("all-options", (17, 130), "some_classes", label_smoothing=0.2, z_loss=1e-2, ignore_index=7),
    _case("images", (2, 11, 3, 5), "some_classes", reduction="none", label_smoothing=0.1),
    _case("transposed", (37, 53), layout="transposed"),
    _case("large", (9, 130), values="large", reduction="none"),
    _case("offset", (9, 130), values="offset", reduction="none", label_smoothing=0.1),
    _case("neg-inf-rows", (6, 200), values="neg_inf_rows", reduction="none"),
    _case("nan", (9, 50), values="nan", reduction="none"),
    _case("inf", (9, 50), values="inf", reduction="none"),
    _case("long", (2, 65537), label_smoothing=0.1, z_loss=1e-4),
    _case("quarter-million", (1, 256_000), reduction="none"),
    _case("wide", (33, 50), "some_classes", wide_loss=True),
    _case("wide-rows", (33, 50), "some_classes", reduction="none", wide_loss=True),
]


_X, _Y = torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64)

_bad = ErrorCase.of
ERRORS = [
    _bad("not-a-tensor", TypeError, r"`input` must be a torch\.Tensor, got list", [1.0], _Y),
    _bad("integers", TypeError, "`input` has dtype int64; accepted are float16", _X.long(), _Y),
    _bad("no-target", TypeError, r"`target` must be a torch\.Tensor, got NoneType", _X, None),
    _bad("probabilities", TypeError, "`target` has dtype float32; accepted is int64; probabilities", _X, _X),
    _bad("int32", TypeError, "`target` has dtype int32; accepted is int64", _X, _Y.int()),
    _bad("scalar", ValueError, "`input` must have a dimension of classes", torch.zeros(()), torch.tensor(0)),
    _bad("no-classes", ValueError, r"at least one class, got shape \(3, 0\)", torch.zeros(3, 0), _Y),
    _bad("rows", ValueError, r"`target` must have shape \(3,\), .* got \(2,\)", _X, _Y[:2]),
    _bad("images", ValueError, r"shape \(2, 5\), .* got \(2, 3\)", torch.zeros(2, 3, 5), torch.zeros(2, 3).long()),
    _bad("class-high", IndexError, "classes from 0 to 3, or -100 in rows to ignore, got 4", _X, _Y + 4),
    _bad("class-low", IndexError, "or 7 in rows to ignore, got -1", _X, _Y - 1, ignore_index=7),
    _bad("ignore-type", TypeError, "`ignore_index` must be an int, got float", _X, _Y, ignore_index=1.0),
    _bad("reduction", ValueError, "`reduction` must be 'none' or 'mean' or 'sum', got 'max'", _X, _Y, reduction="max"),
    _bad("smoothing", ValueError, "from 0 to 1, got 1.5", _X, _Y, label_smoothing=1.5),
    _bad("smoothing-type", TypeError, "must be a number, got str", _X, _Y, label_smoothing="0"),
    _bad("z-loss", ValueError, "`z_loss` must be at least 0 and finite, got -1", _X, _Y, z_loss=-1.0),
    _bad("wide", TypeError, "`wide_loss` must be a bool, got int", _X, _Y, wide_loss=1),
    _bad("z-loss-nan", ValueError, "`z_loss` must be at least 0 and finite, got nan", _X, _Y, z_loss=math.nan),
]


def _sweep() -> list[Case]:
    shapes = [(16384, 1000), (8192, 32000), (4096, 50257), (4096, 128256), (2048, 256000)]
    found = [_case(f"{n}x{c}", (n, c), quick=c in (32000, 128256)) for n, c in shapes]
    return [*found, _case("8192x32000 smoothed, z-loss", (8192, 32000), label_smoothing=0.1, z_loss=1e-4)]


def _bytes(case: Case, itemsize: int, backward: bool) -> int:
    # Forward reads the logits; backward reads them and writes their gradient. Labels are 8 bytes a row.
    return math.prod(case.shapes[0] or ()) * itemsize * (2 if backward else 1) + 8 * math.prod(case.shapes[1] or ())


def _flops(case: Case, backward: bool) -> int:
    # Counts the exponential as one. Forward: maximum, shift, exponential, sum. Backward: shift, exponential, 2 ·.
    return 4 * math.prod(case.shapes[0] or ())


SPEC = register_spec(
    Spec(
        name="cross_entropy",
        reference=naive,
        builtin=builtin,
        check=check,
        samples=SAMPLES,
        errors=ERRORS,
        sweep=_sweep(),
        bytes=_bytes,
        flops=_flops,
    )
)

register("cross_entropy", "torch.naive", forward=lambda *inputs, **options: (naive(*inputs, **options), ()))
register("cross_entropy", "torch.builtin", forward=lambda *inputs, **options: (builtin(*inputs, **options), ()))
