"""GELU, ``x · Φ(x)`` with the normal distribution's Φ (Hendrycks and Gimpel, arXiv:1606.08415).

exact:  0.5 · x · (1 + erf(x / √2))
tanh:   0.5 · x · (1 + tanh(√(2/π) · (x + 0.044715 · x³)))
"""

import math

import torch
import torch.nn.functional as F

from kernel_ladder.semantics.norms import computation_dtype
from kernel_ladder.spec import Case, ErrorCase, Spec, check_tensors
from kernel_ladder.table import register, register_spec

APPROXIMATIONS = ("none", "tanh")
#: Beyond this x², tanh is exactly −1 or 1, in float64 too. Clamping avoids infinity · 0 = NaN in the gradient.
SATURATED = 100.0


def naive(input: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    """The formula in float32 or wider, one kernel per operator: every intermediate goes to memory and comes back."""
    x = input.to(computation_dtype(input.dtype))
    if approximate == "tanh":
        square = x.square().clamp(max=SATURATED)
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * square)
        return (0.5 * x * (1 + torch.tanh(inner))).to(input.dtype)
    return (0.5 * x * (1 + torch.erf(x / math.sqrt(2)))).to(input.dtype)


def builtin(input: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    """PyTorch's fused kernel."""
    return F.gelu(input, approximate=approximate)


def check(input: torch.Tensor, *, approximate: str) -> None:
    check_tensors("gelu", input=input)
    if approximate not in APPROXIMATIONS:
        raise ValueError(f"gelu: argument `approximate` must be 'none' or 'tanh', got {approximate!r}")


def _cases() -> list[Case]:
    cases = []
    for approximate in APPROXIMATIONS:
        options = {"approximate": approximate}
        cases += [
            Case(f"{approximate}-empty", ((0,),), options),
            Case(f"{approximate}-scalar", ((),), options),
            Case(f"{approximate}-one", ((1,),), options),
            Case(f"{approximate}-prime", ((1009,),), options),
            Case(f"{approximate}-tile+1", ((3, 1025),), options),
            Case(f"{approximate}-tile-1", ((2, 8191),), options),
            Case(f"{approximate}-transposed", ((37, 53),), options, layout="transposed"),
            Case(f"{approximate}-strided", ((5, 129),), options, layout="strided"),
            Case(f"{approximate}-sliced", ((7, 67),), options, layout="sliced"),
            Case(f"{approximate}-expanded", ((9, 33),), options, layout="expanded"),
            Case(f"{approximate}-4d", ((2, 3, 5, 7),), options, layout="transposed"),
            Case(f"{approximate}-large", ((31, 33),), options, values="large"),
            Case(f"{approximate}-nan", ((257,),), options, values="nan"),
            Case(f"{approximate}-inf", ((257,),), options, values="inf"),
        ]
    return cases


def _complex() -> torch.Tensor:
    return torch.zeros(2, dtype=torch.complex64)


ERRORS = [
    ErrorCase("not-a-tensor", lambda: (([1.0],), {}), TypeError, r"`input` must be a torch\.Tensor, got list"),
    ErrorCase("integer", lambda: ((torch.arange(3),), {}), TypeError, r"`input` has dtype int64; accepted are float16"),
    ErrorCase("complex", lambda: ((_complex(),), {}), TypeError, r"`input` has dtype complex64"),
    ErrorCase("sparse", lambda: ((torch.eye(2).to_sparse(),), {}), TypeError, r"`input` must be a dense"),
    ErrorCase(
        "approximate",
        lambda: ((torch.zeros(2),), {"approximate": "erf"}),
        ValueError,
        r"`approximate` must be 'none' or 'tanh', got 'erf'",
    ),
]


def _sweep() -> list[Case]:
    shapes = [(65536, 256), (16384, 1024), (16384, 4096), (8192, 16384), (4096, 65536), (2048, 131072)]
    quick = {(16384, 1024), (16384, 4096)}
    return [
        Case(f"{m}x{n} {approximate}", ((m, n),), {"approximate": approximate}, quick=(m, n) in quick)
        for approximate in APPROXIMATIONS
        for m, n in shapes
    ]


def _bytes(case: Case, itemsize: int, backward: bool) -> int:
    # Forward reads the input and writes the output. Backward reads input and gradient and writes the gradient.
    return math.prod(case.shapes[0]) * itemsize * (3 if backward else 2)


def _flops(case: Case, backward: bool) -> int:
    # Counts the transcendental as one: forward 5 (erf) or 9 (tanh) per element, backward about twice that.
    per_element = 5 if case.options["approximate"] == "none" else 9
    return math.prod(case.shapes[0]) * per_element * (2 if backward else 1)


SPEC = register_spec(
    Spec(
        name="gelu",
        reference=naive,
        builtin=builtin,
        check=check,
        samples=_cases(),
        errors=ERRORS,
        sweep=_sweep(),
        bytes=_bytes,
        flops=_flops,
    )
)

register("gelu", "torch.naive", forward=lambda input, **options: (naive(input, **options), ()))
register("gelu", "torch.builtin", forward=lambda input, **options: (builtin(input, **options), ()))
