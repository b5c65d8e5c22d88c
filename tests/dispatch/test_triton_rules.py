"""What the selection rules of Triton's norms and softmax name, by the length of a row."""

from __future__ import annotations

import pytest
import torch

from kernel_ladder import table
from kernel_ladder.selection import triton_matmul, triton_norm, triton_softmax

RULES = {**triton_norm.RULES, **triton_softmax.RULES}

#: Operation, length of a row, whether a gradient is wanted, and the rung to try first. More rows than few.
CHOICES = [
    ("layer_norm", 2048, False, "fused"),
    ("layer_norm", 2049, False, "cluster"),
    ("layer_norm", 32768, False, "cluster"),
    ("layer_norm", 32800, False, "persistent_cluster"),
    ("layer_norm", 8192, True, "fused"),
    ("layer_norm", 65536, True, "cluster"),
    ("rms_norm", 4096, False, "fused"),
    ("rms_norm", 131072, False, "cluster"),
    ("rms_norm", 8192, True, "fused"),
    ("add_rms_norm", 16384, True, "cluster"),
    ("bias_dropout_add_layer_norm", 16384, False, "cluster"),
    ("bias_dropout_add_layer_norm", 16416, False, "persistent_cluster"),
    ("bias_dropout_add_layer_norm", 16416, True, "cluster"),
    ("softmax", 8192, False, "fused"),
    ("softmax", 8193, True, "online"),
    ("softmax", 8200, True, "cluster"),
    ("softmax", 128256, False, "cluster"),
    ("softmax", 152064, False, "online"),  # 262,144 in a cluster
    ("softmax", 152064, True, "cluster"),
]


@pytest.mark.parametrize(("op", "n_cols", "gradient", "rung"), CHOICES)
def test_the_rung_tried_first(op, n_cols, gradient, rung):
    x = torch.empty(64, n_cols, device="meta", requires_grad=gradient)
    options = {"normalized_shape": (n_cols,), "dim": -1}
    assert RULES[op, "triton"]((x,), options) == (f"triton.{rung}",)


@pytest.mark.parametrize(
    ("rows", "n_cols", "gradient", "of_layer_norm", "of_rms_norm"),
    [
        (200, 4095, False, "fused", "fused"),
        (200, 7245, False, "online", "fused"),
        (200, 8193, False, "online", "online"),
        (200, 7245, True, "fused", "fused"),
        (200, 12001, True, "online", "online"),
        (67, 5599, False, "fused", "fused"),  # few rows
        (9, 69929, False, "cluster", "cluster"),
        (9, 69929, True, "online", "online"),
    ],
)
def test_rows_of_norms_off_16_bytes(rows, n_cols, gradient, of_layer_norm, of_rms_norm):
    x = torch.empty(rows, n_cols, device="meta", dtype=torch.bfloat16, requires_grad=gradient)
    options = {"normalized_shape": (n_cols,)}
    assert RULES["layer_norm", "triton"]((x,), options) == (f"triton.{of_layer_norm}",)
    for op in ("rms_norm", "add_rms_norm"):
        assert RULES[op, "triton"]((x,), options) == (f"triton.{of_rms_norm}",)


def test_few_rows_of_softmax_are_spread_over_clusters():
    few, more = (torch.empty(rows, 50257, device="meta", dtype=torch.bfloat16) for rows in (8, 9))
    assert [RULES["softmax", "triton"]((x,), {"dim": -1}) for x in (few, more)] == [
        ("triton.cluster",), ("triton.online",)
    ]  # fmt: skip


@pytest.mark.parametrize(("rows", "first"), [(1, "tiled"), (16, "tiled"), (17, "persistent")])
def test_products_of_few_rows_have_small_tiles(rows, first):
    a, weight = torch.empty(rows, 768, device="meta"), torch.empty(50257, 768, device="meta")
    assert triton_matmul.matmul((a, weight.mT), {})[0] == f"triton.{first}"
    assert triton_matmul.linear((a, weight, None), {}) == (("triton.tiled",) if rows <= 16 else ())


@pytest.mark.parametrize(
    ("a", "b", "dtype", "first"),
    [
        (((520, 2160), (1, 520)), ((2160, 152), (152, 1)), torch.bfloat16, "persistent"),
        (((280, 1656), (1656, 1)), ((1656, 640), (640, 1)), torch.bfloat16, "persistent"),  # lines of A alone
        (((280, 1656), (1656, 1)), ((1656, 640), (640, 1)), torch.float32, "tiled"),
        (((280, 1648), (1648, 1)), ((1648, 640), (640, 1)), torch.bfloat16, "tiled"),
        (((131, 61), (1, 131)), ((61, 2769), (2769, 1)), torch.bfloat16, "tiled"),  # off 16 bytes
        (((16, 1656), (1656, 1)), ((1656, 640), (640, 1)), torch.bfloat16, "tiled"),  # few rows
    ],
)
def test_products_whose_lines_triton_does_not_see_aligned(a, b, dtype, first, monkeypatch):
    monkeypatch.setattr(triton_matmul.gpu, "multiprocessors", lambda x: 132)
    operands = (torch.empty_strided(*of, dtype=dtype, device="meta") for of in (a, b))
    assert triton_matmul.matmul(tuple(operands), {})[0] == f"triton.{first}"


@pytest.mark.parametrize("op", sorted({op for op, _ in RULES}))
def test_the_rungs_named_exist(op):
    named = {f"triton.{rung}" for of, _, _, rung in CHOICES if of == op}
    assert named <= {v.name for v in table.variants(op, "triton")}
