"""Peers: other libraries' kernels, held to the same agreement and timed in the same rounds as ours. ``--peers``.

A peer is optional. It is imported only when it is measured, and where it is absent its rows say how to get it. To add
an operation to a peer, write a function that imports what it needs and returns the library's own call, with the
operation's arguments::

    @LIGER.covers("softmax")
    def _():
        from liger_kernel.ops import LigerSoftmaxFunction

        return lambda input, *, dim: LigerSoftmaxFunction.apply(input)

It is called once; what it returns is called as it stands, so that the peer pays nothing for being here. Its backward is
the one that it gives to autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from rich import box
from rich.console import Console

from bench.peer import HALVES, LEVEL, Call, Peer
from kernel_ladder.cli.columns import Column, LeftOut, Line, fit
from kernel_ladder.semantics.norms import eps_or_default
from kernel_ladder.table import Variant
from kernel_ladder.variables import switch

# The kernels that the CuTe DSL compiles for CUDA 13 come as an extra.
_CUDA13 = "[cu13]" if (torch.version.cuda or "").startswith("13") else ""

LIGER = Peer("liger", "liger-kernel==0.8.5", (8, 0))
QUACK = Peer("quack", f"quack-kernels{_CUDA13}==0.6.5", (8, 0))
# Apart, because its tuner times dozens of kernels for each shape and layout.
QUACK_GEMM = Peer("quack-gemm", QUACK.requirement, (9, 0))
FLASH_ATTN_4 = Peer("flash-attn-4", f"flash-attn-4{_CUDA13}==4.0.0b36", (9, 0))
# Beside the table's compile.default: the mode that times more configurations of a fused loop. It is the only other that
# could change a time here, because the sweep itself captures every short kernel in a CUDA graph, as reduce-overhead
# does. matmul's is in the table; the naive attention is not a fused loop.
MAX_AUTOTUNE = Peer("max-autotune", "torch", (8, 0))

PEERS = {peer.name: peer for peer in (LIGER, QUACK, QUACK_GEMM, FLASH_ATTN_4, MAX_AUTOTUNE)}

#: Libraries that PyTorch calls: variants in the table already, and measured once, under that name.
IN_TABLE = {
    "cublas": {"matmul": "torch.builtin"},
    "cudnn": {"attention": "torch.cudnn"},
    "sdpa-flash": {"attention": "torch.flash"},
}


def _other_than_rows(input: torch.Tensor, *, dim: int) -> str | None:
    if input.dim() != 2 or dim not in (-1, 1):
        return f"takes the rows of a matrix, got {input.dim()} dimensions and dim={dim}"
    return None


def _liger_row_length(input: torch.Tensor, *, dim: int) -> str | None:
    if (reason := _other_than_rows(input, dim=dim)) is not None:
        return reason
    if input.shape[1] > 65536:
        return f"rows of {input.shape[1]} elements are too long for one block; at most 65536"
    return None


@LIGER.covers("softmax", unsupported=_liger_row_length)
def _liger_softmax() -> Call:
    from liger_kernel.ops import LigerSoftmaxFunction

    return lambda input, *, dim: LigerSoftmaxFunction.apply(input)


@QUACK.covers("softmax", unsupported=_other_than_rows)
def _quack_softmax() -> Call:
    from quack import softmax

    return lambda input, *, dim: softmax(input)


def _liger_norm(
    input: torch.Tensor, weight: torch.Tensor | None, *others: torch.Tensor | None, **options: Any
) -> str | None:
    if input.dim() != 2 or weight is None:
        return f"takes the rows of a matrix and their weight, got {input.dim()} dimensions and weight={weight}"
    if input.shape[1] * input.element_size() > 65536:
        return f"rows of {input.shape[1]} elements are too long for one block; at most 64 KiB"
    return None


@LIGER.covers("rms_norm", unsupported=_liger_norm)
def _liger_rms_norm() -> Call:
    from liger_kernel.ops import LigerRMSNormFunction

    def rms_norm(
        input: torch.Tensor, weight: torch.Tensor, *, normalized_shape: tuple[int, ...], eps: float | None
    ) -> torch.Tensor:
        eps = eps_or_default(eps, input.dtype)
        # Computes in float32, as the formula does, and does not overwrite the gradient of the output.
        return LigerRMSNormFunction.apply(input, weight, eps, 0.0, "gemma", False)

    return rms_norm


def _liger_layer_norm_shapes(
    input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, **options: Any
) -> str | None:
    return _liger_norm(input, weight) or ("takes a bias" if bias is None else None)


@LIGER.covers("layer_norm", unsupported=_liger_layer_norm_shapes)
def _liger_layer_norm() -> Call:
    from liger_kernel.ops import LigerLayerNormFunction

    return lambda input, weight, bias, *, normalized_shape, eps: LigerLayerNormFunction.apply(input, weight, bias, eps)


@LIGER.covers("add_rms_norm", unsupported=lambda input, residual, weight, **options: _liger_norm(input, weight))
def _liger_add_rms_norm() -> Call:
    from liger_kernel.ops import LigerFusedAddRMSNormFunction

    def add_rms_norm(
        input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        eps = eps_or_default(eps, input.dtype)
        return LigerFusedAddRMSNormFunction.apply(input, residual, weight, eps, 0.0, "gemma", False)

    return add_rms_norm


@LIGER.covers("swiglu", unsupported=lambda gate, up: _liger_norm(gate, up))
def _liger_swiglu() -> Call:
    from liger_kernel.ops import LigerSiLUMulFunction

    return lambda gate, up: LigerSiLUMulFunction.apply(gate, up)


def _quack_norm(
    input: torch.Tensor, weight: torch.Tensor | None, *others: torch.Tensor | None, **options: Any
) -> str | None:
    if input.dim() != 2 or weight is None:
        return f"takes the rows of a matrix and their weight, got {input.dim()} dimensions and weight={weight}"
    return None


@QUACK.covers("rms_norm", unsupported=_quack_norm)
def _quack_rms_norm() -> Call:
    from quack import rmsnorm

    def rms_norm(
        input: torch.Tensor, weight: torch.Tensor, *, normalized_shape: tuple[int, ...], eps: float | None
    ) -> torch.Tensor:
        return rmsnorm(input, weight, eps=eps_or_default(eps, input.dtype))

    return rms_norm


@QUACK.covers("add_rms_norm", unsupported=lambda input, residual, weight, **options: _quack_norm(input, weight))
def _quack_add_rms_norm() -> Call:
    from quack import rmsnorm

    def add_rms_norm(
        input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return rmsnorm(input, weight, residual=residual, eps=eps_or_default(eps, input.dtype), prenorm=True)

    return add_rms_norm


def _not_a_matrix(input: torch.Tensor) -> str | None:
    return None if input.dim() == 2 else f"takes the rows of a matrix, got {input.dim()} dimensions"


def _plain_entropy(
    input: torch.Tensor, target: torch.Tensor, *, label_smoothing: float, z_loss: float, **options: Any
) -> str | None:
    if (reason := _not_a_matrix(input)) is not None:
        return reason
    return "takes neither label smoothing nor a z-loss" if label_smoothing or z_loss else None


@QUACK.covers("cross_entropy", unsupported=_plain_entropy)
def _quack_cross_entropy() -> Call:
    from quack import cross_entropy

    def run(input: torch.Tensor, target: torch.Tensor, *, ignore_index: int, reduction: str, **options: Any) -> Any:
        loss = cross_entropy(input, target, ignore_index=ignore_index, reduction=reduction)
        return loss.to(input.dtype)  # the library returns float32

    return run


def _liger_entropy(input: torch.Tensor, target: torch.Tensor, **options: Any) -> str | None:
    if (reason := _not_a_matrix(input)) is not None:
        return reason
    # Nothing is left for a backward pass, and the logits of the next round would be gradients.
    return "its forward pass writes the gradient over the logits" if input.requires_grad else None


@LIGER.covers("cross_entropy", unsupported=_liger_entropy)
def _liger_cross_entropy() -> Call:
    from liger_kernel.ops import LigerCrossEntropyFunction

    def cross_entropy(
        input: torch.Tensor,
        target: torch.Tensor,
        *,
        ignore_index: int,
        reduction: str,
        label_smoothing: float,
        z_loss: float,
    ) -> torch.Tensor:
        given = (input, target, None, ignore_index, z_loss, label_smoothing, reduction)
        return LigerCrossEntropyFunction.apply(*given)[0]

    return cross_entropy


@LIGER.covers("linear_cross_entropy", unsupported=lambda input, *others, **options: _not_a_matrix(input))
def _liger_linear_cross_entropy() -> Call:
    from liger_kernel.ops import LigerFusedLinearCrossEntropyFunction

    def linear_cross_entropy(
        input: torch.Tensor,
        linear_weight: torch.Tensor,
        target: torch.Tensor,
        *,
        ignore_index: int,
        reduction: str,
        label_smoothing: float,
        z_loss: float,
        wide_loss: bool,
    ) -> torch.Tensor:
        # No bias, and no weights of classes. Gradients of reduced losses are computed in the forward pass, as ours are.
        given = (input, linear_weight, target, None, None, ignore_index, z_loss, label_smoothing, reduction)
        loss = LigerFusedLinearCrossEntropyFunction.apply(*given)[0]
        return loss if wide_loss else loss.to(input.dtype)  # the library returns float32

    return linear_cross_entropy


def _unaligned_matrices(input: torch.Tensor, other: torch.Tensor) -> str | None:
    if input.dim() != 2 or other.dim() != 2:
        return f"its differentiable product takes two matrices, got {input.dim()} and {other.dim()} dimensions"
    if any(n % 8 for n in (*input.shape, *other.shape)):  # of the output too, whose gradient backward reads
        return f"sizes must be multiples of 8, 16 bytes, got {tuple(input.shape)} and {tuple(other.shape)}"
    return None


@QUACK_GEMM.covers("matmul", dtypes=HALVES, unsupported=_unaligned_matrices)
def _quack_matmul() -> Call:
    from quack.linear import linear_func

    tune = switch("KERNEL_LADDER_AUTOTUNE")

    def matmul(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        # Not for a tiny shape on which host cost is measured.
        return linear_func(input, other.mT, tuned=tune and input.numel() > 2**16)

    return matmul


def _flash_attn_4_head_dims(query: torch.Tensor, value: torch.Tensor) -> str | None:
    largest = 256 if torch.cuda.get_device_capability(query.device)[0] == 9 else 128
    for dim in (query.shape[-1], value.shape[-1]):
        if dim % 8 or not 8 <= dim <= largest:
            return f"head dimensions must be multiples of 8 up to {largest}, got {dim}"
    return None


def _flash_attn_4_shapes(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *,
    is_causal: bool | str,
    return_lse: bool = False,
    **options: Any,
) -> str | None:
    if attn_mask is not None:
        return "takes no mask but causal ones and windows"
    if return_lse:
        return "its log-sum-exp is not differentiable"
    if query.dim() != 4:
        return f"takes 4 dimensions (B, H, S, D), got {query.dim()}"
    if (reason := _flash_attn_4_head_dims(query, value)) is not None:
        return reason
    lengths = query.shape[-2], key.shape[-2]
    if is_causal is True and lengths[0] != lengths[1]:
        return f"its causal mask counts from the bottom right, another one for {lengths[0]} queries, {lengths[1]} keys"
    return None


@FLASH_ATTN_4.covers("attention", dtypes=HALVES, unsupported=_flash_attn_4_shapes)
def _flash_attn_4() -> Call:
    from flash_attn.cute import flash_attn_func

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        is_causal: bool | str,
        scale: float | None,
        enable_gqa: bool,
        window_size: tuple[int, int] = (-1, -1),
        return_lse: bool = False,
    ) -> torch.Tensor:
        # (B, S, H, D) as views: the kernel reads strides, and recognises grouped queries by the shapes.
        inputs = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        window = tuple(None if n < 0 else n for n in window_size)
        output, _ = flash_attn_func(*inputs, softmax_scale=scale, causal=bool(is_causal), window_size=window)
        return output.transpose(1, 2)

    return attention


def _flash_attn_4_packed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *offsets: torch.Tensor, **options: Any
) -> str | None:
    if options.get("return_lse"):
        return "its log-sum-exp is not differentiable"
    return _flash_attn_4_head_dims(query, value)


@FLASH_ATTN_4.covers("attention_varlen", dtypes=HALVES, unsupported=_flash_attn_4_packed)
def _flash_attn_4_varlen() -> Call:
    from flash_attn.cute import flash_attn_varlen_func

    def attention_varlen(*packed: torch.Tensor, **options: Any) -> torch.Tensor:
        names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")
        longest = {name: options.get(name) for name in ("max_seqlen_q", "max_seqlen_k")}
        window = tuple(None if n < 0 else n for n in options.get("window_size", (-1, -1)))
        others = {"softmax_scale": options["scale"], "causal": bool(options["is_causal"]), "window_size": window}
        output, _ = flash_attn_varlen_func(**dict(zip(names, packed, strict=True)), **longest, **others)
        return output

    return attention_varlen


def _max_autotuned(op: str) -> Callable[[], Call]:
    def make() -> Call:
        import kernel_ladder
        from compile_impl import compiled

        # Not the mode that also captures CUDA graphs: their outputs are overwritten by the next call.
        forward = compiled(kernel_ladder.spec(op).reference, mode="max-autotune-no-cudagraphs")
        return lambda *inputs, **options: forward(*inputs, **options)[0]

    return make


for _op in ("gelu", "softmax", "layer_norm", "rms_norm", "bias_gelu", "swiglu", "add_rms_norm"):
    MAX_AUTOTUNE.covers(_op)(_max_autotuned(_op))


def known() -> list[str]:
    """Every name that ``--peers`` takes, without those of its own."""
    return [*PEERS, *IN_TABLE]


def ops_of(name: str) -> dict[str, str]:
    """The operations that a peer covers, each with the backend that its rows have."""
    return IN_TABLE[name] if name in IN_TABLE else dict.fromkeys(PEERS[name].adapters, PEERS[name].backend)


def variants(op: str, names: Iterable[str] | None = None) -> list[Variant]:
    """The peers (all, or those named) that cover an operation, installed or not, as variants."""
    chosen = [PEERS[name] for name in (PEERS if names is None else names) if name in PEERS]
    return [peer.variant(op) for peer in chosen if op in peer.adapters]


def version(backend: str) -> str | None:
    """The version of a peer by its backend; None for everything else."""
    level, _, name = backend.partition(".")
    return PEERS[name].version if level == LEVEL and name in PEERS else None


def show(console: Console) -> None:
    """Print every peer: what it covers, and its version or how to get it."""
    columns = [
        Column("peer"),
        Column("version", folds=True),
        Column("operations", spare=1, folds=True),
        Column("backend", spare=2),
    ]
    lines, left_out = [], LeftOut()
    for name in known():
        status = "the table's own variant" if name in IN_TABLE else PEERS[name].version or PEERS[name].absent
        backends = ", ".join(dict.fromkeys(ops_of(name).values()))
        lines.append(Line([name, status or "", ", ".join(ops_of(name)), backends], ends_section=True))
    console.print(fit(console, columns, lines, left_out, title="peers", box=box.HEAVY_HEAD))
    left_out.show(console)
