"""Kinds of calls, by which choices are remembered: what makes another kind, what does not, and what a look-up costs."""

from __future__ import annotations

import itertools
import time
import timeit

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import kernel_ladder
from kernel_ladder import table
from kernel_ladder.selection import choosers
from kernel_ladder.selection.kinds import KINDS
from kernel_ladder.spec import Inputs
from kernel_ladder.testing.samples import empty_inputs

#: Empty calls that a repeated choice takes at most, of 23 ns each; attention reads the layouts of three tensors.
#: Machines differ in this ratio: `add` took 24 on one and 41 on another.
EMPTY_CALLS, OF_ATTENTION = 44, 66


def call_of(op: str) -> tuple[list, dict]:
    """The tensors of an operation's first call in the sweep, without data, and its options."""
    case = kernel_ladder.spec(op).sweep[0]
    return list(empty_inputs(case, torch.bfloat16, "meta")), dict(case.options)


def kind_of(op: str, inputs: list | Inputs, options: dict):
    return KINDS[op](tuple(inputs), options, False)


def spread(x: torch.Tensor) -> torch.Tensor:
    """As `x`, its rows cut out of rows twice as long."""
    return x.new_empty((*x.shape[:-1], 2 * x.shape[-1]))[..., : x.shape[-1]]


def shifted(x: torch.Tensor) -> torch.Tensor:
    """As `x`, from an address off 16 bytes."""
    return x.new_empty(x.numel() + 1)[1:].view(x.shape)


def test_every_operation_has_a_kind():
    assert set(KINDS) == set(kernel_ladder.OPS)


@pytest.mark.parametrize("op", kernel_ladder.OPS)
def test_the_layout_of_the_first_tensor_is_in_its_kind(op):
    inputs, options = call_of(op)
    kinds = {kind_of(op, [change(inputs[0]), *inputs[1:]], options) for change in (lambda x: x, spread)}
    assert len(kinds) == 2
    if op != "linear_float8":  # a byte an element
        assert kind_of(op, [shifted(inputs[0]), *inputs[1:]], options) not in kinds


@pytest.mark.parametrize(
    ("op", "place"),
    [
        *(("attention", place) for place in (1, 2)),
        *(("attention_varlen", place) for place in (1, 2)),
        ("attention_paged", 1),
        *((op, 1) for op in ("matmul", "linear", "linear_cross_entropy", "linear_float8", "swiglu")),
        ("add_rms_norm", 1),
        ("bias_dropout_add_layer_norm", 2),
    ],
)
def test_so_are_the_layouts_of_others_of_its_size(op, place):
    inputs, options = call_of(op)
    usual = kind_of(op, inputs, options)
    inputs[place] = spread(inputs[place])
    assert kind_of(op, inputs, options) != usual


def as_models_hold(layout: str, heads: int, length: int, width: int) -> torch.Tensor:
    """Keys or values of two sequences: as they come from a projection, or the first `length` rows of a cache."""
    if layout == "contiguous":
        return torch.empty(2, heads, length, width, device="meta")
    if layout == "projected":
        return torch.empty(2, length, heads, width, device="meta").transpose(1, 2)
    return torch.empty(2, heads, 96, width, device="meta")[:, :, :length]


@pytest.mark.parametrize("layout", ["contiguous", "projected", "cached"])
def test_every_size_of_attention_is_in_its_kind(layout):
    _, options = call_of("attention")
    query = torch.empty(2, 8, 32, 16, device="meta")
    sizes = list(itertools.product((1, 2, 4), (24, 48), (8, 16)))
    kinds = set()
    for heads, length, d_v in sizes:
        key, value = (as_models_hold(layout, heads, length, width) for width in (16, d_v))
        kinds.add(kind_of("attention", [query, key, value, None], options))
    assert len(kinds) == len(sizes)


@pytest.mark.parametrize("op", ["matmul", "linear", "linear_cross_entropy", "linear_float8"])
def test_so_is_every_size_of_a_product(op):
    inputs, options = call_of(op)
    k, kinds = inputs[0].shape[-1], set()
    for n in (48, 96):
        shape = (k, n) if op == "matmul" else (n, k)
        kinds.add(
            kind_of(op, [inputs[0], torch.empty(shape, dtype=inputs[1].dtype, device="meta"), *inputs[2:]], options)
        )
    assert len(kinds) == 2


@pytest.mark.parametrize(("op", "place"), [("layer_norm", 1), ("layer_norm", 2), ("rms_norm", 1), ("add_rms_norm", 2)])
def test_norms_with_parameters_in_float32_or_without_are_kinds_of_their_own(op, place):
    inputs, options = call_of(op)
    parameter = inputs[place]
    kinds = set()
    for inputs[place] in (parameter, parameter.float(), None):
        kinds.add(kind_of(op, inputs, options))
    assert len(kinds) == 3


@pytest.mark.parametrize("op", ["attention", "attention_varlen", "attention_paged"])
@pytest.mark.parametrize("changed", [{"return_lse": True}, {"enable_gqa": True}, {"window_size": (3, 4)}])
def test_options_that_rungs_refuse_are_in_the_kind_of_attention(op, changed):
    inputs, options = call_of(op)
    usual = {**options, "return_lse": False, "enable_gqa": False, "window_size": (-1, -1)}
    assert kind_of(op, inputs, usual) != kind_of(op, inputs, {**usual, **changed})


def test_masks_of_attention_have_kinds_of_their_own():
    inputs, options = call_of("attention")
    lengths = inputs[0].shape[-2], inputs[1].shape[-2]
    rows = torch.empty(lengths, device="meta")
    masks = None, rows, rows.bool(), rows[:1], rows[:1].expand(lengths), rows.clone().requires_grad_()
    assert len({kind_of("attention", [*inputs, mask], options) for mask in masks}) == len(masks)


@pytest.mark.parametrize(
    ("op", "changed"),
    [("attention", {"scale": 0.5}), ("layer_norm", {"eps": 0.5}), ("dropout", {"p": 0.25, "seed": 7})],
)
def test_numbers_that_leave_the_work_as_it_is_make_no_other_kind(op, changed):
    inputs, options = call_of(op)
    again, _ = call_of(op)
    assert kind_of(op, inputs, options) == kind_of(op, again, {**options, **changed})


def test_tf32_is_a_kind_of_its_own(request):
    calls = [(op, *call_of(op)) for op in ("matmul", "linear", "linear_cross_entropy")]
    calls = [
        (op, [x.float() if x is not None and x.dtype is torch.bfloat16 else x for x in inputs], options)
        for op, inputs, options in calls
    ]
    before = [kind_of(*call) for call in calls]
    request.getfixturevalue("tf32")
    assert all(kind_of(*call) != kind for call, kind in zip(calls, before, strict=True))


@pytest.mark.parametrize("op", kernel_ladder.OPS)
def test_a_kind_of_symbolic_sizes_has_no_hash_and_no_guard(op):
    """A chooser then applies its rule: it neither remembers the example's sizes nor specialises a graph to them."""
    inputs, options = call_of(op)
    calls = inputs, [spread(inputs[0]), *inputs[1:]]
    shapes = ShapeEnv()
    with FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True) as mode:
        for tensors in calls:
            kind = kind_of(op, [None if x is None else mode.from_tensor(x) for x in tensors], options)
            with pytest.raises(TypeError):
                hash(kind)
    assert not shapes.guards


@pytest.mark.alone
@pytest.mark.parametrize("op", kernel_ladder.OPS)
def test_a_repeated_choice_costs_a_microsecond_or_of_attention_one_and_a_half(op):
    """In empty calls, which a busy machine slows as well. Rules alone would take longer for some operations."""
    inputs, options = call_of(op)
    if op == "attention":  # as models have it
        inputs[:3] = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs[:3])
    inputs = tuple(inputs)
    chooser = choosers.Chooser(op, "torch", table.named(op, "torch"), None)
    choose = chooser.rule_of_names
    with torch.no_grad():  # a call that wants a gradient asks fewer of its inputs
        choose(inputs, options)
        assert len(chooser._names) == 1
        calls = (lambda: choose(inputs, options)), (lambda: None)
        # In turn, so that a busy machine slows both.
        costs = [[timeit.timeit(call, number=100, timer=time.process_time) for call in calls] for _ in range(150)]
    chosen, nothing = map(min, zip(*costs, strict=True))
    assert chosen < (OF_ATTENTION if op.startswith("attention") else EMPTY_CALLS) * nothing
