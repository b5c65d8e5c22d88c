"""A linear layer in CUDA C++: ``csrc/linear.cu`` and the steps of ``csrc/matmul/`` that have an epilogue.

The backward pass runs kernels of other operations: bias_gelu's gradient, which sums over rows as it goes. Where there
is a bias alone, it is the sum over rows. The products are matmul's, by the rung of the same name. On Hopper
``persistent``, ``split_k`` and ``skinny`` take the products of the rung that the selection names for them
(:mod:`kernel_ladder.selection.matmul`), and ``registers`` those of matmul's ``registers_tma`` where it takes the
operands. The device memory that ``persistent`` needs beyond its outputs is that of matmul's (:mod:`cuda_impl.matmul`).
"""

from __future__ import annotations

import torch

# The operators of a backward pass tell their shapes where these modules register them.
from cuda_impl import bias_gelu, climb, gelu, matmul, not_hopper, skinny_unsupported, sum, unsupported  # noqa: F401
from kernel_ladder.selection import matmul as selection
from kernel_ladder.semantics.linear_shapes import ACTIVATIONS, as_rows, output_shape
from kernel_ladder.semantics.precision import tf32_allowed
from kernel_ladder.table import register

#: The steps of bias_gelu, gelu and sum that a step of linear takes its gradients from.
_BACKWARD = {
    "naive": ("naive", "naive"),
    "registers": ("vectorized", "two_stage"),
    "mma": ("vectorized", "two_stage"),
    "persistent": ("vectorized", "two_stage"),
    "split_k": ("vectorized", "two_stage"),
    "skinny": ("vectorized", "two_stage"),
}


def _naive_unsupported(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, activation: str | None
) -> str | None:
    return unsupported(input)


def _registers_unsupported(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, activation: str | None
) -> str | None:
    if input.is_cuda and input.dtype in (torch.float16, torch.bfloat16):
        return "takes float32; the 16-bit dtypes belong on tensor cores"
    return unsupported(input)


def _mma_unsupported(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, activation: str | None
) -> str | None:
    if input.dtype is torch.float32 and input.is_cuda and not tf32_allowed():
        return (
            "float32 on tensor cores is tf32, which is off (torch.backends.cuda.matmul.allow_tf32 = True turns it on)"
        )
    return unsupported(input)


def _persistent_unsupported(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, activation: str | None
) -> str | None:
    return _mma_unsupported(input, weight, bias, activation=activation) or not_hopper(input.device.index)


def _split_k_unsupported(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, activation: str | None
) -> str | None:
    if input.is_cuda and input.dtype is torch.float32:
        return "takes float16 and bfloat16"
    if (reason := matmul.tma_unsupported(input, weight.mT)) is not None:
        return reason
    if input.stride(-1) != 1 or weight.stride(1) != 1:
        return "needs an input and a weight whose rows are dense"
    if input.shape[-1] == 1 and weight.shape[0] * input.numel() > 1:  # then TMA reads along the other dimension
        return "takes rows of more than one element"
    return None


def _skinny_unsupported(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, activation: str | None
) -> str | None:
    if (reason := unsupported(input)) is not None:
        return reason
    if weight.stride(1) != 1:
        return "needs a weight whose rows are dense"
    return skinny_unsupported(input, weight.mT)


_UNSUPPORTED = {
    "naive": _naive_unsupported,
    "registers": _registers_unsupported,
    "mma": _mma_unsupported,
    "persistent": _persistent_unsupported,
    "split_k": _split_k_unsupported,
    "skinny": _skinny_unsupported,
}


def _register(name: str) -> None:
    ops = torch.ops.kernel_ladder
    overload = getattr(ops.linear, name)
    # Gradients of `skinny` are products of many rows.
    multiply_overload = getattr(ops.matmul, {"skinny": "mma"}.get(name, name))
    elementwise, sums = _BACKWARD[name]
    gelu_backward = getattr(ops.gelu_backward, elementwise)
    bias_gelu_backward = getattr(ops.bias_gelu_backward, bias_gelu.BACKWARD_OF.get(elementwise, elementwise))
    sum_of = getattr(ops.sum, sums)
    asks_for_tf32 = name in ("mma", "persistent")
    multiplies_on_tensor_cores = asks_for_tf32 or name == "skinny"

    def run(
        input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None, keep: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if name == "split_k":
            plan = selection.plan(input, weight.mT)
            return overload(input, weight, bias, activation or "none", keep, plan.rows, plan.columns, plan.splits)
        if asks_for_tf32:
            # Only where the switch is on does `unsupported` let float32 come here.
            return overload(input, weight, bias, activation or "none", keep, input.dtype == torch.float32)
        return overload(input, weight, bias, activation or "none", keep)

    def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if name in ("persistent", "split_k") or (name == "skinny" and not_hopper(a.device.index) is None):
            return matmul.on_hopper(a, b)
        if name == "registers":  # `registers_tma` where TMA reads both operands
            return matmul.product_for_gradients("registers_tma")(a, b)
        if multiplies_on_tensor_cores:
            return multiply_overload(a, b, a.dtype == torch.float32)
        return multiply_overload(a, b)

    def inference(
        input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, activation: str | None
    ) -> torch.Tensor:
        return run(input, weight, bias, activation, False)[0]

    def forward(
        input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, activation: str | None
    ) -> tuple[torch.Tensor, tuple]:
        output, kept = run(input, weight, bias, activation, activation is not None)
        return output, (input, weight, bias, None if activation is None else kept, activation)

    def backward(saved: tuple, grad: torch.Tensor, needs: tuple[bool, ...]) -> tuple[torch.Tensor | None, ...]:
        input, weight, bias, kept, activation = saved
        before, grad_bias = as_rows(grad), None  # the gradient of what stands before the activation
        if activation is not None and bias is not None:
            before, grad_bias = bias_gelu_backward(before, as_rows(kept), bias, ACTIVATIONS[activation])
        elif activation is not None:
            before = gelu_backward(before, as_rows(kept), ACTIVATIONS[activation])
        elif bias is not None and needs[2]:
            grad_bias = sum_of(before, [0], False)
        return (
            multiply(before, weight).view(input.shape) if needs[0] else None,
            multiply(before.mT, as_rows(input)) if needs[1] else None,
            grad_bias if needs[2] else None,
        )

    def fake(
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str,
        keep: bool,
        *others: bool | int,  # tf32 or a tile
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shape = output_shape(input, weight)
        return input.new_empty(shape), input.new_empty(shape if keep else (0,))

    torch.library.register_fake(f"kernel_ladder::linear.{name}", fake)
    register(
        "linear",
        f"cuda.{name}",
        forward=forward,
        backward=backward,
        unsupported=_UNSUPPORTED[name],
        inference=inference,
    )


for _name in climb("linear"):
    _register(_name)
