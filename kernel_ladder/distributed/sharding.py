"""Sharding rules: which dimensions of a call's tensors may be split over GPUs, and what that leaves of its outputs.

A rule names dimensions, as an einsum does. Equal names are split together: a matmul is ``m k, k n -> m n``. A name that
no output has is summed over, so each GPU's output is one summand (``Partial``). A dimension without a name stays whole.
An input that lacks the name being split is needed whole on every GPU, and its gradient there is one summand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

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


def _elementwise(*inputs, **options) -> Rule:
    dims = _numbered(max([x.dim() for x in inputs]))
    named = _broadcast(inputs, dims)
    split = [name for names in named for name in names or ()]
    return Rule(named, (tuple([name if name in split else None for name in dims]),))


def _softmax(input, *, dim) -> Rule:
    count = input.dim()
    dims = tuple([None if i == dim % count else name for i, name in enumerate(_numbered(count))])
    return Rule((dims,), (dims,))


def _rows(rows: int, dims: int) -> Names:
    """Names of a tensor whose first `rows` dimensions count rows, each of which stays whole."""
    return (*_numbered(rows), *((None,) * (dims - rows)))


def _norm(input, *parameters, normalized_shape, **options) -> Rule:
    dims = _rows(input.dim() - len(normalized_shape), input.dim())
    whole = (None,) * len(normalized_shape)
    return Rule((dims, *[None if x is None else whole for x in parameters]), (dims,))


def _add_norm(input, residual, weight, *, eps) -> Rule:
    dims = _rows(input.dim() - 1, input.dim())
    return Rule((dims, dims, None if weight is None else (None,)), (dims, dims))


def _sum(input, *, dim, keepdim) -> Rule:
    count = input.dim()
    over = (
        range(count)
        if dim is None or dim == () or count == 0
        else [d % count for d in ((dim,) if isinstance(dim, int) else dim)]
    )
    names = _numbered(count)
    kept = [None if i in over else name for i, name in enumerate(names) if keepdim or i not in over]
    return Rule((names,), (tuple(kept),))


def _matmul(input, other) -> Rule:
    of_input = ("m", "k") if input.dim() > 1 else ("k",)
    of_other = ("k", "n") if other.dim() > 1 else ("k",)
    batch = _numbered(max(input.dim() - 2, other.dim() - 2, 0))
    named = []
    for x, last in ((input, of_input), (other, of_other)):
        own = batch[len(batch) - max(x.dim() - 2, 0) :]
        named.append((*[None if size == 1 else name for name, size in zip(own, x.shape, strict=False)], *last))
    return Rule(tuple(named), ((*batch, *of_input[:-1], *of_other[1:]),))


def _linear(input, weight, bias, *, activation) -> Rule:
    rows = _numbered(input.dim() - 1)
    return Rule(((*rows, "k"), ("n", "k"), None if bias is None else ("n",)), ((*rows, "n"),))


def _attention(query, key, value, *masks, is_causal, window_size=NO_WINDOW, **options) -> Rule:
    batch = _numbered(max(query.dim(), key.dim(), value.dim()) - 3)
    # Positions decide what a causal or banded query sees, so its sequence stays whole.
    rows = "query" if is_causal is False and tuple(window_size) == NO_WINDOW else None

    def of(x, row: Name) -> Names:
        own = batch[len(batch) - max(x.dim() - 3, 0) :]
        own = tuple([None if size == 1 else name for name, size in zip(own, x.shape, strict=False)])
        return (*own, "heads", row, None) if x.dim() > 2 else (row, None)

    of_query = of(query, rows)
    own = ("heads",) if query.dim() > 2 else ()
    scores = (*batch, *own, rows, None)
    inputs = (of_query, of(key, None), of(value, None), *_broadcast(masks, scores))
    outputs = [(*of_query[:-1], None)]
    if options.get("return_lse"):
        outputs.append(of_query[:-1])
    heads = {"heads": key.shape[-3]} if query.dim() > 2 else {}
    return Rule(inputs, tuple(outputs), heads)


def _attention_varlen(query, key, value, *cu_seqlens, **options) -> Rule:
    packed = (None, "heads", None)
    outputs = (packed, (None, "heads")) if options.get("return_lse") else (packed,)
    whole = [None if x is None else (None,) * x.dim() for x in cu_seqlens]
    return Rule((packed, packed, packed, *whole), outputs, {"heads": key.shape[-2]})


def _whole(*inputs, **options) -> Rule:
    """Of random masks: an element's random number depends on its position in the whole tensor."""
    first = inputs[0]
    return Rule(
        tuple([None if x is None else (None,) * x.dim() for x in inputs]),
        ((None,) * first.dim(),),
    )


RULES: dict[str, Callable[..., Rule]] = {
    "add": _elementwise,
    "add_rms_norm": _add_norm,
    "attention": _attention,
    "attention_varlen": _attention_varlen,
    "bias_dropout_add_layer_norm": _whole,
    "bias_gelu": _elementwise,
    "dropout": _whole,
    "gelu": _elementwise,
    "layer_norm": _norm,
    "linear": _linear,
    "matmul": _matmul,
    "rms_norm": _norm,
    "softmax": _softmax,
    "sum": _sum,
    "swiglu": _elementwise,
}


def rule_of(op: str, inputs: Inputs, options: Options) -> Rule:
    """The rule of a call whose arguments the operation's check accepts."""
    return RULES[op](*inputs, **options)
