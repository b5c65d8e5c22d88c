"""Rotary position embedding in CUDA C++: ``csrc/rope.cu``. Backward, a rung's kernel gets the opposite angles."""

from __future__ import annotations

import torch

from cuda_impl import climb, fake_like, unsupported
from kernel_ladder.semantics.rotary import all_angles, angles_from, check_common_offset
from kernel_ladder.table import register
from kernel_ladder.tracing import address, shapes_only


def _irregular(input: torch.Tensor, freqs_cis: torch.Tensor, interleaved: bool) -> str | None:
    """Why `vectorized` does not take a call, or None."""
    size, pairs = 16 // input.element_size(), freqs_cis.shape[1]
    if (2 * pairs if interleaved else pairs) % size or input.shape[-1] % size:
        return f"takes rows of whole 16-byte vectors, rotated and not, got {2 * pairs} of {input.shape[-1]} elements"
    strides = [stride for n, stride in zip(input.shape[:-1], input.stride(), strict=False) if n != 1]
    if input.stride(-1) != 1 or any(stride % size for stride in strides) or address(input) % 16:
        return "takes dense rows that start at multiples of 16 bytes"
    if freqs_cis.is_contiguous() and address(freqs_cis) % 16:
        return "takes a table that starts at a multiple of 16 bytes"
    return None


def _register(name: str) -> None:
    run = getattr(torch.ops.kernel_ladder.rope, name)

    def rotate(
        x: torch.Tensor,
        freqs_cis: torch.Tensor,
        offsets: torch.Tensor | None,
        interleaved: bool,
        offset: int,
        back: bool,
    ) -> torch.Tensor:
        if shapes_only():
            return fake_like(x)
        if offsets is None:
            return run(x, angles_from(freqs_cis, offset, x.shape[-2]), interleaved, back)
        check_common_offset(offset, x.shape[-2], freqs_cis.shape[0])
        return run(x, all_angles(freqs_cis), interleaved, back, offsets.contiguous(), offset)

    def forward(
        input: torch.Tensor,
        freqs_cis: torch.Tensor,
        offsets: torch.Tensor | None = None,
        *,
        interleaved: bool,
        offset: int,
    ) -> tuple[torch.Tensor, tuple]:
        saved = (freqs_cis, offsets, interleaved, offset)
        return rotate(input, *saved, False), saved

    def backward(saved: tuple, grad: torch.Tensor, needs: tuple[bool, ...]) -> tuple[torch.Tensor | None, ...]:
        freqs_cis, _, interleaved, _ = saved
        others = (None,) * (len(needs) - 1)
        if not needs[0]:
            return None, *others
        if name == "vectorized" and _irregular(grad, freqs_cis, interleaved) is not None:
            grad = torch.empty(grad.shape, dtype=grad.dtype, device=grad.device).copy_(grad)
        return rotate(grad, *saved, True), *others

    def unsupported_by(
        input: torch.Tensor, freqs_cis: torch.Tensor, *offsets: torch.Tensor | None, interleaved: bool, offset: int
    ) -> str | None:
        reason = unsupported(input)
        if reason is None and name == "vectorized":
            reason = _irregular(input, freqs_cis, interleaved)
        return reason

    torch.library.register_fake(f"kernel_ladder::rope.{name}", lambda input, *_: fake_like(input))
    register("rope", f"cuda.{name}", forward=forward, backward=backward, unsupported=unsupported_by)


for _name in climb("rope"):
    _register(_name)
