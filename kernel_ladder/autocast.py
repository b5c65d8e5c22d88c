"""What ``torch.autocast`` does to a call: PyTorch's own policy, operation by operation.

A call converts its arguments as PyTorch converts those of the function that it stands for. Then its rung runs with
autocast off, so formulas and backward passes compute in the dtypes that they state. Products and attention take the
lower precision. Norms, softmax and sums take float32 on the device types whose list has them; CUDA's has, the CPU's has
not. Other calls of several tensors promote them to their widest dtype, as PyTorch's operators do. Float64 is never
converted, as in PyTorch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.compiler import is_compiling

from kernel_ladder.spec import Inputs, each
from kernel_ladder.table import untraced

#: Whether autocast is on for any device type. Where it is off, a call asks nothing else.
is_on: Callable[[], bool] = torch._C._is_any_autocast_enabled

#: What becomes of a call. With the last it reads what it is given and its result is float32: nothing is copied.
LOWER, FLOAT32, FLOAT32_RESULT = "lower precision", "float32", "float32 result"

#: What PyTorch's lists do to an operation where they have the operator that it stands for.
_POLICY = {
    "matmul": ("aten::matmul", LOWER),
    "linear": ("aten::linear", LOWER),
    "linear_cross_entropy": ("aten::linear", LOWER),
    "attention": ("aten::scaled_dot_product_attention", LOWER),
    "attention_varlen": ("aten::scaled_dot_product_attention", LOWER),
    "attention_paged": ("aten::scaled_dot_product_attention", LOWER),
    "softmax": ("aten::softmax.int", FLOAT32),
    "cross_entropy": ("aten::cross_entropy_loss", FLOAT32_RESULT),
    "sum": ("aten::sum.dim_IntList", FLOAT32),
    "layer_norm": ("aten::layer_norm", FLOAT32),
    "rms_norm": ("aten::rms_norm", FLOAT32),
    "add_rms_norm": ("aten::rms_norm", FLOAT32),
    "bias_dropout_add_layer_norm": ("aten::layer_norm", FLOAT32),
}

#: Arguments that an operation adds or multiplies elementwise, by their places; PyTorch promotes these.
_PROMOTED = {
    "add": (0, 1),
    "bias_gelu": (0, 1),
    "swiglu": (0, 1),
    "add_rms_norm": (0, 1),
    "bias_dropout_add_layer_norm": (0, 1, 2, 3, 4),
}


@functools.cache
@untraced
def policy(op: str, device_type: str) -> str | None:
    """What autocast of a device type converts an operation's arguments to: LOWER, FLOAT32, or None for nothing.

    PyTorch's dispatcher is asked, because the lists grow: CUDA's has rms_norm from some version on.
    """
    operator, kind = _POLICY.get(op, ("", ""))
    if op == "cross_entropy" and device_type != "cpu":  # CUDA's list has the softmax that it consists of
        operator = "aten::log_softmax.int"
    key = f"Autocast{device_type.upper()}"
    return kind if operator and torch._C._dispatch_has_kernel_for_dispatch_key(operator, key) else None


def off(device_type: str) -> AbstractContextManager[Any]:
    """A block without autocast."""
    if is_compiling():  # torch.compile traces this one alone
        return torch.autocast(device_type, enabled=False)
    return torch._C._DisableAutocast()


def applies_to(inputs: Inputs) -> bool:
    """Whether autocast is on for the device of a call's first argument."""
    first = inputs[0] if inputs else None
    if not isinstance(first, torch.Tensor) or first.device.type == "meta":
        return False
    return torch.is_autocast_enabled(first.device.type)


def converted(op: str, inputs: Inputs) -> Inputs:
    """The arguments of a call as PyTorch's autocast gives them to the operation."""
    device_type = inputs[0].device.type
    kind = policy(op, device_type)
    if kind is None or kind is FLOAT32_RESULT:
        return inputs
    dtype = torch.float32 if kind is FLOAT32 else torch.get_autocast_dtype(device_type)

    def convert(x: Any) -> Any:
        eligible = isinstance(x, torch.Tensor) and x.device.type == device_type and x.is_floating_point()
        return x.to(dtype) if eligible and x.dtype not in (dtype, torch.float64) else x

    return each(convert, inputs)


def _promoted(op: str, inputs: Inputs) -> Inputs:
    places = _PROMOTED.get(op, ())
    dtypes = {x.dtype for x in (inputs[place] for place in places) if isinstance(x, torch.Tensor)}
    if len(dtypes) < 2:
        return inputs
    widest = functools.reduce(torch.promote_types, dtypes)
    return tuple(
        x.to(widest) if place in places and isinstance(x, torch.Tensor) else x for place, x in enumerate(inputs)
    )


def call(run: Callable[[Inputs], Any], op: str, inputs: Inputs) -> Any:
    """``run(inputs)`` under autocast: on converted arguments and with autocast off, where it applies to them."""
    if not applies_to(inputs):
        with off("cpu"):
            return run(inputs)
    device_type = inputs[0].device.type
    promoted = _promoted(op, inputs)
    given = converted(op, promoted)
    with off(device_type):
        output = run(given)
    if op == "add_rms_norm" and given[0] is not promoted[0]:  # PyTorch converts the norm's argument, not the sum
        return output[0], output[1].to(promoted[0].dtype)
    if op == "bias_dropout_add_layer_norm" and policy(op, device_type) is None and isinstance(output, torch.Tensor):
        return output.to(functools.reduce(torch.promote_types, (x.dtype for x in inputs[:3])))  # the norm's argument
    return output
