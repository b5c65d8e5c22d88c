"""A rung launches its own kernels: none that another rung launches, and none of another module, in either pass.

A kernel of Triton is its rung's own in the rung's module, one of CUDA by the rung in its name. What rungs share or
borrow openly stands in the tables here, each with its reason: helpers of no rung's idea, and backward passes that serve
several rungs.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch

import kernel_ladder
from kernel_ladder import table
from kernel_ladder.inspection.launches import launched
from kernel_ladder.spec import Case, Inputs, Output, as_leaves, each, has_gradient
from kernel_ladder.testing.samples import make_inputs

from ..conftest import DEVICE, needs_gpu

ROOT = Path(__file__).resolve().parents[2]

#: (level, operation) -> kernels that several rungs' forward passes launch, and why.
SHARED: dict[tuple[str, str], dict[str, str]] = {
    ("cuda", "matmul"): {
        "matmul_persistent_kernel": "stream_k is persistent's kernel with another schedule; the instance with plain"
        " loads serves every rung on Hopper where TMA cannot read an operand and a padded copy does not pay",
        "matmul_persistent_pad_kernel": "pads operands that TMA cannot read",
    },
    ("triton", "cross_entropy"): {
        "triton_impl.cross_entropy.rows:_cross_entropy_sum_kernel": "adds up rows' losses, no rung's idea"
    },
    **{
        ("cuda", op): {"attention_naive_fill_kernel": "writes the results of a call without keys"}
        for op in ("attention", "attention_varlen", "attention_paged")
    },
    ("cuda", "sum"): dict.fromkeys(
        ("sum_coalesced_columns_kernel", "sum_coalesced_rows_kernel", "sum_coalesced_strided_rows_kernel"),
        "two_stage is coalesced's kernels, over parts of a long sum and then over the parts' sums",
    ),
    ("cuda", "linear"): {
        "linear_naive_kernel": "with an inner dimension of 0 persistent has no tile: naive's kernel writes the bias",
        "matmul_persistent_pad_kernel": "pads operands that TMA cannot read",
    },
}

_PARTIALS = {"*": {"triton_impl.common.column_sum:*": "adds up the blocks' partial sums of a parameter's gradient"}}
_NORM_PARTIALS = {
    **_PARTIALS,
    "triton.cluster": {"triton_impl.norm.cluster_backward:*": "the backward pass of cluster, a file of its own"},
}
_ATTENTION_BACKWARD = {
    "triton_impl.attention.backward:*": "one backward pass of Triton serves every fused forward",
    "triton_impl.attention.delta:*": "the sums of each row that every backward pass needs",
}
_SUM_ROWS = {"*sum_coalesced_*": "the gradient of what was broadcast is a sum, by sum's last rung"}
_EVERY_LONGER = "norms have three backward passes: naive, block, and one for all rungs from registers on"
_OF_NORM = {
    "*": {"norm_backward_column_sum_kernel": "adds up the blocks' partial sums of a parameter's gradient"},
    **{
        f"cuda.{rung}": {"norm_backward_registers_*": _EVERY_LONGER}
        for rung in ("smem_pipeline", "cluster", "persistent_cluster")
    },
}
_FASTEST = dict.fromkeys(
    ("attention_backward_wgmma_*", "attention_backward_warp_specialized_*"),
    "has no backward pass of its own: the fastest on Hopper by head dimension and number of keys",
)
_OF_BIAS_GELU = {
    **dict.fromkeys(
        ("bias_gelu_backward_multirow_*", "gelu_backward_vectorized_kernel"),
        "the gradient in front of the activation is bias_gelu's or gelu's",
    ),
    **_SUM_ROWS,
}
_ALONG_K = dict.fromkeys(
    ("linear_mma_kernel", "linear_registers_kernel"), "matmul's mma and registers take them for operands along k"
)
_SELECTED = {"matmul_*": "gradients are other products: the selection names a rung for each"}
_OF_CHUNKS = {
    "matmul_*": "a chunk's products are matmul's, by the rung that the selection names for each",
    **_ALONG_K,
    "cross_entropy_*": "the loss of a chunk's logits is cross_entropy's online",
}

#: (level, operation, pass) -> rung, or "*" for all -> patterns of kernels of no module of that rung, and why.
BORROWED: dict[tuple[str, str, str], dict[str, dict[str, str]]] = {
    ("triton", "attention", "backward"): {
        "*": {
            **_ATTENTION_BACKWARD,
            "triton_impl.attention.mask_grad:*": "the gradient of a mask, of every backward pass that has one",
        },
        "triton.warp_specialized": {"triton_impl.attention.specialized_*": "its own, in files of their own"},
    },
    ("triton", "attention_varlen", "backward"): {"*": _ATTENTION_BACKWARD},
    ("triton", "add", "backward"): {
        "*": {"triton_impl.sum.two_stage:*": "the gradient of what was broadcast is a sum, by sum's last rung"}
    },
    **{("triton", op, "backward"): _NORM_PARTIALS for op in ("layer_norm", "rms_norm", "add_rms_norm")},
    ("triton", "bias_dropout_add_layer_norm", "backward"): {
        **_NORM_PARTIALS,
        "*": {
            **_PARTIALS["*"],
            "triton_impl.bias_dropout_add_layer_norm.common:*": "dropout's gradient after that of the norm",
        },
    },
    ("triton", "bias_gelu", "backward"): _PARTIALS,
    ("triton", "linear", "backward"): {
        "*": {
            **_PARTIALS["*"],
            "triton_impl.bias_gelu:*": "the gradient in front of the activation is bias_gelu's",
            "triton_impl.sum.two_stage:*": "the gradient of a bias alone is a sum",
        },
        "triton.tiled": {"triton_impl.gelu:*": "the gradient in front of an activation without a bias is gelu's"},
    },
    **{
        ("triton", "linear_cross_entropy", pass_): {
            "*": {
                "triton_impl.cross_entropy.*": "the loss of a chunk's logits is cross_entropy's online",
                "triton_impl.matmul.*": "a chunk's logits are matmul's tiled or persistent",
            }
        }
        for pass_ in ("forward", "backward")
    },
    **{("cuda", "linear_cross_entropy", pass_): {"*": _OF_CHUNKS} for pass_ in ("forward", "backward")},
    ("cuda", "softmax", "backward"): {
        "cuda.multirow": {"softmax_backward_registers_kernel": "has the backward pass of registers"}
    },
    ("cuda", "matmul", "backward"): {
        **{
            f"cuda.{rung}": dict.fromkeys(
                ("matmul_registers_kernel", "linear_registers_kernel"),
                "registers takes operands that lie otherwise than those of the call",
            )
            for rung in ("thread_tile", "vectorized", "double_buffered", "registers_tma")
        },
        "cuda.skinny": {"matmul_mma_kernel": "the gradients of few rows are products of many", **_ALONG_K},
        "cuda.split_k": _SELECTED,
    },
    ("cuda", "attention", "backward"): {
        "cuda.pingpong": _FASTEST,
        "cuda.persistent": _FASTEST,
        "cuda.split_kv": {"attention_flash_*": "has the backward pass of flash"},
    },
    ("cuda", "attention_varlen", "backward"): {
        "cuda.pingpong": {**_FASTEST, "attention_flash_*": "head dimensions above 128 have no other backward pass"}
    },
    ("cuda", "add", "backward"): {"*": _SUM_ROWS},
    **{("cuda", op, "backward"): _OF_NORM for op in ("layer_norm", "rms_norm", "add_rms_norm")},
    ("cuda", "bias_dropout_add_layer_norm", "backward"): {
        **_OF_NORM,
        **{
            f"cuda.{rung}": dict.fromkeys(
                ("norm_backward_registers_*", "bias_dropout_add_layer_norm_backward_registers_*"), _EVERY_LONGER
            )
            for rung in ("smem_pipeline", "cluster")
        },
    },
    ("cuda", "bias_gelu", "backward"): {
        "cuda.vectorized": {"bias_gelu_backward_multirow_*": "has the backward pass of multirow"}
    },
    ("cuda", "linear", "backward"): {
        "cuda.registers": _OF_BIAS_GELU,
        "cuda.mma": _OF_BIAS_GELU,
        **{rung: {**_OF_BIAS_GELU, **_SELECTED} for rung in ("cuda.persistent", "cuda.skinny")},
    },
}


def lent_to(rung: str, op: str, pass_: str) -> dict[str, str]:
    """Patterns of the kernels that a rung may launch beside its own, and why."""
    level = rung.partition(".")[0]
    of_rungs = BORROWED.get((level, op, pass_), {})
    return {**SHARED.get((level, op), {}), **of_rungs.get("*", {}), **of_rungs.get(rung, {})}


def is_own(kernel: str, rung: str, op: str, rungs: Iterable[str]) -> bool:
    """Whether a kernel is of the rung's module. Of CUDA's names the longest rung in one is its own."""
    level, _, step = rung.partition(".")
    if level == "triton":
        module = kernel.partition(":")[0]
        return module == f"triton_impl.{op}" or module.endswith(f".{step}")
    named = [name for name in (r.partition(".")[2] for r in rungs) if f"_{name}_" in kernel]
    return max(named, key=len, default="") == step


def not_own(found: dict[str, set[str]], op: str, pass_: str) -> dict[str, set[str]]:
    """By rung, the kernels of a pass that are neither its own nor lent to it."""
    strange = {
        rung: {
            kernel
            for kernel in kernels
            if not is_own(kernel, rung, op, found)
            and not any(fnmatchcase(kernel, pattern) for pattern in lent_to(rung, op, pass_))
        }
        for rung, kernels in found.items()
    }
    return {rung: kernels for rung, kernels in strange.items() if kernels}


def shared_by(kernels: dict[str, set[str]], openly: dict[str, str]) -> dict[str, list[str]]:
    """Kernels that more than one rung launches, with the rungs, but for those that are shared openly."""
    users: dict[str, list[str]] = {}
    for rung, names in kernels.items():
        for name in names - openly.keys():
            users.setdefault(name, []).append(rung)
    return {name: rungs for name, rungs in users.items() if len(rungs) > 1}


@functools.cache
def of_triton() -> dict[str, dict[str, dict[str, list[str]]]]:
    """Operation -> rung -> pass -> kernels, from a process whose Triton compiles for a GPU that is pretended."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.dispatch.triton_launches"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_triton_rungs_launch_their_own_kernels():
    """One test for all operations, because each worker that asks compiles every kernel."""
    for op, rungs in of_triton().items():
        forward, backward = (
            {rung: set(passes[pass_]) for rung, passes in rungs.items()} for pass_ in ("forward", "backward")
        )
        assert all(forward.values()), f"{op}: no kernel was launched: {forward}"
        assert not shared_by(forward, SHARED.get(("triton", op), {})), op
        assert not not_own(forward, op, "forward"), op
        assert not not_own(backward, op, "backward"), op
    # A table that names what no rung launches any more would hide the next one.
    for (level, op, pass_), of_rungs in BORROWED.items():
        for rung, patterns in of_rungs.items() if level == "triton" else ():
            launches = [k for r, passes in of_triton()[op].items() if rung in ("*", r) for k in passes[pass_]]
            unused = [pattern for pattern in patterns if not any(fnmatchcase(k, pattern) for k in launches)]
            assert not unused, f"{op} {pass_}, {rung}: no kernel is of {unused}"


@needs_gpu
@pytest.mark.parametrize("op", kernel_ladder.OPS)
def test_cuda_rungs_launch_their_own_kernels(op):
    if (reason := table.unavailable(op, "cuda")) is not None:
        pytest.skip(reason)
    found = {variant.name: of_cuda(variant) for variant in table.variants(op, "cuda") if variant.here() is None}
    forward, backward = ({rung: passes[i] for rung, passes in found.items()} for i in range(2))
    assert all(forward.values()), f"no kernel was launched: {forward}"
    assert not shared_by(forward, SHARED.get(("cuda", op), {}))
    assert not not_own(forward, op, "forward")
    assert not not_own(backward, op, "backward")


def of_cuda(variant: table.Variant) -> tuple[set[str], set[str]]:
    """The names of the kernels of this package that a rung's two passes launch, over the cases that it takes."""
    spec = kernel_ladder.spec(variant.op)
    calls, forwards, backwards = [], [], []
    for case, dtype in itertools.product([*spec.samples, *_small(spec.sweep, 2**26)], (torch.bfloat16, torch.float32)):
        inputs = make_inputs(case, dtype, DEVICE)
        if variant.unsupported(*inputs, **case.options) is None:
            calls.append((inputs, case))

    def forward(inputs: Inputs, case: Case) -> tuple[Output, tuple]:
        return variant.forward(*inputs, **case.options)

    for inputs, case in calls:
        output, saved = forward(inputs, case)
        forwards.append(functools.partial(forward, inputs, case))
        has_backward = variant.backward is not None and _small([case], 2**22)
        if has_backward and variant.unsupported(*as_leaves(inputs), **case.options) is None:
            grad = each(torch.ones_like, output) if isinstance(output, tuple) else torch.ones_like(output)
            needs = tuple(has_gradient(x) for x in inputs)
            backwards.append(functools.partial(variant.backward, saved, grad, needs))
    return _names(forwards), _names(backwards)


def _names(calls: list[Callable[[], object]]) -> set[str]:
    """The names of this package's kernels that calls launch."""

    def all_of_them() -> None:
        for call in calls:
            call()

    all_of_them()
    names = {kernel.name for kernel in launched(all_of_them)}
    return {match[1] for name in names if (match := re.search(r"kl::(?:\(anonymous namespace\)::)?(\w+)", name))}


def _small(cases: Iterable[Case], most: int) -> list[Case]:
    """Cases whose tensors have no more elements, so that they fit beside other tests."""
    return [c for c in cases if sum(torch.Size(s).numel() for s in c.shapes if s is not None) <= most]


def test_a_shared_kernel_is_found():
    assert shared_by({"a": {"x", "y"}, "b": {"y"}}, {}) == {"y": ["a", "b"]}
    assert shared_by({"a": {"x", "y"}, "b": {"y"}}, {"y": "a helper"}) == {}


def test_a_borrowed_kernel_is_found():
    norms = {"cuda.naive": {"norm_backward_naive_kernel"}, "cuda.cluster": {"norm_backward_registers_kernel"}}
    assert not not_own(norms, "layer_norm", "backward")
    assert not_own(norms, "layer_norm", "forward") == {"cuda.cluster": {"norm_backward_registers_kernel"}}
    longer = {"cuda.cluster": {"norm_persistent_cluster_kernel"}, "cuda.persistent_cluster": set()}
    assert not_own(longer, "layer_norm", "forward") == {"cuda.cluster": {"norm_persistent_cluster_kernel"}}
    fused = {"triton.fused": {"triton_impl.softmax.fused:_fused_kernel", "triton_impl.softmax.online:_online_kernel"}}
    assert not_own(fused, "softmax", "backward") == {"triton.fused": {"triton_impl.softmax.online:_online_kernel"}}
