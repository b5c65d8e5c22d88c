"""Matrix product, ``C[m, n] = Σ_k A[m, k] · B[k, n]``, with the shapes of torch.matmul: vectors, matrices, batches."""

import math
from typing import Any

import torch

from kernel_ladder.semantics.norms import computation_dtype
from kernel_ladder.spec import Case, ErrorCase, Spec, check_tensors
from kernel_ladder.table import register, register_spec

#: Most memory for the naive formula's products. Larger calls are refused.
NAIVE_LIMIT_GIB = 8.0


def naive(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The formula in float32 or wider: all M·N·K products go to memory and come back to be summed."""
    a, b = _wide_matrices(input, other)
    products = a.unsqueeze(-1) * b.unsqueeze(-3)  # (…, M, K, 1) × (…, 1, K, N)
    return _without_vectors(products.sum(-2), input, other)


def builtin(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """PyTorch's product: cuBLAS on a GPU."""
    return torch.matmul(input, other)


def running_sum(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The product as one running sum per element, in float32 or wider, as a plain kernel computes it.

    It sets the bound of the agreement check. The naive formula splits its sum over threads, and so rounds less than a
    chain of K additions. That chain's error grows as √K units in the last place, which is no fault of a kernel. This
    function also needs no memory for the products.
    """
    a, b = _wide_matrices(input, other)
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    output = _RunningSum.apply(a.expand(*batch, *a.shape[-2:]), b.expand(*batch, *b.shape[-2:]))
    return _without_vectors(output, input, other)


class _RunningSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        return _add_products(a, b)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = ctx.saved_tensors
        return _add_products(grad, b.mT), _add_products(a.mT, grad)


def _add_products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    output = a.new_zeros((*a.shape[:-1], b.shape[-1]))
    for k in range(a.shape[-1]):
        output.addcmul_(a[..., :, k : k + 1], b[..., k : k + 1, :])
    return output


def _wide_matrices(input: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both operands in the dtype of the sum. A vector becomes a row (`input`) or a column (`other`)."""
    wide = computation_dtype(input.dtype)
    a = input if input.dim() > 1 else input.unsqueeze(0)
    b = other if other.dim() > 1 else other.unsqueeze(1)
    return a.to(wide), b.to(wide)


def _without_vectors(product: torch.Tensor, input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The product in the inputs' dtype, without the dimensions that were added to vectors."""
    if other.dim() == 1:
        product = product.squeeze(-1)
    if input.dim() == 1:
        product = product.squeeze(-1 if other.dim() == 1 else -2)
    return product.to(input.dtype)


def product_sizes(input: tuple[int, ...], other: tuple[int, ...]) -> tuple[tuple[int, ...], int, int, int]:
    """Batch dimensions, M, N and K of the product of two shapes. M or N is 1 for a vector."""
    m = input[-2] if len(input) > 1 else 1
    n = other[-1] if len(other) > 1 else 1
    return tuple(torch.broadcast_shapes(input[:-2], other[:-2])), m, n, input[-1]


def _naive_unsupported(input: torch.Tensor, other: torch.Tensor) -> str | None:
    batch, m, n, k = product_sizes(input.shape, other.shape)
    gib = math.prod(batch) * m * n * k * max(input.element_size(), 4) / 2**30
    if gib > NAIVE_LIMIT_GIB:
        return f"every product at once needs {gib:.0f} GiB; it is refused past {NAIVE_LIMIT_GIB:.0f} GiB"
    return None


def check(input: torch.Tensor, other: torch.Tensor) -> None:
    check_tensors("matmul", input=input, other=other)
    a, b = input.shape, other.shape
    if not a or not b:
        name = "other" if a else "input"
        raise ValueError(f"matmul: argument `{name}` must have at least 1 dimension, got a 0-dimensional tensor")
    inner = b[-2] if len(b) > 1 else b[0]
    if a[-1] != inner:
        which = "second to last" if len(b) > 1 else "only"
        raise ValueError(
            f"matmul: the last dimension of `input` must equal the {which} dimension of `other`, "
            f"got {a[-1]} and {inner} in shapes {tuple(a)} and {tuple(b)}"
        )
    if len(a) > 2 and len(b) > 2:
        for size_a, size_b in zip(reversed(a[:-2]), reversed(b[:-2]), strict=False):
            if size_a != size_b and size_a != 1 and size_b != 1:
                raise ValueError(
                    "matmul: the batch dimensions of `input` and `other` must broadcast (be equal, or 1), "
                    f"got {tuple(a[:-2])} and {tuple(b[:-2])} in shapes {tuple(a)} and {tuple(b)}"
                )


SAMPLES = [
    Case("dot", ((5,), (5,))),
    Case("vector-matrix", ((7,), (7, 5))),
    Case("matrix-vector", ((5, 7), (7,))),
    Case("vector-batch", ((7,), (3, 7, 5))),
    Case("batch-vector", ((2, 3, 5, 7), (7,))),
    Case("one", ((1, 1), (1, 1))),
    Case("empty-dot", ((0,), (0,))),
    Case("empty-m", ((0, 5), (5, 3))),
    Case("empty-n", ((5, 3), (3, 0))),
    Case("empty-k", ((4, 0), (0, 6))),
    Case("empty-batch", ((0, 3, 4), (4, 5))),
    Case("empty-k-batch", ((2, 3, 0), (0, 5))),
    Case("outer", ((33, 1), (1, 34))),
    Case("row", ((1, 65), (65, 67))),
    Case("column", ((67, 65), (65, 1))),
    Case("prime", ((37, 53), (53, 41))),
    Case("tile", ((64, 64), (64, 64))),
    Case("tile+1", ((65, 129), (129, 33))),
    Case("tile-1", ((63, 31), (31, 127))),
    Case("tiles-of-128", ((256, 136), (136, 128))),
    Case("long-k", ((3, 1021), (1021, 5))),
    Case("thin", ((9, 104), (104, 72))),
    Case("transposed", ((37, 53), (53, 41)), layout="transposed"),
    Case("strided", ((17, 35), (35, 19)), layout="strided"),
    Case("sliced", ((31, 67), (67, 33)), layout="sliced"),
    Case("expanded", ((17, 35), (35, 19)), layout="expanded"),
    Case("vectors-strided", ((35,), (35,)), layout="strided"),
    Case("batch", ((3, 17, 19), (3, 19, 23))),
    Case("batch-matrix", ((2, 3, 17, 19), (19, 23))),
    Case("matrix-batch", ((17, 19), (3, 19, 23))),
    Case("batch-broadcast", ((2, 1, 17, 19), (3, 19, 23))),
    Case("batch-transposed", ((3, 17, 19), (3, 19, 23)), layout="transposed"),
    Case("batch-expanded", ((3, 17, 19), (3, 19, 23)), layout="expanded"),
    Case("large", ((17, 23), (23, 19)), values="large"),
    Case("nan", ((9, 3), (3, 11)), values="nan"),
    Case("inf", ((9, 3), (3, 11)), values="inf"),
]


def _zeros(*shapes: tuple[int, ...]) -> tuple[tuple[torch.Tensor, ...], dict]:
    return tuple(torch.zeros(s) for s in shapes), {}


ERRORS = [
    ErrorCase(
        "input-not-a-tensor",
        lambda: (([[1.0]], torch.zeros(1, 1)), {}),
        TypeError,
        r"`input` must be a torch\.Tensor, got list",
    ),
    ErrorCase(
        "other-not-a-tensor",
        lambda: ((torch.zeros(1, 1), 2.0), {}),
        TypeError,
        r"`other` must be a torch\.Tensor, got float",
    ),
    ErrorCase(
        "integer",
        lambda: ((torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2, 2)), {}),
        TypeError,
        r"`input` has dtype int32; accepted are float16",
    ),
    ErrorCase(
        "complex",
        lambda: ((torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.complex64)), {}),
        TypeError,
        r"`other` has dtype complex64; accepted are float16",
    ),
    ErrorCase(
        "dtypes",
        lambda: ((torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.float16)), {}),
        TypeError,
        r"`input` and `other` must have the same dtype, got float32 and float16",
    ),
    ErrorCase(
        "devices",
        lambda: ((torch.zeros(2, 2), torch.zeros(2, 2, device="meta")), {}),
        ValueError,
        r"`input` and `other` must be on the same device, got cpu and meta",
    ),
    ErrorCase("input-0d", lambda: _zeros((), (2, 2)), ValueError, r"`input` must have at least 1 dimension, got a 0-"),
    ErrorCase("other-0d", lambda: _zeros((2, 2), ()), ValueError, r"`other` must have at least 1 dimension, got a 0-"),
    ErrorCase(
        "inner",
        lambda: _zeros((2, 3), (4, 5)),
        ValueError,
        r"last dimension of `input` must equal the second to last dimension of `other`, got 3 and 4 in shapes "
        r"\(2, 3\) and \(4, 5\)",
    ),
    ErrorCase(
        "inner-vector",
        lambda: _zeros((2, 3), (4,)),
        ValueError,
        r"last dimension of `input` must equal the only dimension of `other`, got 3 and 4",
    ),
    ErrorCase(
        "batches",
        lambda: _zeros((2, 5, 3, 4), (3, 4, 5)),
        ValueError,
        r"batch dimensions of `input` and `other` must broadcast .* got \(2, 5\) and \(3,\)",
    ),
]

# (M, N, K): squares, a transformer's projections, a short K, decoding's thin M, and sizes that break every alignment.
_SWEEP = [
    (512, 512, 512),
    (1024, 1024, 1024),
    (2048, 2048, 2048),
    (4096, 4096, 4096),
    (8192, 8192, 8192),
    (16384, 16384, 16384),
    (4096, 4096, 14336),
    (4096, 14336, 4096),
    (8192, 8192, 1024),
    (2048, 2048, 65536),
    (128, 8192, 8192),
    (64, 8192, 8192),
    (16, 8192, 8192),
    (1, 8192, 8192),
    (4095, 4097, 4099),
    (2039, 2053, 2063),
    (8191, 8209, 8219),
]
_QUICK = {(1024, 1024, 1024), (4096, 4096, 4096)}

#: Most multiply-adds at which the sweep times the first rungs, which run at a thousandth of the last one's speed.
_PATIENCE = 2**41


def _sweep() -> list[Case]:
    def case(m: int, n: int, k: int, name: str, **fields: Any) -> Case:
        return Case(f"{m}x{n}x{k}{name}", ((m, k), (k, n)), **fields)

    cases = [case(*mnk, "", quick=mnk in _QUICK, climb=math.prod(mnk) < _PATIENCE) for mnk in _SWEEP]
    # The operands' layouts, as BLAS names them: T is stored along columns.
    for name in ("NT", "TN", "TT"):
        layout = tuple({"N": "contiguous", "T": "transposed"}[letter] for letter in name)
        cases += [case(*mnk, f" {name}", layout=layout, passes=("forward",), climb=False) for mnk in _SWEEP]
    return cases


def _bytes(case: Case, itemsize: int, backward: bool) -> int:
    batch, m, n, _ = product_sizes(*case.shapes)
    inputs = sum(math.prod(s) for s in case.shapes)
    output = math.prod(batch) * m * n
    # Forward reads the inputs and writes the output. Backward reads inputs and gradient and writes two gradients.
    return (output + inputs * (2 if backward else 1)) * itemsize


def _flops(case: Case, backward: bool) -> int:
    # A multiplication and an addition per product. Backward is two products of the same size.
    batch, m, n, k = product_sizes(*case.shapes)
    return 2 * math.prod(batch) * m * n * k * (2 if backward else 1)


SPEC = register_spec(
    Spec(
        name="matmul",
        reference=naive,
        builtin=builtin,
        check=check,
        samples=SAMPLES,
        errors=ERRORS,
        sweep=_sweep(),
        bytes=_bytes,
        flops=_flops,
        oracle=builtin,
        yardstick=running_sum,
    )
)


register(
    "matmul",
    "torch.naive",
    forward=lambda input, other: (naive(input, other), ()),
    unsupported=_naive_unsupported,
)
register("matmul", "torch.builtin", forward=lambda input, other: (builtin(input, other), ()))
