"""The arguments of the PyTorch function that an operation stands for: each is taken with its meaning, or refused."""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import kernel_ladder
from kernel_ladder import UnsupportedError, table
from kernel_ladder.semantics.cross_entropy import REDUCTIONS
from kernel_ladder.semantics.float8 import OUTPUT_DTYPES
from kernel_ladder.semantics.linear_shapes import ACTIVATIONS
from kernel_ladder.spec import DTYPES, as_tuple, dtype_name, has_gradient
from kernel_ladder.testing.deviation import compare
from kernel_ladder.testing.samples import make_inputs

from ..conftest import DEVICE, OWN_DTYPES, every_variant, public, skip_unless_it_runs, typical_case, variant_id
from ..sampling import MODES_OF_DEFAULT

aten = torch.ops.aten

#: The functions that a call can be swapped for, and what says which arguments they have: schemas where it is C++.
STANDS_FOR: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "gelu": (F.gelu, (aten.gelu.default, aten.gelu.out)),
    "softmax": (torch.softmax, (aten.softmax.int, aten.softmax.int_out, F.softmax)),
    "matmul": (torch.matmul, (aten.matmul.default, aten.matmul.out)),
    "attention": (F.scaled_dot_product_attention, (aten.scaled_dot_product_attention.default,)),
    "add": (torch.add, (aten.add.Tensor, aten.add.out)),
    "sum": (torch.sum, (aten.sum.default, aten.sum.dim_IntList, aten.sum.IntList_out)),
    "dropout": (F.dropout, (F.dropout,)),
    "layer_norm": (F.layer_norm, (F.layer_norm,)),
    "rms_norm": (F.rms_norm, (F.rms_norm,)),
    "cross_entropy": (F.cross_entropy, (F.cross_entropy,)),
    "linear": (F.linear, (aten.linear.default, aten.linear.out)),
}

#: Arguments that are not for callers; F.softmax has its own between `dim` and `dtype`, where torch.softmax has none.
PRIVATE = {("softmax", "_stacklevel")}

OUT = (torch.zeros(1), ValueError, r"`out` must be None, got Tensor: .* copy it with `out.copy_\(\.\.\.\)`")

#: Arguments of which one value is taken: another, the error and what it says.
REFUSED: dict[tuple[str, str], tuple[Any, type[Exception], str]] = {
    ("linear_cross_entropy", "linear_bias"): (torch.ones(1), ValueError, r"`linear_bias` must be None, got Tensor"),
    ("linear_cross_entropy", "weight"): (torch.ones(1), ValueError, r"`weight` must be None, got Tensor"),
    ("linear_cross_entropy", "options"): ("on", ValueError, r"`options` must be None, got str: `backend` chooses"),
    ("cross_entropy", "weight"): (torch.ones(1), ValueError, r"`weight` must be None, got Tensor: .*reduction='none'"),
    ("cross_entropy", "size_average"): (True, ValueError, r"`size_average` must be None, got bool: .* `reduction`"),
    ("cross_entropy", "reduce"): (False, ValueError, r"`reduce` must be None, got bool: .* `reduction` takes"),
    **{(op, "out"): OUT for op in ("gelu", "softmax", "matmul", "add", "sum", "linear")},
    ("add", "alpha"): (2, ValueError, r"`alpha` must be 1, got 2; multiply `other` by it beforehand"),
    ("dropout", "inplace"): (True, ValueError, r"`inplace` must be False, got True"),
    **{
        (op, "dropout_p"): (0.1, ValueError, r"`dropout_p` must be 0: .*, got 0\.1")
        for op in ("attention_varlen", "attention_paged")
    },
}


@dataclass(frozen=True)
class Argument:
    name: str
    place: int | None  # None of an argument that is given by name alone
    default: Any


def arguments_of(function: Any) -> Iterator[Argument]:
    if isinstance(function, torch._ops.OpOverload):
        for place, x in enumerate(function._schema.arguments):
            default = x.default_value if x.has_default_value() else inspect.Parameter.empty
            default = None if x.name == "out" else default
            yield Argument("input" if x.name == "self" else x.name, None if x.kwarg_only else place, default)
    else:
        for place, (name, x) in enumerate(inspect.signature(function).parameters.items()):
            yield Argument(name, None if x.kind is x.KEYWORD_ONLY else place, x.default)


def signatures() -> list[Any]:
    return [
        pytest.param(op, function, id=f"{op}-{getattr(function, '_overloadname', 'python')}")
        for op, (_, functions) in STANDS_FOR.items()
        for function in functions
    ]


@pytest.mark.parametrize(("op", "function"), signatures())
def test_every_argument_of_the_function_it_stands_for_is_there(op, function):
    ours = inspect.signature(getattr(kernel_ladder, op)).parameters
    moved = 0
    for argument in arguments_of(function):
        if (op, argument.name) in PRIVATE:
            moved += 1
            continue
        assert argument.name in ours, f"{op} lacks `{argument.name}`"
        parameter = ours[argument.name]
        if argument.place is not None:
            assert parameter.kind is parameter.POSITIONAL_OR_KEYWORD
            assert list(ours).index(argument.name) == argument.place - moved
        if argument.default is not inspect.Parameter.empty and (op, argument.name) != ("softmax", "dim"):
            assert parameter.default == argument.default


def zeros(op: str) -> dict[str, Any]:
    """A call of an operation that is right, by name."""
    case = typical_case(op)
    return {**kernel_ladder.spec(op).named(make_inputs(case, torch.float32, DEVICE)), **case.options}


@pytest.mark.parametrize(("op", "name"), REFUSED)
def test_what_is_refused_says_what_is_taken(op, name):
    value, error, message = REFUSED[op, name]
    with pytest.raises(error, match=f"{op}: argument {message}"):
        getattr(kernel_ladder, op)(**{**zeros(op), name: value})
    taken = inspect.signature(getattr(kernel_ladder, op)).parameters[name].default
    getattr(kernel_ladder, op)(**{**zeros(op), name: taken})


def test_numbers_in_place_of_tensors_are_refused_with_what_to_write():
    with pytest.raises(TypeError, match=r"`other` must be a torch\.Tensor, got float; .*`torch\.tensor\(0\.5, dtype="):
        kernel_ladder.add(torch.zeros(2), 0.5)
    for alpha in (True, "1", None):
        with pytest.raises(TypeError, match="`alpha` must be 1, got "):
            kernel_ladder.add(torch.zeros(2), torch.zeros(2), alpha=alpha)
    torch.testing.assert_close(kernel_ladder.add(torch.ones(2), torch.ones(2), alpha=1.0), torch.full((2,), 2.0))


@dataclass(frozen=True)
class Call:
    """A call as both functions take it: tensors and `others` by position, `named` by name.

    A tensor is a shape, of random values in the dtype of the test, or what makes one of another kind. `arguments` are
    the names of those that are given by position, where the call is there for them.
    """

    op: str
    id: str
    tensors: Sequence[tuple[int, ...] | Callable[[], torch.Tensor]]
    others: tuple[Any, ...] = ()
    named: dict[str, Any] = field(default_factory=dict)
    arguments: frozenset[str] = frozenset()

    @property
    def converts_to(self) -> torch.dtype | None:
        """What the call itself converts its input to."""
        return next((x for x in (*self.others, *self.named.values()) if isinstance(x, torch.dtype)), None)

    def inputs(self, dtype: torch.dtype) -> list[torch.Tensor]:
        torch.manual_seed(sum(self.id.encode()))
        made = [torch.randn(x).to(dtype) if isinstance(x, tuple) else x() for x in self.tensors]
        return [x.to(DEVICE) for x in made]

    def results(self, function: Callable[..., Any], inputs: Sequence[torch.Tensor], **more: Any) -> list[torch.Tensor]:
        """The output, and the gradient of each tensor that has one."""
        leaves = [x.detach().requires_grad_() if has_gradient(x) else x for x in inputs]
        output = function(*leaves, *self.others, **self.named, **more)
        wanted = [x for x in leaves if x.requires_grad]
        grads = torch.autograd.grad(output, wanted, self.grad(output)) if wanted else ()
        return [output.detach(), *grads]

    def grad(self, output: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(1)
        return torch.randn(output.shape).bfloat16().to(output)  # the same numbers in every dtype

    def exact(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The results of PyTorch's function in float64; the input is converted first where the call converts it."""
        to = self.converts_to
        wide = lambda x: torch.float64 if isinstance(x, torch.dtype) else x  # noqa: E731
        call = dataclasses.replace(
            self, others=tuple(map(wide, self.others)), named={name: wide(x) for name, x in self.named.items()}
        )
        doubles = [(x if to is None else x.to(to)).double() if has_gradient(x) else x for x in inputs]
        return call.results(STANDS_FOR[self.op][0], doubles)


def bfloat16(*shape: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(shape).bfloat16()


def integers(*shape: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.randint(-3, 4, shape)


def classes(*shape: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.randint(5, shape)


def boolean(*shape: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.rand(shape).round().bool().index_fill(-1, torch.tensor(0), True)


def names(*given: str) -> frozenset[str]:
    return frozenset(given)


QKV = ((2, 2, 9, 8), (2, 2, 11, 8), (2, 2, 11, 8))

#: The first of an operation is the one that a compiler gets where there is no GPU: it takes seconds for each.
CALLS = [
    Call("gelu", "tanh", [(5, 7)], (), {"approximate": "tanh"}),
    Call("gelu", "no-dimension", [()]),
    Call("softmax", "dtype", [bfloat16(5, 33)], (-1, torch.float32), arguments=names("dim", "dtype")),
    Call("softmax", "narrower", [(5, 33)], (0,), {"dtype": torch.bfloat16}),
    Call("softmax", "integers", [integers(5, 33)], (), {"dim": 1, "dtype": torch.float32}),
    Call("softmax", "no-dimension", [()], (0, torch.float32)),
    Call("matmul", "vectors", [(7,), (7,)]),
    Call("matmul", "vector-batch", [(7,), (2, 7, 3)]),
    Call("add", "no-dimensions", [(), ()]),
    Call("add", "no-dimension", [(3, 5), ()]),
    Call("sum", "dtype", [bfloat16(5, 33)], (-1, True), {"dtype": torch.float32}, names("dim", "keepdim")),
    Call("sum", "all", [(5, 33)]),
    Call("sum", "no-dimension", [()], (0,)),
    Call("sum", "list", [(5, 3, 4)], ([0, -1],), {"keepdim": False}),
    Call("sum", "narrower", [(5, 33)], (0,), {"dtype": torch.bfloat16}),
    Call("sum", "integers", [integers(5, 33)], (), {"dtype": torch.float32}),
    Call("dropout", "evaluation", [(5, 7)], (0.5, False), arguments=names("p", "training")),
    Call("layer_norm", "negative-eps", [(5, 32)], ((32,), None, None, -1e-3),
         arguments=names("normalized_shape", "eps")),
    Call("layer_norm", "parameters", [(5, 4, 8)], (), {"normalized_shape": [4, 8], "weight": None, "bias": None}),
    Call("layer_norm", "below-zero", [(5, 32)], ((32,),), {"eps": -1e3}),
    Call("rms_norm", "negative-eps", [(5, 32)], ((32,), None, -1e-3), arguments=names("normalized_shape", "eps")),
    Call("rms_norm", "parameters", [(5, 4, 8)], (), {"normalized_shape": [4, 8], "weight": None}),
    Call("rms_norm", "below-zero", [(5, 32)], ((32,),), {"eps": -1e3}),
    Call("cross_entropy", "all", [(6, 5), classes(6)], (None, None, 2, None, "sum", 0.1),
         arguments=names("ignore_index", "reduction", "label_smoothing")),
    Call("cross_entropy", "mean", [(6, 5), classes(6)]),
    Call("cross_entropy", "vector", [(5,), classes()]),
    Call("cross_entropy", "images", [(3, 5, 2), classes(3, 2)], (), {"reduction": "none"}),
    Call("linear", "vector-weight", [(3, 7), (7,)]),
    Call("linear", "vectors", [(7,), (7,)], (), {"bias": None}),
    Call("linear", "vectors-bias", [(7,), (7,), ()]),
    Call("linear", "vector-weight-batch", [(2, 3, 7), (7,)]),
    Call("linear", "bias", [(3, 7), (5, 7), (5,)]),
    Call("attention", "batch-broadcast", [(2, 2, 9, 8), (1, 2, 11, 8), (1, 2, 11, 8)], (None, 0.0, True),
         arguments=names("attn_mask", "dropout_p", "is_causal")),
    Call("attention", "by-name", QKV, (), {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": 0.3}),
    Call("attention", "query-broadcast", [(1, 2, 9, 8), (2, 2, 11, 8), (2, 2, 11, 16)]),
    Call("attention", "all-broadcast", [(2, 1, 2, 9, 8), (1, 3, 2, 11, 8), (2, 11, 8)]),
    Call("attention", "heads-broadcast", [(2, 2, 9, 8), (2, 1, 11, 8), (2, 1, 11, 8)]),
    Call("attention", "query-head-broadcast", [(2, 1, 9, 8), (2, 2, 11, 8), (2, 2, 11, 8)]),
    Call("attention", "value-head-broadcast", [(2, 2, 9, 8), (2, 2, 11, 8), (2, 1, 11, 8)]),
    Call("attention", "fewer-dimensions", [(2, 9, 8), (2, 2, 11, 8), (2, 2, 11, 8)]),
    Call("attention", "matrices", [(9, 8), (11, 8), (11, 8)], (None, 0.0, True)),
    Call("attention", "matrix-query", [(9, 8), (2, 11, 8), (2, 11, 8)]),
    Call("attention", "empty-broadcast", [(0, 2, 9, 8), (1, 2, 11, 8), (1, 2, 11, 8)]),
    Call("attention", "mask-broadcast", [(2, 2, 9, 8), (1, 2, 11, 8), (1, 2, 11, 8), boolean(2, 1, 9, 11)]),
    Call("attention", "mask-of-matrices", [(9, 8), (11, 8), (11, 8), boolean(9, 11)]),
    Call("attention", "grouped-broadcast", [(3, 4, 9, 8), (1, 2, 11, 8), (1, 2, 11, 8)], (), {"enable_gqa": True}),
    Call("attention", "grouped-value-head", [(2, 4, 9, 8), (2, 2, 11, 8), (2, 1, 11, 8)], (), {"enable_gqa": True}),
]  # fmt: skip


@pytest.mark.parametrize("op", STANDS_FOR)
def test_every_argument_is_called_or_refused(op):
    called = {name for call in CALLS if call.op == op for name in (*call.named, *call.arguments)}
    refused = {name for of, name in REFUSED if of == op}
    tensors = set(inspect.signature(kernel_ladder.spec(op).check).parameters)
    for function in STANDS_FOR[op][1]:
        for argument in arguments_of(function):
            if (op, argument.name) not in PRIVATE:
                assert argument.name in called | refused | tensors, argument.name


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call.op}-{call.id}")
@pytest.mark.parametrize("backend", ["torch.naive", "auto"])
def test_a_call_means_the_same_in_float64(call, backend):
    """Where rounding hides nothing: what an argument means is what PyTorch's function takes it to mean."""
    inputs = call.inputs(torch.float64)
    expected = call.results(STANDS_FOR[call.op][0], inputs)
    actual = call.results(getattr(kernel_ladder, call.op), inputs, backend=backend)
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype is e.dtype
        assert a.shape == e.shape
        if call.converts_to is None:  # else test_a_call_can_be_swapped holds it to a bound
            torch.testing.assert_close(a, e, equal_nan=True)


#: Of the others a compiler would only be given what other tests give it, and takes seconds for each.
COMPILED_ON_CPU = ("softmax", "sum", "attention", "linear", "layer_norm")


def swapped() -> list[Any]:
    return [
        v
        for v in every_variant()
        if v.op in STANDS_FOR
        and (v.name not in MODES_OF_DEFAULT or v.op == "softmax")  # which take arguments as compile.default does
        and (DEVICE.type == "cuda" or v.level != "compile" or (v.name == "compile.default" and v.op in COMPILED_ON_CPU))
    ]


@pytest.mark.sampled
@pytest.mark.parametrize("variant", swapped(), ids=variant_id)
def test_a_call_can_be_swapped(variant):
    """The same arguments, at every rung and in both passes, to the bound that the naive formula sets around float64."""
    skip_unless_it_runs(variant)
    if (reason := variant.here()) is not None:
        pytest.skip(reason)
    calls = [call for call in CALLS if call.op == variant.op]
    if variant.level in ("compile", "xla") and DEVICE.type == "cpu":
        calls = calls[:1]
    ours = getattr(kernel_ladder, variant.op)
    ran, refusals = 0, []
    for dtype in (torch.float32, torch.bfloat16):
        if ran and DEVICE.type == "cpu":
            break  # two dtypes have two kernels on a GPU alone
        for call in calls:
            inputs = call.inputs(dtype)
            try:
                results = call.results(ours, inputs, backend=variant.name)
            except UnsupportedError as error:
                refusals.append(str(error))
                continue
            ran += 1
            exact, naive = call.exact(inputs), call.results(ours, inputs, backend="torch.naive")
            if call.converts_to is torch.bfloat16:  # a gradient that was made in it, and widened
                assert all(x.equal(x.bfloat16().to(x.dtype)) for x in results)
                results, naive = [x.bfloat16() for x in results], [x.bfloat16() for x in naive]
            for i, (actual, right, formula) in enumerate(zip(results, exact, naive, strict=True)):
                name = f"{call.id} {dtype}, " + (f"gradient {i - 1}" if i else "output")
                found = compare(name, actual, right, formula, call.grad(results[0]) if i else None)
                assert found.agrees, str(found)
    if not ran:
        pytest.skip(refusals[0])


def test_a_mask_that_is_added_is_broadcast_too():
    """PyTorch's gradient of the mask beside ours, where query, key and value broadcast."""
    mask = torch.randn(1, 1, 9, 11, device=DEVICE)
    results = []
    for function in (F.scaled_dot_product_attention, kernel_ladder.attention):
        torch.manual_seed(0)
        q, k, v = (torch.randn(s, device=DEVICE, requires_grad=True) for s in ((2, 3, 9, 8), (1, 1, 11, 8), (11, 8)))
        m = mask.clone().requires_grad_()
        output = function(q, k, v, m)
        results.append([output, *torch.autograd.grad(output.square().sum(), (q, k, v, m))])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


def test_the_log_sum_exp_of_matrices():
    q, k, v = (torch.randn(n, 8, device=DEVICE) for n in (9, 11, 11))
    output, lse = kernel_ladder.attention(q, k, v, return_lse=True)
    assert (output.shape, lse.shape) == ((9, 8), (9,))
    torch.testing.assert_close(lse, (q @ k.T * 8**-0.5).logsumexp(-1))


@pytest.mark.parametrize("inside", [False, True], ids=["eager", "compiled"])
def test_evaluation_returns_the_input_itself(inside):
    x = torch.randn(5, device=DEVICE)
    function = lambda x: kernel_ladder.dropout(x, 0.3, training=False)  # noqa: E731
    if inside:
        torch._dynamo.reset()
        function = torch.compile(function, fullgraph=True, backend="eager")
    result = function(x)
    assert result.data_ptr() == x.data_ptr()
    assert result is x or inside


def test_evaluation_refuses_what_training_does():
    x = torch.zeros(2, device=DEVICE)
    for wrong, error, message in (
        ({"p": 1.5}, ValueError, "`p` must be at least 0"),
        ({"seed": -1}, ValueError, "`seed` must be from 0"),
        ({"backend": "tritn"}, kernel_ladder.BackendError, "did you mean 'triton'"),
    ):
        with pytest.raises(error, match=message):
            kernel_ladder.dropout(x, training=False, **wrong)
    with pytest.raises(TypeError, match="`training` must be a bool, got int"):
        kernel_ladder.dropout(x, training=0)
    with pytest.raises(TypeError, match="`seed` must be an int, got NoneType; every call draws its mask from a seed"):
        kernel_ladder.dropout(x)


RESTATED = [c for c in CALLS if c.id in ("dtype", "batch-broadcast", "vector-weight", "matrices")]


@pytest.mark.parametrize("call", RESTATED, ids=lambda call: f"{call.op}-{call.id}")
def test_inside_compile(call):
    torch._dynamo.reset()
    function = getattr(kernel_ladder, call.op)
    inside = torch.compile(lambda *a, **k: function(*a, **k), fullgraph=True, backend="aot_eager")
    inputs = call.inputs(torch.float32)
    for actual, expected in zip(call.results(inside, inputs), call.results(function, inputs), strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("op", ["softmax", "sum"])
@pytest.mark.parametrize("backend", [None, *table.LEVELS])
def test_a_bad_dtype(op, backend):
    function = getattr(kernel_ladder, op)
    with pytest.raises(TypeError, match=f"{op}: argument `dtype` is int32; accepted are float16, .*float64 and None"):
        function(torch.zeros(2), dtype=torch.int32, backend=backend)
    with pytest.raises(TypeError, match=f"{op}: argument `dtype` must be a torch.dtype or None, got str"):
        function(torch.zeros(2), dtype="float32", backend=backend)


# Every message that refuses an argument's type lists all that is accepted in its place.

#: Texts that an argument takes.
TEXTS = {
    "approximate": ("none", "tanh"),
    "is_causal": ("lower_right",),
    "activation": tuple(ACTIVATIONS),
    "reduction": REDUCTIONS,
    "out_dtype": tuple(map(dtype_name, OUTPUT_DTYPES)),
}

#: What an annotation's part is called.
CALLED = {
    torch.Tensor: "torch.Tensor",
    torch.dtype: "torch.dtype",
    bool: "bool",
    int: "int",
    float: "number",
    types.NoneType: "None",
    Sequence: "ints",
    list: "list of ints",
    tuple: "tuple",
}

#: Taken in some calls alone: without training, or where no weight is dropped.
SOMETIMES = {("dropout", "seed"): types.NoneType, ("attention", "seed"): types.NoneType}


def parts(annotation: Any) -> list[Any]:
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        return [part for each in typing.get_args(annotation) for part in parts(each)]
    return [typing.get_origin(annotation) or annotation]


def parameters() -> Iterator[Any]:
    for op in kernel_ladder.OPS:
        function = getattr(kernel_ladder, op)
        for name, annotation in typing.get_type_hints(function).items():
            if name not in ("return", "backend"):
                yield pytest.param(op, name, annotation, id=f"{op}-{name}")


@pytest.mark.parametrize(("op", "name", "annotation"), list(parameters()))
def test_a_refused_type_names_all_that_are_taken(op, name, annotation):
    with pytest.raises((TypeError, ValueError), match=f"^{op}: argument `{name}` must be") as raised:
        getattr(kernel_ladder, op)(**{**zeros(op), name: object()})
    message = str(raised.value)
    assert message.endswith("object") or "object" in message.rpartition("got")[2]
    if (op, name) in REFUSED:
        taken = inspect.signature(getattr(kernel_ladder, op)).parameters[name].default
        assert f"must be {taken:g}" in message if isinstance(taken, float) else f"must be {taken}" in message
        return
    for part in parts(annotation):
        if part is SOMETIMES.get((op, name)):
            continue
        for called in [repr(text) for text in TEXTS[name]] if part is str else [CALLED[part]]:
            assert called in message
    if name == "attn_mask":
        assert "causal bias of torch.nn.attention.bias" in message


def tensors() -> Iterator[Any]:
    for op in kernel_ladder.OPS:
        for name in zeros(op):
            if isinstance(zeros(op)[name], torch.Tensor):
                yield pytest.param(op, name, id=f"{op}-{name}")


@pytest.mark.parametrize(("op", "name"), list(tensors()))
@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64], ids=str)
def test_a_refused_dtype_names_all_that_are_taken(op, name, dtype):
    given = zeros(op)
    if given[name].dtype is dtype:
        dtype = torch.complex128
    if name == "attn_mask" or (given[name].is_floating_point() and op not in OWN_DTYPES):
        accepted = ("bool", "float32") if name == "attn_mask" else tuple(map(dtype_name, DTYPES))
    else:
        accepted = (dtype_name(given[name].dtype),)
    with pytest.raises(TypeError, match=f"{op}: argument `{name}` has dtype {dtype_name(dtype)}; accepted ") as raised:
        getattr(kernel_ladder, op)(**{**given, name: given[name].to(dtype)})
    for each in accepted:
        assert each in str(raised.value).partition("accepted")[2]


@pytest.mark.parametrize("op", kernel_ladder.OPS)
def test_outputs_of_the_calls_above_are_right_as_they_stand(op):
    """The calls that the tests of messages change one argument of."""
    case = typical_case(op)
    inputs = make_inputs(case, torch.float32, DEVICE)
    shapes = kernel_ladder.spec(op).output_shapes(inputs, case.options)
    assert tuple(x.shape for x in as_tuple(public(op, inputs, case.options))) == shapes
