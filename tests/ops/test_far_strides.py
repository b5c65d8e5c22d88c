"""Strides that reach past 2³¹ elements, which offsets of 32 bits do not: every tensor, along every dimension.

Each tensor argument, and the gradient of each output, is in turn a view over one large buffer. Its last element along a
dimension lies 2³¹ elements past the first. Results are held to what those of a dense copy are. Labels, block tables,
boolean masks, tables of angles and float32 weights are moved as the numbers beside them are.
"""

from __future__ import annotations

import functools
import mmap
from collections.abc import Iterator

import pytest
import torch

import kernel_ladder
from kernel_ladder import table
from kernel_ladder.spec import Case, Inputs, Output, as_leaves, as_tuple
from kernel_ladder.table import Variant
from kernel_ladder.testing.agreement import Standards, agreement, standards
from kernel_ladder.testing.samples import make_grad, make_inputs

from ..conftest import DEVICE, public, variant_id

#: The least offset that a signed number of 32 bits does not hold.
FAR = 2**31
DTYPE = torch.bfloat16


def _case(id: str, *shapes: tuple[int, ...], kinds: dict[int, str] | None = None, **options: object) -> Case:
    return Case(id, shapes, options, kinds=kinds or {})


_ROW = {"normalized_shape": (40,), "eps": 1e-5}
_ATTENTION = {"is_causal": False, "scale": None, "enable_gqa": False}


def _entropy(reduction: str, label_smoothing: float) -> dict[str, object]:
    return {"ignore_index": -100, "reduction": reduction, "label_smoothing": label_smoothing, "z_loss": 0.0}


_PACKED = {3: "offsets:0,4,19", 4: "offsets:0,7,21"}

#: No dimension of one element, which has no step; lengths that no tile divides, and rows past one tile of each kernel.
CASES = {
    "gelu": [
        _case("none", (3, 5, 7), approximate="none"),
        _case("tanh", (9, 1100), approximate="tanh"),
    ],
    "softmax": [_case("last", (3, 5, 40), dim=-1), _case("first", (40, 5), dim=0)],
    "matmul": [_case("matrices", (67, 70), (70, 33)), _case("batches", (3, 17, 40), (3, 40, 24))],
    "attention": [
        _case("dense", *[(2, 3, 9, 16)] * 3, **_ATTENTION),
        _case("masked", *[(2, 3, 9, 16)] * 3, (2, 3, 9, 9), **_ATTENTION),
        _case("boolean", *[(2, 3, 9, 16)] * 3, (2, 3, 9, 9), kinds={3: "boolean"}, **_ATTENTION),
        _case("long", (2, 2, 67, 16), (2, 2, 70, 16), (2, 2, 70, 16), **{**_ATTENTION, "is_causal": True}),
    ],
    "attention_varlen": [
        _case(
            "packed",
            *((19, 2, 16), (21, 2, 16), (21, 2, 16), (3,), (3,)),
            kinds=_PACKED,
            max_seqlen_q=15,
            max_seqlen_k=14,
            **_ATTENTION,
        )
    ],
    "attention_paged": [
        _case(
            "pages",
            *((2, 3, 2, 16), (7, 3, 3, 16), (7, 3, 3, 16), (2, 3), (2,)),
            kinds={3: "pages@1", 4: "lengths:8,5"},
            **{**_ATTENTION, "is_causal": True},
        )
    ],
    "add": [_case("same", (3, 5, 40), (3, 5, 40)), _case("row", (9, 40), (40,)), _case("column", (9, 40), (9, 1))],
    "sum": [
        _case("all", (5, 7, 40), dim=None, keepdim=False),
        _case("last", (9, 1100), dim=-1, keepdim=False),
        _case("first", (300, 5), dim=0, keepdim=True),
        _case("middle", (3, 40, 5), dim=1, keepdim=False),
    ],
    "layer_norm": [
        _case("rows", (9, 5, 40), (40,), (40,), **_ROW),
        _case("float32", (9, 5, 40), (40,), (40,), kinds={1: "parameter", 2: "parameter"}, **_ROW),
    ],
    "rms_norm": [
        _case("rows", (9, 5, 40), (40,), **_ROW),
        _case("float32", (9, 5, 40), (40,), kinds={1: "parameter"}, **_ROW),
    ],
    "dropout": [_case("rows", (3, 5, 40), p=0.5, seed=3)],
    "bias_gelu": [
        _case("none", (3, 9, 40), (40,), approximate="none"),
        _case("tanh", (300, 300), (300,), approximate="tanh"),
    ],
    "swiglu": [_case("rows", (3, 9, 40), (3, 9, 40))],
    "rope": [
        _case(f"{form}", (3, 9, 48), (9, 16), kinds={1: "rotations"}, interleaved=form == "pairs", offset=0)
        for form in ("halves", "pairs")
    ]
    + [
        _case(
            *("offsets", (3, 9, 48), (20, 16), (3,)),
            kinds={1: "rotations", 2: "starts:11,0,5"},
            interleaved=False,
            offset=0,
        )
    ],
    "cross_entropy": [
        _case(f"{reduction}{s}", (9, 1100), (9,), kinds={1: "some_classes"}, **_entropy(reduction, s))
        for reduction, s in (("none", 0.0), ("mean", 0.1))
    ],
    "linear_cross_entropy": [
        _case("mean", (40, 24), (33, 24), (40,), kinds={2: "some_classes@1"}, wide_loss=False, **_entropy("mean", 0.1))
    ],
    "add_rms_norm": [_case("rows", (9, 5, 40), (9, 5, 40), (40,), eps=1e-5)],
    "bias_dropout_add_layer_norm": [
        _case("rows", (3, 3, 40), (40,), (3, 3, 40), (40,), (40,), p=0.5, seed=3, eps=1e-5)
    ],
    "linear": [
        _case("plain", (67, 70), (72, 70), (72,), activation=None),
        _case("gelu", (3, 9, 40), (72, 40), (72,), activation="gelu"),
        _case("tanh", (67, 40), (72, 40), (72,), activation="gelu_tanh"),
    ],
}

#: (operation, variant) of PyTorch's own that go wrong, and why.
KNOWN: dict[tuple[str, str], str] = {}


#: Elements of the buffer: room on both sides of its middle, for offsets that wrap.
ROOM = 2 * FAR + 2**20
#: Of Linux: the kernel reserves no memory for address space that nothing is written to.
MAP_NORESERVE = 0x4000


@functools.cache
def buffer(itemsize: int) -> torch.Tensor:
    """Bytes of :data:`ROOM` elements of a size. On a CPU they are address space only until they are written to."""
    if DEVICE.type == "cuda":
        return torch.empty(ROOM * itemsize, dtype=torch.uint8, device=DEVICE)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, ROOM * itemsize, flags=flags), dtype=torch.uint8)


@pytest.fixture
def itemsize(request, gpu_memory) -> Iterator[int]:
    """The largest element of the test's case, of which the buffer has room. Its memory is freed after the test."""
    variant, index = (request.node.callspec.params[name] for name in ("variant", "index"))
    tensors = make_inputs(CASES[variant.op][index], DTYPE, torch.device("cpu"))
    found = max(x.element_size() for x in tensors if x is not None)
    if DEVICE.type == "cuda":
        gpu_memory(ROOM * found + 4 * 2**30)
    yield found
    if DEVICE.type == "cuda":
        buffer.cache_clear()
        torch.cuda.empty_cache()


def far(x: torch.Tensor, dim: int, itemsize: int) -> torch.Tensor:
    """`x` with its last element along a dimension 2³¹ elements past its first, and dense in all others.

    Where that would be read if its offset wrapped, there is NaN, or what a mask, a label or a page number is not.
    """
    strides, dense = [0] * x.dim(), 1
    for d in reversed(range(x.dim())):
        if d != dim:
            strides[d], dense = dense, dense * x.shape[d]
    strides[dim] = -(-FAR // (x.shape[dim] - 1)) // 8 * 8 + 8  # rows stay aligned to 16 bytes
    wrapped = (x.shape[dim] - 1) * strides[dim] - FAR
    memory = buffer(itemsize)[: ROOM * x.element_size()].view(x.dtype)
    last = x.select(dim, -1).reshape(-1)
    memory[wrapped : wrapped + dense] = (
        torch.nan if x.is_floating_point() or x.is_complex() else (last == 0).to(x.dtype)
    )
    return memory.as_strided(x.shape, strides, FAR).copy_(x)


@functools.lru_cache(maxsize=4)
def expected(op: str, index: int) -> tuple[Inputs, Output, Standards]:
    spec, case = kernel_ladder.spec(op), CASES[op][index]
    inputs = make_inputs(case, DTYPE, DEVICE)
    grad = make_grad(spec, inputs, case.options)
    return inputs, grad, standards(spec, inputs, case.options, grad)


def _places(variant: Variant, case: Case, tensors: list[torch.Tensor]) -> Iterator[tuple[int, int]]:
    """(tensor, dimension) to be far: the first dimension alone at the compile level, which takes seconds for each.

    Without a GPU, only Triton's kernels are ours; PyTorch's and XLA's loops have the first dimension too.
    """
    first_alone = variant.level == "compile" or (DEVICE.type == "cpu" and variant.level != "triton")
    for place, x in enumerate(tensors):
        dense_alone = "offsets" in case.kinds.get(place, "")  # others are refused
        if x is not None and not dense_alone:
            dims = [d for d in range(x.dim()) if x.shape[d] > 2]
            yield from ((place, d) for d in (dims[:1] if first_alone else dims))


def parameters():
    for op in CASES:
        for index, case in enumerate(CASES[op]):
            for variant in table.variants(op):
                if variant.level == "compile" and DEVICE.type == "cpu":
                    continue  # C++ code indexes by 64 bits, and takes minutes to compile
                if (table.unavailable(op, variant.level) or variant.here()) is None and takes(variant, case):
                    yield pytest.param(variant, index, id=f"{variant_id(variant)}-{case.id}")


def takes(variant: Variant, case: Case) -> bool:
    """Whether a variant takes the dense case, wherever that lies."""
    return variant.unsupported(*as_leaves(make_inputs(case, DTYPE, DEVICE)), **case.options) is None


def test_every_operation_is_here():
    assert set(CASES) | {"linear_float8"} == set(kernel_ladder.OPS)  # its own are in test_linear_float8.py


@pytest.mark.sampled
@pytest.mark.parametrize(("variant", "index"), list(parameters()))
def test_far_strides(variant, index, itemsize):
    spec, case = kernel_ladder.spec(variant.op), CASES[variant.op][index]
    if reason := KNOWN.get((variant.op, variant.name)):
        pytest.xfail(reason)
    inputs, grad, to = expected(variant.op, index)
    grads = as_tuple(grad)
    tensors, failed = [*inputs, *grads], []

    def call(*inputs, **options):
        return public(variant.op, inputs, options, backend=variant.name)

    for place, dim in _places(variant, case, tensors):
        moved = [far(x, dim, itemsize) if i == place else x for i, x in enumerate(tensors)]
        of_call, of_grad = tuple(moved[: len(inputs)]), tuple(moved[len(inputs) :])
        if variant.unsupported(*as_leaves(of_call), **case.options) is not None:
            continue
        result = agreement(spec, call, of_call, case.options, of_grad if len(of_grad) > 1 else of_grad[0], to=to)
        if not result.agrees:
            what = f"argument {place}" if place < len(inputs) else f"gradient {place - len(inputs)}"
            failed.append(f"{what}, dimension {dim}: {result}")
    assert not failed, "\n".join(failed)
