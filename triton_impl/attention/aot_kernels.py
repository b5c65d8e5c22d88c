"""Specialisations of the attention kernels to compile ahead of time."""

from __future__ import annotations

from typing import Any

import triton

from triton_impl.attention.tiles import BOOLEAN
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
    precision = "ieee" if dtype == "fp32" else "tf32"
    constants = {"BAND": band, "MASK": mask, "PRECISION": precision, "BLOCK_D": head_dim, "BLOCK_DV": head_dim}
    constants |= {
        "EVEN_D": True,
        "EVEN_DV": True,
        "INT64_OFFSETS": False,
        "EVEN_Q": True,
        "VARLEN": False,
        "LSE_GRAD": False,
    }
    constants |= {name: 1 for name in kernel.arg_names if name.endswith("_d")} | more  # dense rows, as in most calls
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    config = triton.Config({"BLOCK_M": m, "BLOCK_N": n}, num_warps=num_warps, num_stages=num_stages)
    types = dict.fromkeys(("lse_ptr", "delta_ptr", "grad_lse_ptr"), "*fp32") | dict.fromkeys(
        ("cu_q_ptr", "cu_k_ptr"), "*i32"
    )
    types |= {"scale": "fp32", "scale_log2": "fp32"} | ({"mask_ptr": "*u8"} if mask == BOOLEAN else {})
    made = entry(kernel, dtype, constants, config)
    return made._replace(signature={name: types.get(name, type) for name, type in made.signature.items()})
