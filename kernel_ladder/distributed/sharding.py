"""Sharding rules: which dimensions of a call's tensors may be split over GPUs, and what that leaves of its outputs.

A rule names dimensions, as an einsum does. Equal names are split together: a matmul is ``m k, k n -> m n``. A name that
no output has is summed over, so each GPU's output is one summand (``Partial``). A dimension without a name stays whole.
An input that lacks the name being split is needed whole on every GPU, and its gradient there is one summand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from kernel_ladder.semantics.masks import NO_WINDOW
from kernel_ladder.spec import Inputs, Options

#: The name of a dimension; None for one that stays whole.
Name = str | None
Names = tuple[Name, ...]


class Rule(NamedTuple):
    """The dimensions of a call's inputs and outputs, by name."""

    inputs: tuple[Names | None, ...]
    outputs: tuple[Names, ...]
    #: What a number of shards must divide, by name. Others may be split unevenly.
    divisible: Mapping[str, int] = {}

    def names(self) -> tuple[str, ...]:
        """Every name, in the order of the inputs."""
        found: list[str] = []
        for dims in (*self.inputs, *self.outputs):
            for name in dims or ():
                if name is not None and name not in found:
                    found.append(name)
        return tuple(found)


def _numbered(count: int, first: int = 0) -> tuple[str, ...]:
    return tuple([f"dim{i}" for i in range(first, first + count)])


def _broadcast(inputs: Inputs, dims: Names) -> tuple[Names | None, ...]:
    """Names of inputs that broadcast to `dims`, aligned to the last. A dimension of size 1 is repeated, not split."""
    found: list[Names | None] = []
    for x in inputs:
        if x is None:
            found.append(None)
            continue
        own = dims[len(dims) - x.dim() :]
        found.append(tuple([name if size != 1 else None for name, size in zip(own, x.shape, strict=True)]))
    return tuple(found)


def _elementwise(*inputs: Tensor, **options: Any) -> Rule:
    dims = _numbered(max([x.dim() for x in inputs]))
    named = _broadcast(inputs, dims)
    split = [name for names in named for name in names or ()]
    return Rule(named, (tuple([name if name in split else None for name in dims]),))


def _softmax(input: Tensor, *, dim: int) -> Rule:
    count = input.dim()
    dims = tuple([None if i == dim % count else name for i, name in enumerate(_numbered(count))])
    return Rule((dims,), (dims,))


def _rows(rows: int, dims: int) -> Names:
    """Names of a tensor whose first `rows` dimensions count rows, each of which stays whole."""
    return (*_numbered(rows), *((None,) * (dims - rows)))


def _norm(input: Tensor, *parameters: Tensor | None, normalized_shape: tuple[int, ...], eps: float) -> Rule:
    dims = _rows(input.dim() - len(normalized_shape), input.dim())
    whole = (None,) * len(normalized_shape)
    return Rule((dims, *[None if x is None else whole for x in parameters]), (dims,))


def _add_norm(input: Tensor, residual: Tensor, weight: Tensor | None, *, eps: float) -> Rule:
    dims = _rows(input.dim() - 1, input.dim())
    return Rule((dims, dims, None if weight is None else (None,)), (dims, dims))


def _sum(input: Tensor, *, dim: Any, keepdim: bool) -> Rule:
    count = input.dim()
    over = (dim,) if isinstance(dim, int) else dim or range(count)  # None or () is all
    summed = [d % count for d in over] if count else []
    names = _numbered(count)
    kept = [None if i in summed else name for i, name in enumerate(names) if keepdim or i not in summed]
    return Rule((names,), (tuple(kept),))


def _matmul(input: Tensor, other: Tensor) -> Rule:
    of_input = ("m", "k") if input.dim() > 1 else ("k",)
    of_other = ("k", "n") if other.dim() > 1 else ("k",)
    batch = _numbered(max(input.dim() - 2, other.dim() - 2, 0))
    named = []
    for x, last in ((input, of_input), (other, of_other)):
        own = batch[len(batch) - max(x.dim() - 2, 0) :]
        named.append((*[None if size == 1 else name for name, size in zip(own, x.shape, strict=False)], *last))
    return Rule(tuple(named), ((*batch, *of_input[:-1], *of_other[1:]),))


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None, *, activation: str | None) -> Rule:
    rows = _numbered(input.dim() - 1)
    return Rule(((*rows, "k"), ("n", "k"), None if bias is None else ("n",)), ((*rows, "n"),))


def _linear_float8(
    input: Tensor, weight: Tensor, input_scale: Tensor, weight_scale: Tensor, bias: Tensor | None, **options: Any
) -> Rule:
    # A partial sum would be rounded to the output's dtype on every GPU, so that k stays whole.
    rows = _numbered(input.dim() - 1)
    scales = ((*rows, None) if input_scale.dim() else (), ("n", None) if weight_scale.dim() else ())
    return Rule(((*rows, None), ("n", None), *scales, None if bias is None else ("n",)), ((*rows, "n"),))


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *masks: Tensor,
    is_causal: Any,
    window_size: Any = NO_WINDOW,
    **options: Any,
) -> Rule:
    if "dropout_p" in options:  # a weight's random number depends on its position among all
        whole = _whole(query, key, value, *masks)
        return Rule(whole.inputs, (*whole.outputs, (None,) * (query.dim() - 1))[: 1 + bool(options["return_lse"])])
    batch = _numbered(max(query.dim(), key.dim(), value.dim()) - 3)
    # Positions decide what a causal or banded query sees, so its sequence stays whole.
    rows = "query" if is_causal is False and tuple(window_size) == NO_WINDOW else None

    def of(x: Tensor, row: Name) -> Names:
        own = batch[len(batch) - max(x.dim() - 3, 0) :]
        split: Names = tuple([None if size == 1 else name for name, size in zip(own, x.shape, strict=False)])
        return (*split, "heads", row, None) if x.dim() > 2 else (row, None)

    of_query = of(query, rows)
    own = ("heads",) if query.dim() > 2 else ()
    scores = (*batch, *own, rows, None)
    inputs = (of_query, of(key, None), of(value, None), *_broadcast(masks, scores))
    outputs = [(*of_query[:-1], None)]
    if options.get("return_lse"):
        outputs.append(of_query[:-1])
    heads = {"heads": key.shape[-3]} if query.dim() > 2 else {}
    return Rule(inputs, tuple(outputs), heads)


def _attention_varlen(query: Tensor, key: Tensor, value: Tensor, *cu_seqlens: Tensor, **options: Any) -> Rule:
    packed = (None, "heads", None)
    outputs = (packed, (None, "heads")) if options.get("return_lse") else (packed,)
    whole = [None if x is None else (None,) * x.dim() for x in cu_seqlens]
    return Rule((packed, packed, packed, *whole), outputs, {"heads": key.shape[-2]})


def _attention_paged(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor, cache_seqlens: Tensor, **options: Any
) -> Rule:
    # Any sequence may have any page, so that caches are split by heads alone.
    of_query, cache = ("batch", "heads", None, None), (None, None, "heads", None)
    outputs = (of_query, of_query[:-1]) if options.get("return_lse") else (of_query,)
    inputs = (of_query, cache, cache, ("batch", None), ("batch",))
    return Rule(inputs, outputs, {"heads": key_cache.shape[-2]})


def _rope(input: Tensor, freqs_cis: Tensor, *offsets: Tensor | None, **options: Any) -> Rule:
    dims = (*_numbered(input.dim() - 2), None, None)  # positions decide the angles
    return Rule((dims, (None, None), *[None if x is None else dims[:1] for x in offsets]), (dims,))


def _cross_entropy(input: Tensor, target: Tensor, *, reduction: str, **options: Any) -> Rule:
    # Of split rows `dtensor.py` makes the mean: its divisor depends on every label.
    rows = _numbered(target.dim())
    logits = (*rows[:1], None, *rows[1:]) if input.dim() > 1 else (None,)
    return Rule((logits, rows), (rows if reduction == "none" else (),))


def _linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, reduction: str, **options: Any
) -> Rule:
    rows = _numbered(target.dim())
    return Rule(((*rows, None), (None, None), rows), (rows if reduction == "none" else (),))


def _whole(*inputs: Tensor | None, **options: Any) -> Rule:
    """Of random masks: an element's random number depends on its position in the whole tensor."""
    whole = tuple([None if x is None else (None,) * x.dim() for x in inputs])
    assert whole[0] is not None
    return Rule(whole, (whole[0],))


RULES: dict[str, Callable[..., Rule]] = {
    "add": _elementwise,
    "add_rms_norm": _add_norm,
    "attention": _attention,
    "attention_varlen": _attention_varlen,
    "attention_paged": _attention_paged,
    "bias_dropout_add_layer_norm": _whole,
    "bias_gelu": _elementwise,
    "cross_entropy": _cross_entropy,
    "dropout": _whole,
    "gelu": _elementwise,
    "layer_norm": _norm,
    "linear": _linear,
    "linear_cross_entropy": _linear_cross_entropy,
    "linear_float8": _linear_float8,
    "matmul": _matmul,
    "rms_norm": _norm,
    "rope": _rope,
    "softmax": _softmax,
    "sum": _sum,
    "swiglu": _elementwise,
}


def rule_of(op: str, inputs: Inputs, options: Options) -> Rule:
    """The rule of a call whose arguments the operation's check accepts."""
    return RULES[op](*inputs, **options)
