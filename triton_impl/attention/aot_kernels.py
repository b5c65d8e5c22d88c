"""Specialisations of the attention kernels that tests compile ahead of time."""

from __future__ import annotations

from typing import Any

import torch
import triton

from triton_impl.attention import specialized_keys, specialized_passing, specialized_queries, warp_specialized
from triton_impl.attention.backward import _key_value_kernel, _query_kernel
from triton_impl.attention.flash import _forward_kernel
from triton_impl.attention.mask_grad import _mask_grad_kernel
from triton_impl.attention.merge import _merge_kernel
from triton_impl.attention.naive import _naive_kernel
from triton_impl.attention.split_kv import CONFIGS, _split_kernel
from triton_impl.attention.tiles import (
    ADDITIVE,
    BELOW_DIAGONAL,
    BETWEEN_DIAGONALS,
    BOOLEAN,
    DROPOUT_BY_EIGHTS,
    NO_DROPOUT,
)
from triton_impl.attention.tma import _tma_kernel
from triton_impl.attention_paged import _paged_combine_kernel, _paged_split_kernel
from triton_impl.runtime.aot import Entry, entry


def ahead_of_time(
    kernel,
    head_dim: int,
    m: int,
    n: int,
    num_warps: int,
    num_stages: int,
    band: int = 0,
    mask: int = 0,
    dtype: str = "bf16",
    **more: Any,
) -> Entry:
    """An entry of a kernel with tiles of `m` queries and `n` keys, for operands with dense rows."""
    precision = "ieee" if dtype == "fp32" else "tf32"
    constants = {"BAND": band, "MASK": mask, "PRECISION": precision, "BLOCK_D": head_dim, "BLOCK_DV": head_dim}
    constants |= {
        "EVEN_D": True,
        "EVEN_DV": True,
        "INT64_OFFSETS": False,
        "EVEN_Q": True,
        "VARLEN": False,
        "DROPOUT": NO_DROPOUT,
    }
    constants |= {"LSE_GRAD": False, "HEAD_DIM": head_dim}
    constants |= {name: 1 for name in kernel.arg_names if name.endswith("_d")} | more
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    config = triton.Config({"BLOCK_M": m, "BLOCK_N": n}, num_warps=num_warps, num_stages=num_stages)
    types = dict.fromkeys(("lse_ptr", "delta_ptr", "grad_lse_ptr"), "*fp32") | dict.fromkeys(
        ("cu_q_ptr", "cu_k_ptr"), "*i32"
    )
    types |= {"scale": "fp32", "scale_log2": "fp32", "drop_scale": "fp32"} | (
        {"mask_ptr": "*u8"} if mask == BOOLEAN else {}
    )
    made = entry(kernel, dtype, constants, config)
    return made._replace(signature={name: types.get(name, type) for name, type in made.signature.items()})


def _tma(head_dim: int, m: int, n: int, num_warps: int, num_stages: int, band: int = 0) -> Entry:
    made = ahead_of_time(_tma_kernel, head_dim, m, n, num_warps, num_stages, band)
    rows = {"q_desc": m, "k_desc": n, "v_desc": n}
    described = {name: f"tensordesc<bf16[1,1,{count},{head_dim}]>" for name, count in rows.items()}
    return made._replace(signature=made.signature | described)


def _described(rows: dict[str, int], head_dim: int) -> dict[str, str]:
    """The types of Gluon's descriptors, by argument, with tiles of so many rows."""
    layouts = {name: warp_specialized._layout(n, head_dim, torch.bfloat16) for name, n in rows.items()}
    return {name: f"tensordesc<bf16[1, 1, {n}, {head_dim}],{layouts[name]!r}>" for name, n in rows.items()}


def _warp_specialized(head_dim: int, choice: int, band: int = 0) -> Entry:
    config = warp_specialized.configs(head_dim)[choice]
    constants = {"BAND": band, "BLOCK_D": head_dim, "BLOCK_DV": head_dim}
    made = entry(warp_specialized._specialized_kernel, "bf16", constants, config)
    keys = config.kwargs["BLOCK_N"]
    rows = {"q_desc": warp_specialized.BLOCK_M.value, "k_desc": keys, "v_desc": keys}
    return made._replace(signature=made.signature | {"lse_ptr": "*fp32", "factor": "fp32"} | _described(rows, head_dim))


def _specialized_backward(kernel, head_dim: int, choice: int, band: int = 0) -> Entry:
    of_keys = kernel is specialized_keys._of_keys_kernel
    tiles = specialized_keys.TILES if of_keys else specialized_queries.TILES
    config = specialized_passing.configs(tiles[head_dim])[choice]
    made = entry(kernel, "bf16", {"BAND": band, "BLOCK_D": head_dim, "BLOCK_DV": head_dim}, config)
    kept, passing = specialized_passing.KEPT.value, config.kwargs["ROWS"]
    rows = {name: passing if of_keys == (name in ("q_desc", "g_desc")) else kept for name in DESCRIBED}
    return made._replace(signature=made.signature | STATISTICS | _described(rows, head_dim))


DESCRIBED = ("q_desc", "g_desc", "k_desc", "v_desc")
STATISTICS = {"lse_ptr": "*fp32", "delta_ptr": "*fp32", "factor": "fp32", "scale": "fp32"}


def _merge(before: str, into: str) -> Entry:
    """Results of head dimension 128, in bfloat16, merged with `before`."""
    constants = {"BLOCK_M": 32, "BLOCK_D": 128, "i_d": 1, "o_d": 1, "f_d": 1, "l_s": 1, "m_s": 1}
    types = {"lse_ptr": "*fp32", "found_lse_ptr": "*fp32", "output_ptr": f"*{before}", "into_ptr": f"*{into}"}
    return entry(_merge_kernel, "bf16", constants, types=types)


AOT = [
    ahead_of_time(_naive_kernel, 64, 64, 64, 4, 3, IS_CAUSAL=True),
    ahead_of_time(_naive_kernel, 128, 64, 64, 4, 3, IS_CAUSAL=False),
    ahead_of_time(_naive_kernel, 64, 32, 32, 4, 3, dtype="fp32", IS_CAUSAL=True),
    ahead_of_time(_forward_kernel, 64, 128, 64, 4, 3),
    ahead_of_time(_forward_kernel, 64, 128, 64, 4, 3, BELOW_DIAGONAL),
    ahead_of_time(_forward_kernel, 128, 128, 128, 8, 2),
    ahead_of_time(_forward_kernel, 128, 128, 64, 8, 3, BELOW_DIAGONAL),
    ahead_of_time(_forward_kernel, 256, 64, 32, 8, 2, BELOW_DIAGONAL),
    ahead_of_time(_forward_kernel, 128, 128, 64, 8, 3, BETWEEN_DIAGONALS),
    ahead_of_time(_forward_kernel, 128, 64, 32, 4, 2, mask=BOOLEAN),
    ahead_of_time(_forward_kernel, 64, 64, 64, 4, 3, mask=ADDITIVE),
    ahead_of_time(_key_value_kernel, 64, 64, 128, 8, 2, BELOW_DIAGONAL),
    ahead_of_time(_key_value_kernel, 128, 32, 64, 4, 2),
    ahead_of_time(_key_value_kernel, 256, 32, 32, 8, 2, BELOW_DIAGONAL),
    ahead_of_time(_key_value_kernel, 64, 64, 128, 8, 2, BETWEEN_DIAGONALS),
    ahead_of_time(_key_value_kernel, 64, 32, 64, 4, 2, mask=BOOLEAN),
    ahead_of_time(_query_kernel, 64, 128, 64, 8, 2, BELOW_DIAGONAL),
    ahead_of_time(_query_kernel, 128, 128, 64, 8, 2),
    ahead_of_time(_query_kernel, 256, 64, 32, 8, 2, BELOW_DIAGONAL),
    ahead_of_time(_query_kernel, 128, 128, 64, 8, 2, BETWEEN_DIAGONALS),
    ahead_of_time(_query_kernel, 128, 64, 32, 4, 2, mask=BOOLEAN),
    ahead_of_time(_forward_kernel, 128, 32, 32, 8, 1, dtype="fp32"),
    ahead_of_time(_forward_kernel, 256, 16, 32, 8, 1, BELOW_DIAGONAL, dtype="fp32"),
    ahead_of_time(_key_value_kernel, 128, 32, 16, 8, 1, dtype="fp32"),
    ahead_of_time(_key_value_kernel, 256, 16, 16, 8, 1, BELOW_DIAGONAL, dtype="fp32"),
    ahead_of_time(_key_value_kernel, 64, 32, 64, 4, 2, DROPOUT=DROPOUT_BY_EIGHTS),
    ahead_of_time(_mask_grad_kernel, 128, 32, 64, 4, 1, BELOW_DIAGONAL, SUM_Q=False, SUM_K=False),
    ahead_of_time(_mask_grad_kernel, 256, 16, 16, 4, 1, dtype="fp32", SUM_Q=True, SUM_K=False),
    _tma(64, 128, 128, 8, 3),
    _tma(128, 128, 128, 8, 2),
    _tma(128, 128, 64, 8, 3, BELOW_DIAGONAL),
    _tma(128, 128, 128, 8, 2, BETWEEN_DIAGONALS),
    _tma(256, 128, 64, 8, 2, BELOW_DIAGONAL),
    _warp_specialized(64, 0),
    _warp_specialized(64, 1),
    _warp_specialized(128, 0, BELOW_DIAGONAL),
    _warp_specialized(128, 1),
    _warp_specialized(256, 0, BETWEEN_DIAGONALS),
    _specialized_backward(specialized_keys._of_keys_kernel, 64, 0),
    _specialized_backward(specialized_keys._of_keys_kernel, 128, 0, BELOW_DIAGONAL),
    _specialized_backward(specialized_keys._of_keys_kernel, 128, 0, BETWEEN_DIAGONALS),
    _specialized_backward(specialized_queries._of_queries_kernel, 64, 0),
    _specialized_backward(specialized_queries._of_queries_kernel, 128, 1, BELOW_DIAGONAL),
    ahead_of_time(_split_kernel, 128, 16, 64, 4, 3),
    ahead_of_time(_split_kernel, 128, 16, 128, 4, 2, BELOW_DIAGONAL),
    ahead_of_time(_split_kernel, 256, 32, 64, 4, 3),
    ahead_of_time(_split_kernel, 64, 32, 64, 4, 4, mask=BOOLEAN),
    _merge("bf16", "bf16"),
    _merge("bf16", "fp32"),
    _merge("fp32", "fp32"),
]


def _paged(head_dim: int, rows: int, choice: int, page_size: int, band: int = 0, dtype: str = "bf16") -> Entry:
    config = CONFIGS[choice]
    constants = {"BAND": band, "PRECISION": "ieee" if dtype == "fp32" else "tf32", "PAGE_SIZE": page_size}
    constants |= {"BLOCK_D": head_dim, "BLOCK_DV": head_dim, "EVEN_D": True, "EVEN_DV": True, "BLOCK_M": rows}
    constants |= {"q_d": 1, "k_d": 1, "v_d": 1, "t_p": 1, "n_b": 1}
    types = {"out_ptr": "*fp32", "lse_ptr": "*fp32", "table_ptr": "*i32", "lengths_ptr": "*i32", "scale_log2": "fp32"}
    return entry(_paged_split_kernel, dtype, constants, config, types=types)


#: Of keys in pages: `attention_paged`. Each program of the second kernel has one row.
AOT_PAGED = [
    _paged(128, 16, 0, 16),
    _paged(128, 64, 2, 256, BELOW_DIAGONAL),
    _paged(64, 16, 1, 16, BETWEEN_DIAGONALS),
    _paged(256, 32, 3, 1),
    _paged(64, 16, 3, 16, dtype="fp32"),
    entry(
        _paged_combine_kernel,
        "bf16",
        {"BLOCK_SPLITS": 32, "BLOCK_DV": 128, "n_b": 1},
        types=dict.fromkeys(("partial_ptr", "partial_lse_ptr", "lse_ptr"), "*fp32") | {"lengths_ptr": "*i32"},
    ),
]

#: Of packed sequences: `attention_varlen`, which runs the same kernels.
AOT_VARLEN = [
    ahead_of_time(_forward_kernel, 128, 128, 64, 8, 3, BELOW_DIAGONAL, VARLEN=True),
    ahead_of_time(_forward_kernel, 64, 64, 64, 4, 3, BETWEEN_DIAGONALS, VARLEN=True),
    ahead_of_time(_key_value_kernel, 128, 32, 128, 8, 2, BELOW_DIAGONAL, VARLEN=True, EVEN_Q=False),
    ahead_of_time(_query_kernel, 128, 64, 64, 4, 2, BELOW_DIAGONAL, VARLEN=True),
]
