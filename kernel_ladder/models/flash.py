"""``torch.nn.attention.activate_flash_attention_impl("kernel_ladder")``: this package's attention under PyTorch's own.

PyTorch (2.11 and later) keeps a registry of implementations that take the place of its FlashAttention-2. While one is
active, every call of ``scaled_dot_product_attention`` that PyTorch gives to flash attention runs it: in models that
nobody patched, in ``torch.nn.MultiheadAttention``, compiled or not. FlashAttention-4 registers in the same way
(``torch/nn/attention/_fa4.py``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.library import Library

from kernel_ladder import autograd, selection, table
from kernel_ladder.errors import BackendError
from kernel_ladder.semantics.masks import LOWER_RIGHT, NO_WINDOW
from kernel_ladder.table import Variant

#: The name in PyTorch's registry.
NAME = "kernel_ladder"
#: The levels whose rungs are kernels of this package; the others call PyTorch's attention in their turn.
LEVELS = ("cuda", "triton")

_Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def register_flash_attention(backend: str = "cuda") -> str:
    """Let PyTorch find this package's attention, and return its name, for ``activate_flash_attention_impl``.

    Args:
        backend: ``"cuda"``, ``"triton"``, or one of their rungs of attention that has a backward pass.

    Raises:
        ImportError: PyTorch has no registry of flash attention. BackendError: no such backend. UnavailableError: the
        level is not available here.
    """
    try:
        from torch.nn.attention import register_flash_attention_impl
    except ImportError as error:
        raise ImportError(
            f"register_flash_attention: PyTorch 2.11 or newer is needed, got {torch.__version__}"
        ) from error
    if backend.partition(".")[0] not in LEVELS:
        raise BackendError(
            f"register_flash_attention: backend must be 'cuda', 'triton' or one of their rungs, got {backend!r}"
        )
    selection.check("attention", backend)
    register_flash_attention_impl(NAME, register_fn=lambda: Flash(backend).activate())
    return NAME


class Flash:
    """The two operators of PyTorch's dense flash attention, by a backend of this package."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self._library: Library | None = None

    def activate(self) -> Flash:
        """Take the place of PyTorch's kernels on CUDA until :meth:`remove`."""
        self._library = Library("aten", "IMPL", "CUDA")
        self._library.impl("_scaled_dot_product_flash_attention", self.forward)
        self._library.impl("_scaled_dot_product_flash_attention_backward", self.backward)
        return self

    def remove(self) -> None:
        """Give PyTorch's kernels their place back. The registry calls this."""
        self._library = None  # a library takes its kernels with it

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> tuple[Any, ...]:
        """``aten::_scaled_dot_product_flash_attention``: (B, H, S, D) tensors of 16 bits, an output like `query`.

        Raises:
            NotImplementedError: dropout, or a debug mask. UnsupportedError: the backend does not take the tensors.
        """
        if dropout_p or return_debug_mask:
            raise NotImplementedError(
                f"flash attention {NAME!r} takes dropout_p=0 and return_debug_mask=False, got {dropout_p} and "
                f"{return_debug_mask}; torch.nn.attention.restore_flash_attention_impl() brings PyTorch's own back"
            )
        inputs = query, key, value
        options = _options(inputs, is_causal, scale)
        with torch.no_grad():
            output, lse = self._rung(inputs, options).forward(*inputs, **options)[0]
        state = torch.zeros(2, dtype=torch.uint64, device=query.device)
        unused, mask = torch.zeros((), dtype=torch.uint64, device=query.device), query.new_empty(0)
        return _like(output, query), lse, None, None, query.shape[2], key.shape[2], state, unused, mask

    def backward(
        self,
        grad_out: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        logsumexp: torch.Tensor,
        cum_seq_q: torch.Tensor | None,
        cum_seq_k: torch.Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        philox_seed: torch.Tensor,
        philox_offset: torch.Tensor,
        *,
        scale: float | None = None,
    ) -> _Gradients:
        """``aten::_scaled_dot_product_flash_attention_backward``: gradients like `query`, `key` and `value`."""
        inputs = query, key, value
        options = _options(inputs, is_causal, scale)
        rung = self._rung(inputs, options)
        assert rung.saved_from is not None
        with torch.no_grad():
            saved = rung.saved_from(inputs, (out.contiguous(), logsumexp), options)
            grads = grad_out.contiguous(), torch.zeros_like(logsumexp)
            found: Any = autograd.gradients(rung, saved, grads, (True, True, True))
        of_query, of_key, of_value = (_like(grad, x) for grad, x in zip(found, inputs, strict=True))
        return of_query, of_key, of_value

    def _rung(self, inputs: tuple[torch.Tensor, ...], options: dict[str, Any]) -> Variant:
        """The rung of a call with gradients: below autograd nothing tells whether there will be any."""
        with torch.enable_grad():
            wanting = tuple([x.detach().requires_grad_() for x in inputs])
            rung = selection.resolve("attention", self.backend, wanting, options)
            if rung.saved_from is not None:
                return rung
            for other in reversed(table.variants("attention", rung.level)):
                if other.saved_from is not None and other.unsupported(*wanting, **options) is None:
                    return other
        raise NotImplementedError(f"flash attention {NAME!r}: {rung.name} has no backward pass from outputs")


def _options(inputs: tuple[torch.Tensor, ...], is_causal: bool, scale: float | None) -> dict[str, Any]:
    """As the operator means them: its causal mask is lower-right, and key heads may be fewer."""
    query, key, _ = inputs
    causal: bool | str = LOWER_RIGHT if is_causal and query.shape[2] != key.shape[2] else is_causal
    return {
        "is_causal": causal,
        "scale": scale,
        "enable_gqa": query.shape[1] != key.shape[1],
        "window_size": NO_WINDOW,
        "return_lse": True,
    }


def _like(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """`x` with the strides of another tensor of its shape, which compiled code expects."""
    like = torch.empty_like(other)
    return x if x.stride() == like.stride() else like.copy_(x)
