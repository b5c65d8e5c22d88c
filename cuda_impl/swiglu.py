"""SwiGLU's gate in CUDA C++: ``csrc/swiglu.cu``."""

from __future__ import annotations

import torch

from cuda_impl import climb, fake_like, unsupported
from kernel_ladder.table import register


def _register(name: str) -> None:
    ops = torch.ops.kernel_ladder
    run, run_backward = getattr(ops.swiglu, name), getattr(ops.swiglu_backward, name)

    def forward(gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, tuple]:
        return run(gate, up), (gate, up)

    def backward(saved: tuple, grad: torch.Tensor, needs: tuple[bool, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        return run_backward(grad, *saved)

    torch.library.register_fake(f"kernel_ladder::swiglu.{name}", lambda gate, up: fake_like(gate))
    torch.library.register_fake(
        f"kernel_ladder::swiglu_backward.{name}",
        lambda grad, gate, up: (fake_like(gate), fake_like(gate)),
    )
    register("swiglu", f"cuda.{name}", forward=forward, backward=backward, unsupported=unsupported)


for _name in climb("swiglu"):
    _register(_name)
