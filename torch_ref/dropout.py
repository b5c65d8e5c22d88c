"""Dropout, ``x · keep / (1 − p)``: elements are dropped at random, the others scaled so that the mean stays.

Source: Srivastava et al., "Dropout: A Simple Way to Prevent Neural Networks from Overfitting", JMLR 15, 2014.
The mask is that of :mod:`kernel_ladder.semantics.philox`, the same at every level and in every pass. It is never
stored: the gradient is dropout of the output's gradient with the same seed.
"""

import math

import torch

from kernel_ladder.semantics import philox
from kernel_ladder.spec import Case, ErrorCase, Spec, check_tensors
from kernel_ladder.table import register, register_spec


def naive(input: torch.Tensor, *, p: float = 0.5, seed: int | torch.Tensor) -> torch.Tensor:
    """The formula, one kernel per operator: Philox alone is a hundred of them, with eight bytes per word.

    The seed may be a tensor of one int64, so that torch.compile does not take it for a constant.
    """
    words = philox.words(input.numel(), seed, input.device)
    kept = (words >= philox.threshold(p)).view(input.shape)
    return input * kept * philox.scale(p)


def check(input: torch.Tensor, *, p: float, seed: int) -> None:
    check_tensors("dropout", input=input)
    philox.check("dropout", p, seed)


def _case(id: str, shape: tuple[int, ...], p: float = 0.5, seed: int = 0, **more: str) -> Case:
    return Case(id, (shape,), {"p": p, "seed": seed}, **more)


SAMPLES = [
    _case("empty", (0,)),
    _case("scalar", ()),
    _case("one", (1,), seed=1),
    _case("prime", (1009,), 0.1, 42),
    _case("tile+1", (3, 1025), 0.25, 7),
    _case("tile-1", (2, 8191), 0.9, 2**31),
    _case("vectors", (5, 512), 0.5, 2**32 - 1),
    _case("transposed", (37, 53), 0.5, 3, layout="transposed"),
    _case("transposed-4d", (2, 3, 5, 7), 0.3, 3, layout="transposed"),
    _case("strided", (5, 129), 0.5, 4, layout="strided"),
    _case("sliced", (7, 67), 0.5, 5, layout="sliced"),
    _case("rows", (9, 136), 0.5, 5, layout="halves"),
    _case("expanded", (9, 33), 0.5, 6, layout="expanded"),
    _case("keep-all", (3, 100), 0.0, 8),
    _case("drop-nearly-all", (3, 1000), 1 - 2**-10, 9),
    _case("large-seed", (3, 100), 0.2, 2**63 - 1),
    _case("large", (31, 33), 0.5, 10, values="large"),
    _case("nan", (257,), 0.5, 11, values="nan"),
    _case("inf", (257,), 0.5, 12, values="inf"),
]


def _bad(id: str, error: type[Exception], message: str, **options: object) -> ErrorCase:
    return ErrorCase(id, lambda: ((torch.zeros(2),), {"seed": 0, **options}), error, message)


ERRORS = [
    ErrorCase("not-a-tensor", lambda: (([1.0],), {"seed": 0}), TypeError, r"`input` must be a torch\.Tensor, got list"),
    ErrorCase("integer", lambda: ((torch.arange(3),), {"seed": 0}), TypeError, r"`input` has dtype int64; accepted"),
    _bad("p-bool", TypeError, "`p` must be a number, got bool", p=True),
    _bad("p-tensor", TypeError, "`p` must be a number, got Tensor", p=torch.tensor(0.5)),
    _bad("p-one", ValueError, "`p` must be at least 0 and less than 1, got 1", p=1.0),
    _bad("p-negative", ValueError, "`p` must be at least 0 and less than 1, got -0.1", p=-0.1),
    _bad("p-nan", ValueError, "`p` must be at least 0 and less than 1, got nan", p=math.nan),
    _bad("seed-float", TypeError, "`seed` must be an int, got float", seed=1.0),
    _bad("seed-bool", TypeError, "`seed` must be an int, got bool", seed=True),
    _bad("seed-none", TypeError, "`seed` must be an int, got NoneType", seed=None),
    _bad("seed-negative", ValueError, r"`seed` must be from 0 to 2\^63 - 1, got -1", seed=-1),
    _bad("seed-large", ValueError, r"`seed` must be from 0 to 2\^63 - 1, got 9223372036854775808", seed=2**63),
]


def _sweep() -> list[Case]:
    shapes = [(65536, 256), (16384, 1024), (16384, 4096), (8192, 16384), (4096, 65536), (2048, 131072)]
    quick = {(16384, 1024), (16384, 4096)}
    return [Case(f"{m}x{n}", ((m, n),), {"p": 0.1, "seed": 42}, quick=(m, n) in quick) for m, n in shapes]


def _bytes(case: Case, itemsize: int, backward: bool) -> int:
    # Forward reads the input and writes the output. Backward reads one gradient and writes the other.
    return math.prod(case.shapes[0]) * itemsize * 2


def _flops(case: Case, backward: bool) -> int:
    return math.prod(case.shapes[0])  # the scale; Philox is integer arithmetic


SPEC = register_spec(
    Spec(
        name="dropout",
        reference=naive,
        builtin=None,  # PyTorch's own function draws another mask
        check=check,
        samples=SAMPLES,
        errors=ERRORS,
        sweep=_sweep(),
        bytes=_bytes,
        flops=_flops,
    )
)

register("dropout", "torch.naive", forward=lambda input, **options: (naive(input, **options), ()))
