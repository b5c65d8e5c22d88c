"""Selection: rules name the rungs to try first, a rung's own name is obeyed, and the choice can be printed."""

from __future__ import annotations

import functools
import json

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import kernel_ladder
from kernel_ladder import UnsupportedError, gpu, selection, table
from kernel_ladder.__main__ import main
from kernel_ladder.selection.attention import (
    backward_on_hopper,
    packed_backward_on_hopper,
    triton_without_specialized_warps,
)
from kernel_ladder.selection.choosers import Chooser
from kernel_ladder.selection.features import FEATURES
from kernel_ladder.selection.orders import ORDERS
from kernel_ladder.selection.rules import RULES

from ..conftest import DEVICE, pytorchs_own


def rung(name: str, refuses=lambda input: None):
    return table.register(
        "gelu",
        name,
        forward=lambda input, **options: (input, ()),
        unsupported=lambda input, **options: refuses(input),
    )


@pytest.fixture
def rule(scratch_table, monkeypatch):
    """Two rungs of gelu at a level, and a rule that prefers the first one for rows of at most 8."""
    rung("torch.short", lambda input: "takes float32 alone" if input.dtype != torch.float32 else None)
    rung("torch.long")
    prefer = lambda inputs, options: ("torch.absent", "torch.short") if inputs[0].shape[-1] <= 8 else ()  # noqa: E731
    monkeypatch.setitem(RULES, ("gelu", "torch"), prefer)


def chosen(x: torch.Tensor, backend: str = "torch") -> str:
    return selection.resolve("gelu", backend, (x,), {"approximate": "none"}).name


def test_a_rule_names_what_is_tried_first(rule):
    assert chosen(torch.zeros(3, 8, device=DEVICE)) == "torch.short"
    assert chosen(torch.zeros(3, 9, device=DEVICE)) == "torch.long"


def test_a_preferred_rung_may_refuse(rule):
    assert chosen(torch.zeros(3, 8, device=DEVICE, dtype=torch.float64)) == "torch.long"


def test_a_rungs_name_is_obeyed_whatever_the_rule(rule):
    assert chosen(torch.zeros(3, 8, device=DEVICE), "torch.long") == "torch.long"
    with pytest.raises(UnsupportedError, match="float32 alone"):
        chosen(torch.zeros(3, 8, device=DEVICE, dtype=torch.float64), "torch.short")


def test_the_explanation_ends_with_the_rung_that_is_taken(rule):
    x = torch.zeros(3, 8, device=DEVICE, dtype=torch.float64)
    tried = selection.explain("gelu", "torch", (x,), {"approximate": "none"})
    assert tried == [("torch.short", "takes float32 alone"), ("torch.long", None)]


def test_every_operation_has_an_order_and_rules_are_of_levels_or_auto():
    assert set(ORDERS) == set(kernel_ladder.OPS)
    for op, level in RULES:
        assert op in kernel_ladder.OPS
        assert level in (*table.LEVELS, "auto")


@pytest.mark.parametrize("op", kernel_ladder.OPS)
def test_what_is_printed_is_what_is_taken(op, capsys):
    spec = kernel_ladder.spec(op)
    case = min((c for c in spec.sweep), key=lambda c: sum(torch.Size(s).numel() for s in c.shapes if s is not None))
    assert main(["list", op, "--for", case.id, "--dtype", "float32", "--json"]) == 0
    rows = {row["backend"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == ["auto", *table.LEVELS]
    if DEVICE.type == "cpu":
        assert rows["auto"]["variant"] == pytorchs_own(op)
    assert rows["torch"]["variant"] in {v.name for v in table.variants(op, "torch")}
    assert all(each["reason"] for row in rows.values() for each in row["passed_over"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["list", "--for", "8x8"], "name one"),
        (["list", "gelu", "softmax", "--for", "8x8"], "name one"),
        (["list", "gelu", "--for", "8x8", "--dtype", "int"], "unknown `dtype` 'int'"),
    ],
)
def test_a_bad_question_is_told(arguments, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert said in capsys.readouterr().err


def test_an_unknown_shape_is_told(capsys):
    assert main(["list", "gelu", "--for", "eight"]) == 2
    assert "unknown `shape` 'eight'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("shape", "stride", "gradient", "names"),
    [
        ((17, 50257), (50257, 1), False, ("cuda.online",)),
        ((17, 50257), (50257, 1), True, ("cuda.shared", "cuda.online")),
        ((16, 50257), (50257, 1), False, ("cuda.cluster", "cuda.online")),  # few rows
        ((17, 50256), (50256, 1), False, ()),
        ((17, 33), (33, 1), False, ()),  # short
        ((229, 1767), (1767, 1), False, ("cuda.shared", "cuda.online")),
        ((16, 1767), (1767, 1), False, ()),
        ((50257, 17), (1, 50257), False, ()),  # along dim 1 not dense
    ],
)
def test_unaligned_rows_of_softmax(shape, stride, gradient, names):
    x = torch.empty_strided(shape, stride, dtype=torch.bfloat16, device="meta", requires_grad=gradient)
    assert RULES["softmax", "cuda"]((x,), {"dim": 1}) == names


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(selection.attention, "is_hopper", lambda device: True)


@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "of_softmax", "of_norm"),
    [
        (229, 1767, torch.bfloat16, "triton.fused", "triton.fused"),
        (229, 1768, torch.bfloat16, "triton.fused", None),  # half of the CUDA kernel's threads have no vector
        (229, 2048, torch.bfloat16, None, None),
        (229, 1024, torch.bfloat16, None, None),
        (229, 1767, torch.float32, None, None),
        (5471, 7245, torch.float16, "triton.fused", "triton.online"),
        (533, 14515, torch.bfloat16, "triton.online", "triton.online"),
        (3, 17943, torch.bfloat16, "triton.cluster", "triton.cluster"),
    ],
)
def test_auto_gives_rows_off_16_bytes_to_triton(rows, columns, dtype, of_softmax, of_norm):
    with FakeTensorMode():
        x = torch.empty(rows, columns, dtype=dtype, device="cuda:0")
        down = torch.empty(columns, rows, dtype=dtype, device="cuda:0").mT
    assert RULES["softmax", "auto"]((x,), {"dim": 1})[:1] == ((of_softmax,) if of_softmax else ())
    assert RULES["layer_norm", "auto"]((x, None, None), {"normalized_shape": (columns,)})[:1] == (
        (of_norm,) if of_norm else ()
    )
    for op in ("rms_norm", "add_rms_norm"):
        assert bool(RULES[op, "auto"]((x, x, None), {"normalized_shape": (columns,)})) == bool(of_norm)
    assert RULES["softmax", "auto"]((down,), {"dim": 1}) == ()
    assert {"triton.fused", "triton.online", "triton.cluster"} <= set(ORDERS["softmax"]) & set(ORDERS["layer_norm"])


@pytest.mark.parametrize(
    ("dtype", "classes", "smoothing", "taken"),
    [
        (torch.bfloat16, 16384, 0.0, True),
        (torch.bfloat16, 16383, 0.0, False),
        (torch.bfloat16, 65537, 0.0, False),
        (torch.bfloat16, 32000, 0.1, False),
        (torch.float32, 32000, 0.0, False),
    ],
)
def test_auto_gives_cross_entropy_of_some_classes_to_triton(dtype, classes, smoothing, taken):
    with FakeTensorMode():
        x, target = torch.empty(8, classes, dtype=dtype, device="cuda:0"), torch.empty(8, dtype=torch.int64)
    names = RULES["cross_entropy", "auto"]((x, target), {"label_smoothing": smoothing})
    assert names == (("triton.online",) if taken else ())


@pytest.mark.parametrize(
    ("shape", "dim", "taken"),
    [((8, 1536), -1, True), ((8, 1536), 0, False), ((8, 1536), None, False), ((8, 1024), 1, False),
     ((8, 16384), 1, False), ((4, 8, 5120), (2,), True), ((4, 8, 5120), (1, 2), False), ((1536,), 0, False)],
)  # fmt: skip
def test_auto_gives_sums_of_some_rows_to_triton(shape, dim, taken):
    with FakeTensorMode():
        x = torch.empty(shape, dtype=torch.bfloat16, device="cuda:0")
        wide = torch.empty(shape, dtype=torch.float32, device="cuda:0")
    assert RULES["sum", "auto"]((x,), {"dim": dim}) == (("triton.two_stage",) if taken else ())
    assert RULES["sum", "auto"]((wide,), {"dim": dim}) == ()


def test_auto_asks_a_level_when_its_turn_comes():
    """A call of a new shape waits for the choice, as each step of a model that generates does."""
    asked: list[str] = []
    order = [v for v in table.variants("gelu") if v.name in ("torch.builtin", "torch.naive", "triton.fused")]
    order.sort(key=lambda v: v.name)

    def choose(level):
        return lambda inputs, options: (asked.append(level), ())[1]

    levels = {level: (choose(level), [v for v in order if v.level == level]) for level in ("torch", "triton")}
    taken = Chooser("gelu", "auto", order, None, levels)._supported((), (torch.ones(3),), {"approximate": "none"})
    assert (next(taken).level, asked) == ("torch", ["torch"])
    assert {v.level for v in taken} <= {"torch", "triton"}
    assert asked == ["torch", "triton"]


def test_many_long_rows_of_softmax_off_16_bytes_stay_with_cuda():
    with FakeTensorMode():
        make = functools.partial(torch.empty, device="cuda:0", dtype=torch.bfloat16)
        x, few, trained = make(777, 50257), make(256, 50257), make(777, 50257, requires_grad=True)
    choices = [RULES["softmax", "auto"]((rows,), {"dim": 1})[0] for rows in (x, few, trained)]
    assert choices == ["cuda.online", "triton.online", "triton.online"]


@pytest.mark.parametrize(("rows", "columns", "taken"), [(1391, 11065, True), (1391, 11064, False), (421, 1887, False)])
def test_auto_gives_much_of_bias_gelu_off_16_bytes_to_triton(rows, columns, taken):
    with FakeTensorMode():
        x = torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda:0")
    assert RULES["bias_gelu", "auto"]((x, x), {"approximate": "none"}) == (("triton.fused",) if taken else ())


@pytest.mark.parametrize(
    ("op", "rows", "columns", "gradient", "block"),
    [
        ("rms_norm", 7, 419, False, True),
        ("rms_norm", 545, 411, False, False),
        ("rms_norm", 3075, 12123, False, False),
        ("rms_norm", 7, 420, False, True),
        ("rms_norm", 7, 424, False, False),  # on 16 bytes
        ("layer_norm", 35, 15595, False, False),
        ("layer_norm", 35, 15595, True, True),
        ("layer_norm", 35, 20707, True, False),
        ("layer_norm", 5471, 12001, False, True),
        ("layer_norm", 22545, 7245, False, False),
        ("add_rms_norm", 23501, 6237, False, True),
    ],
)
def test_norms_of_rows_off_16_bytes_prefer_a_block_a_row(op, rows, columns, gradient, block):
    with FakeTensorMode():
        x = torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda:0", requires_grad=gradient)
    names = RULES[op, "cuda"]((x,), {"normalized_shape": (columns,)})
    assert (names[0] == "cuda.block") == block
    assert {"cuda.registers", "cuda.cluster"} <= set(names), "others may be all that takes the call"


@pytest.mark.parametrize(
    ("heads", "keys", "head_dim", "causal", "of_cuda", "of_triton", "with_gradients"),
    [
        ((4, 1), 320, 128, True, True, True, True),
        ((16, 16), 512, 128, False, True, False, False),
        ((16, 16), 513, 128, False, False, False, False),
        ((2, 2), 433, 80, False, True, False, False),
        ((28, 4), 777, 128, True, False, True, True),
        ((32, 8), 1601, 128, True, False, False, False),
        ((256, 256), 320, 128, True, False, False, False),  # many tiles
    ],
)
def test_attention_of_few_tiles(heads, keys, head_dim, causal, of_cuda, of_triton, with_gradients, monkeypatch):
    monkeypatch.setattr(selection.attention.gpu, "multiprocessors", lambda x: 132)
    query, key = (torch.empty(1, h, keys, head_dim, dtype=torch.bfloat16, device="meta") for h in heads)
    trained, options = query.clone().requires_grad_(), {"is_causal": causal}
    assert RULES["attention", "cuda"]((query, key, key), options) == (("cuda.wgmma",) if of_cuda else ())
    assert RULES["attention", "triton"]((query, key, key), options) == (("triton.flash",) if of_triton else ())
    assert RULES["attention", "triton"]((trained, key, key), options) == (("triton.flash",) if with_gradients else ())


@pytest.mark.parametrize(
    ("batch", "heads", "keys", "head_dim", "taken"),
    [
        (1, (32, 8), 4096, 128, True),  # 256 blocks of the backward pass on 132 multiprocessors
        (2, (32, 8), 4096, 128, True),
        (1, (28, 4), 4096, 128, False),  # one wave
        (3, (32, 4), 2888, 64, False),  # 2.1 waves
        (1, (28, 4), 777, 128, False),
        (1, (28, 28), 777, 128, True),  # a head of keys each
        (1, (8, 8), 5115, 80, True),
        (1, (8, 8), 5115, 84, False),  # not measured
    ],
)
def test_auto_trains_grouped_attention_in_cuda_where_it_fills_waves(hopper, batch, heads, keys, head_dim, taken,
                                                                    monkeypatch):  # fmt: skip
    monkeypatch.setattr(selection.attention.gpu, "multiprocessors", lambda x: 132)
    with FakeTensorMode():
        make = functools.partial(torch.empty, device="cuda:0", dtype=torch.bfloat16)
        query, key = make(batch, heads[0], keys, head_dim, requires_grad=True), make(batch, heads[1], keys, head_dim)
        assert bool(RULES["attention", "auto"]((query, key, key), {"is_causal": True})) == taken
        assert RULES["attention", "auto"]((query.detach(), key, key), {"is_causal": True}), "forward alone"


@pytest.mark.parametrize(
    ("queries", "mask_dtype", "gradient", "names"),
    [
        (777, torch.bool, False, ("triton.flash",)),
        (777, torch.bool, True, ("triton.flash",)),
        (1, torch.bool, False, ("cuda.split_kv", "triton.flash")),
        (1, torch.bfloat16, False, ("cuda.split_kv",)),
        (777, torch.bfloat16, False, ()),
    ],
)
def test_auto_gives_boolean_masks_to_triton_on_hopper(hopper, queries, mask_dtype, gradient, names):
    with FakeTensorMode():
        make = functools.partial(torch.empty, device="cuda:0", dtype=torch.bfloat16)
        query, key = make(1, 4, queries, 64, requires_grad=gradient), make(1, 4, 777, 64)
        mask = torch.empty(1, 1, 1, 777, dtype=mask_dtype, device="cuda:0")
        assert RULES["attention", "auto"]((query, key, key, mask), {}) == names
        single = make(1, 4, queries, 64, dtype=torch.float32)
        assert RULES["attention", "auto"]((single, single, single, mask), {}) == ()


@pytest.mark.parametrize("heads_kv", [1, 2])
def test_packed_sequences_with_gradients_prefer_triton(heads_kv):
    query, key = torch.zeros(8, 2, 16), torch.zeros(8, heads_kv, 16)
    offsets = torch.tensor([0, 8], dtype=torch.int32)
    prefer = RULES["attention_varlen", "auto"]
    assert prefer((query, key, key, offsets, offsets), {}) == ()
    assert prefer((query, key.requires_grad_(), key, offsets, offsets), {}) == ("triton.flash",)


@pytest.mark.parametrize(
    ("head_dim", "keys", "heads_kv", "step"),
    [
        (64, 1024, 64, "wgmma"),
        (64, 1025, 64, "warp_specialized"),
        (65, 512, 64, "wgmma"),  # padded to 128
        (128, 513, 64, "warp_specialized"),
        (128, 777, 8, "wgmma"),  # 56 blocks
        (128, 4096, 4, "warp_specialized"),
        (136, 64, 64, "wgmma"),
        (256, 16384, 64, "wgmma"),
    ],
)
def test_whose_backward_pass_attention_has_on_hopper(head_dim, keys, heads_kv, step):
    assert backward_on_hopper(head_dim, keys, heads_kv, gpu.KNOWN["H100"].multiprocessors) == step


@pytest.mark.parametrize(
    ("head_dim", "rows", "sequences", "step"),
    [
        (64, 64, 1, "warp_specialized"),
        (128, 64, 2, "warp_specialized"),
        (128, 63, 2, "flash"),  # short sequences
        (136, 4096, 8, "flash"),
    ],
)
def test_whose_backward_pass_packed_sequences_have_on_hopper(head_dim, rows, sequences, step):
    assert packed_backward_on_hopper(head_dim, rows, sequences) == step


@pytest.mark.parametrize(
    ("options", "keys", "narrow"),
    [
        ({}, 4096, False),
        ({"window_size": None}, 4096, False),
        ({"window_size": (255, -1)}, 4096, False),
        ({"window_size": (-1, 0)}, 4096, False),
        ({"window_size": (255, -1), "is_causal": True}, 256, True),
        ({"window_size": (255, 255), "is_causal": "lower_right"}, 256, True),
        ({"window_size": (128, 127)}, 256, True),
        ({"window_size": (256, 0)}, 257, False),
        ({"window_size": (8191, 0)}, 4096, False),
    ],
)
def test_a_window_counts_by_the_keys_that_a_query_sees(options, keys, narrow):
    inputs = tuple(torch.empty(1, 16, 4096, 128, dtype=torch.bfloat16, device="meta") for _ in range(3))
    assert triton_without_specialized_warps(inputs, options) == (("triton.tma",) if narrow else ())
    assert FEATURES["attention"](inputs, options).sizes == (16, 4096, keys, 128, 128)


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
def test_rules_can_be_traced(dynamic):
    """torch.compile traces a choice where a transform is active: rules count with sizes that may be symbols."""

    def choices(query: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> tuple[object, ...]:
        causal, rows = {"is_causal": True}, (x[:, :768], weight, None)
        of_attention = [RULES["attention", level]((query,) * 3, causal) for level in ("cuda", "triton")]
        of_softmax = [RULES["softmax", level]((x,), {"dim": 1}) for level in ("cuda", "triton", "auto")]
        norm, levels = {"normalized_shape": (x.shape[1],)}, ("cuda", "triton", "auto")
        of_norms = [RULES[op, level]((x, x), norm) for op in ("rms_norm", "add_rms_norm") for level in levels]
        of_linear = [RULES["linear", level](rows, {"activation": None}) for level in ("cuda", "triton", "auto")]
        return *of_attention, *of_softmax, *of_norms, *of_linear, gpu.multiprocessors(query)

    traced = torch.compile(choices, backend="eager", fullgraph=True, dynamic=dynamic)
    for batch, length in ((2, 777), (3, 800)):
        query = torch.zeros(batch, 12, length, 64, dtype=torch.bfloat16)
        x, weight = torch.zeros(batch + 20, 50257, dtype=torch.bfloat16), torch.zeros(512, 768, dtype=torch.bfloat16)
        assert traced(query, x, weight) == choices(query, x, weight)
