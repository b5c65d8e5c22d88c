"""Attention layers: PyTorch's MultiheadAttention, and grouped attention with a key-value cache."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from kernel_ladder import ops
from kernel_ladder.nn.arguments import as_size, check_dtype, check_mask, check_shape, only
from kernel_ladder.nn.backend import HasBackend, HasParts
from kernel_ladder.nn.cache import KVCache
from kernel_ladder.nn.linear import Linear
from kernel_ladder.nn.paged_cache import PagedKVCache, Places
from kernel_ladder.nn.rotary import table_of
from kernel_ladder.ops.calls import as_number
from kernel_ladder.semantics.masks import NO_WINDOW, band, seen

#: The widest head that attention's operations take.
MAX_HEAD_DIM = 256


def _head_dim(module: str, embed_dim: int, num_heads: int, otherwise: str = "") -> int:
    """The width of heads that share `embed_dim`. `otherwise` is what the message adds."""
    if embed_dim % num_heads:
        raise ValueError(
            f"{module}: argument `num_heads` must divide `embed_dim`{otherwise}, got {num_heads} and {embed_dim}"
        )
    return embed_dim // num_heads


def _check_head_dim(module: str, name: str, head_dim: int) -> None:
    """Raise unless attention takes heads of this width, which an argument gives."""
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"{module}: argument `{name}` must give heads at most {MAX_HEAD_DIM} wide, got {head_dim}")


class MultiheadAttention(HasBackend, torch.nn.MultiheadAttention):
    """:class:`torch.nn.MultiheadAttention` by :func:`kernel_ladder.linear` and :func:`kernel_ladder.attention`.

    Weights are computed for the caller alone, by their formula, as PyTorch does by default: pass
    ``need_weights=False`` where they are not used. They are never dropped.

    Args:
        embed_dim, num_heads: width of queries and output, and heads that share it, each at most 256 wide.
        dropout: must be 0. bias: whether projections have biases.
        add_bias_kv, add_zero_attn: must be False.
        kdim, vdim: widths of keys and values; None is `embed_dim`.
        batch_first: whether tensors are ``(B, S, E)`` instead of ``(S, B, E)``.
        device, dtype: of the parameters.
        backend: see :func:`kernel_ladder.use`; None leaves the choice to each call.
    """

    OPS = ("linear", "attention")

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        backend: str | None = None,
    ) -> None:
        name = "MultiheadAttention"
        only(name, "dropout", dropout, 0.0, "attention weights are not dropped here")
        only(name, "add_bias_kv", add_bias_kv, False, "keys and values are those of the call")
        only(name, "add_zero_attn", add_zero_attn, False, "keys and values are those of the call")
        embed_dim, num_heads = as_size(name, "embed_dim", embed_dim), as_size(name, "num_heads", num_heads)
        _check_head_dim(name, "num_heads", _head_dim(name, embed_dim, num_heads))
        kdim, vdim = as_size(name, "kdim", kdim, optional=True), as_size(name, "vdim", vdim, optional=True)
        check_dtype(name, dtype)
        super().__init__(
            embed_dim, num_heads, 0.0, bias, False, False, kdim, vdim, batch_first, device, dtype
        )  # fmt: skip
        self.backend = backend

    def _project(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        b = self.in_proj_bias
        if self._qkv_same_embed_dim and query is key and key is value:
            return ops.linear(query, self.in_proj_weight, b, backend=self._backend).chunk(3, -1)
        weights = (
            self.in_proj_weight.chunk(3)
            if self._qkv_same_embed_dim
            else (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        )
        biases = (None,) * 3 if b is None else b.chunk(3)
        return tuple(
            ops.linear(x, w, bias, backend=self._backend)
            for x, w, bias in zip((query, key, value), weights, biases, strict=True)
        )

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, is_causal: bool) -> Any:
        return ops.attention(q, k, v, mask, is_causal=is_causal, backend=self._backend)

    def forward(  # type: ignore[override]
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend to `value`, as :meth:`torch.nn.MultiheadAttention.forward`.

        Args:
            query, key, value: ``(S, B, E)``, ``(B, S, E)`` if `batch_first`, or ``(S, E)``.
            key_padding_mask: ``(B, S_k)``, or ``(S_k,)`` without B. Boolean, True where a key is hidden, or
                floating-point numbers that are added to scores.
            need_weights: also return the weights, which costs a second product of queries and keys, and their memory.
            attn_mask: ``(S_q, S_k)`` or ``(B · num_heads, S_q, S_k)``, without B ``(num_heads, S_q, S_k)``. Boolean or
                floating-point, likewise.
            average_attn_weights: return the mean of the heads' weights.
            is_causal: as a hint that `attn_mask` is causal, as in PyTorch; without a mask, query i sees keys 0 … i.

        Returns:
            The output in the layout of `query`, and the weights ``(B, S_q, S_k)``, or ``(B, num_heads, S_q, S_k)`` if
            not averaged, without B for a query without it; None unless `need_weights`. A query that sees no key gives
            zeros in both, where PyTorch gives NaN.

        Raises:
            TypeError: an argument is no tensor, or a mask is neither boolean nor floating-point.
            ValueError: a shape does not fit.
        """
        _check_call(self, query, key, value, key_padding_mask, attn_mask)
        swap = query.dim() == 3 and not self.batch_first
        same = query is key and key is value
        if swap:
            query = query.transpose(0, 1)
            key, value = (query, query) if same else (key.transpose(0, 1), value.transpose(0, 1))
        q, k, v = (
            x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(-2, -3)
            for x in self._project(query, key, value)
        )  # fmt: skip
        mask = _mask(attn_mask, key_padding_mask, q, k)
        is_causal = is_causal and mask is None
        output = self._attend(q, k, v, mask, is_causal)
        output = output.transpose(-2, -3).flatten(-2)
        output = ops.linear(output, self.out_proj.weight, self.out_proj.bias, backend=self._backend)
        weights = _weights(q, k, mask, is_causal) if need_weights else None
        if weights is not None and average_attn_weights:
            weights = weights.mean(-3)
        return (output.transpose(0, 1) if swap else output), weights

    def extra_repr(self) -> str:
        return self._with_backend(f"{self.embed_dim}, num_heads={self.num_heads}, batch_first={self.batch_first}")


def _check_call(layer: Any, query: Any, key: Any, value: Any, key_padding_mask: Any, attn_mask: Any) -> None:
    """Raise unless the arguments of a call fit a layer, whether it is :class:`MultiheadAttention` or PyTorch's."""
    name, batched = "MultiheadAttention", ("B", "S", "E") if layer.batch_first else ("S", "B", "E")
    order = ("S", "E") if isinstance(query, torch.Tensor) and query.dim() == 2 else batched
    dims: dict[str, int | None] = dict.fromkeys(order)
    check_shape(name, "query", query, {**dims, "E": layer.embed_dim}, " or (S, E)")
    sizes = dict(zip(order, query.shape, strict=True))
    if len(order) == 3:
        dims["B"] = sizes["B"]
    check_shape(name, "key", key, {**dims, "E": layer.kdim})
    dims["S"] = key.shape[order.index("S")]
    check_shape(name, "value", value, {**dims, "E": layer.vdim})
    if key_padding_mask is not None:
        check_mask(name, "key_padding_mask", key_padding_mask)
        of_batch = {"B": dims["B"]} if len(order) == 3 else {}
        check_shape(name, "key_padding_mask", key_padding_mask, {**of_batch, "S_k": dims["S"]})
    if attn_mask is not None:
        check_mask(name, "attn_mask", attn_mask)
        lengths = {"S_q": sizes["S"], "S_k": dims["S"]}
        if attn_mask.dim() == 2:
            check_shape(name, "attn_mask", attn_mask, lengths)
        else:
            heads = "B · num_heads" if len(order) == 3 else "num_heads"
            of_heads = {heads: sizes.get("B", 1) * layer.num_heads, **lengths}
            check_shape(name, "attn_mask", attn_mask, of_heads, " or (S_q, S_k)")


def _mask(
    attn_mask: torch.Tensor | None, key_padding_mask: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor
) -> torch.Tensor | None:
    """Both masks as one of :func:`kernel_ladder.attention`: True where a key is seen, or added to scores."""
    masks = []
    if attn_mask is not None:
        masks.append(attn_mask.unflatten(0, q.shape[:2]) if attn_mask.dim() == 3 and q.dim() == 4 else attn_mask)
    if key_padding_mask is not None:
        masks.append(key_padding_mask if q.dim() == 3 else key_padding_mask[:, None, None, :])
    if not masks:
        return None
    if all(m.dtype == torch.bool for m in masks):
        hidden = masks[0] if len(masks) == 1 else masks[0] | masks[1]
        return ~hidden
    added = [
        torch.zeros_like(m, dtype=q.dtype).masked_fill_(m, -torch.inf) if m.dtype == torch.bool else m.to(q.dtype)
        for m in masks
    ]
    return added[0] if len(added) == 1 else added[0] + added[1]


def _weights(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, is_causal: bool) -> torch.Tensor:
    """The weights of every head, by their formula."""
    if is_causal:
        lengths = q.shape[-2], k.shape[-2]
        mask = seen(*band(True, NO_WINDOW, *lengths), *lengths, q.device)
    scores = q * q.shape[-1] ** -0.5 @ k.transpose(-1, -2)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    sees_nothing = (scores == -torch.inf).all(-1, keepdim=True)
    return scores.masked_fill(sees_nothing, 0).softmax(-1).masked_fill(sees_nothing, 0)


class GroupedQueryAttention(HasParts):
    """Causal self-attention whose query heads share keys and values, with Llama's parameter names.

    With `rope_theta` it is Llama's attention: queries and keys are rotated by :func:`kernel_ladder.rope`. A token's
    position is its number in its sequence, which a cache knows. The table of angles is no part of the ``state_dict``.

    Args:
        embed_dim: width of input and output.
        num_heads: query heads. num_kv_heads: key and value heads, a divisor of `num_heads`; None is as many.
        head_dim: width of a head, at most 256; None is ``embed_dim / num_heads``.
        bias: whether the four projections have biases.
        window_size: keys that a query sees before its own; None or -1 is all.
        device, dtype: of the parameters.
        rope_theta: base of the angles, 10000 in Llama 2, as in Hugging Face's configurations; None rotates nothing.
        max_position_embeddings: positions in the table of angles.
        backend: see :func:`kernel_ladder.use`; None leaves the choice to each call.

    Raises:
        TypeError: a size is no int, or `rope_theta` no number.
        ValueError: a size, `num_kv_heads`, `num_heads`, `rope_theta` or a rotated `head_dim` does not fit.

    Source: Ainslie et al., GQA, arXiv:2305.13245.
    """

    OPS = ("linear", "attention")

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        window_size: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        rope_theta: float | None = None,
        max_position_embeddings: int = 2048,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        name = "GroupedQueryAttention"
        embed_dim, num_heads = as_size(name, "embed_dim", embed_dim), as_size(name, "num_heads", num_heads)
        kv_heads = as_size(name, "num_kv_heads", num_heads if num_kv_heads is None else num_kv_heads)
        head_dim = as_size(name, "head_dim", head_dim, optional=True)
        self.window_size = as_size(name, "window_size", window_size, -1, optional=True)
        self.max_position_embeddings = as_size(name, "max_position_embeddings", max_position_embeddings)
        self.rope_theta = None if rope_theta is None else as_number(rope_theta)
        self.backend = backend
        if num_heads % kv_heads:
            raise ValueError(f"{name}: argument `num_kv_heads` must divide `num_heads`, got {kv_heads} and {num_heads}")
        if head_dim is None:
            self.head_dim = _head_dim(name, embed_dim, num_heads, " unless `head_dim` is given")
        else:
            self.head_dim = head_dim
        _check_head_dim(name, "num_heads" if head_dim is None else "head_dim", self.head_dim)
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, kv_heads
        if rope_theta is not None:
            self._check_rotation()
        more = {"bias": bias, "device": device, "dtype": dtype, "backend": backend}
        self.q_proj = Linear(embed_dim, num_heads * self.head_dim, **more)  # type: ignore[arg-type]
        self.k_proj = Linear(embed_dim, kv_heads * self.head_dim, **more)  # type: ignore[arg-type]
        self.v_proj = Linear(embed_dim, kv_heads * self.head_dim, **more)  # type: ignore[arg-type]
        self.o_proj = Linear(num_heads * self.head_dim, embed_dim, **more)  # type: ignore[arg-type]
        self._freqs_cis = self._table()

    def _check_rotation(self) -> None:
        name, theta = "GroupedQueryAttention", self.rope_theta
        if isinstance(theta, bool) or not isinstance(theta, (int, float)):
            raise TypeError(f"{name}: argument `rope_theta` must be a number or None, got {type(theta).__name__}")
        if not 0 < theta <= sys.float_info.max:
            raise ValueError(f"{name}: argument `rope_theta` must be above 0 and finite, got {theta}")
        if self.head_dim % 2:
            raise ValueError(f"{name}: argument `head_dim` must be even to be rotated, got {self.head_dim}")

    def _ops(self) -> tuple[str, ...]:
        return self.OPS if self.rope_theta is None else (*self.OPS, "rope")

    def _apply(self, fn: Any, recurse: bool = True) -> GroupedQueryAttention:
        super()._apply(fn, recurse)
        self._freqs_cis = self._table()
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_freqs_cis": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._freqs_cis = self._table()

    def _table(self) -> torch.Tensor | None:
        """The angles of all positions where the weights are; None without rotation."""
        if self.rope_theta is None:
            return None
        return table_of(self.rope_theta, self.head_dim, self.max_position_embeddings, self.k_proj.weight.device)

    def _rotated(
        self, q: torch.Tensor, k: torch.Tensor, offset: int, offsets: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys, rotated by the angles of their positions, as :func:`kernel_ladder.rope` counts them."""
        if self.rope_theta is None:
            return q, k
        if self._freqs_cis is None or self._freqs_cis.device != k.device:  # parameters assigned from elsewhere
            self._freqs_cis = self._table()
        table: Any = self._freqs_cis
        q, k = (ops.rope(x, table, offsets, offset=offset, backend=self._backend) for x in (q, k))
        return q, k

    def _check_positions(self, tokens: int) -> None:
        """Raise ValueError unless a sequence of so many tokens fits in the table of angles."""
        if self.rope_theta is not None and tokens > self.max_position_embeddings:
            raise ValueError(
                f"GroupedQueryAttention: {tokens} tokens of a sequence do not fit in the "
                f"{self.max_position_embeddings} positions of `max_position_embeddings`"
            )

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def forward(
        self,
        x: torch.Tensor,
        cache: KVCache | PagedKVCache | None = None,
        sequences: Sequence[int] | None = None,
        batch_invariant: bool = False,
        places: Places | None = None,
    ) -> torch.Tensor:
        """Attend from each token of `x`, ``(B, S, E)``, to those up to it, and to those in `cache`, which grows.

        Args:
            x: tokens of B sequences.
            cache: keys and values of the tokens before.
            sequences: of a paged cache, the B sequences of `x`; None is all that are there.
            batch_invariant: of a paged cache, see :func:`kernel_ladder.attention_paged`.
            places: of a paged cache, what its ``reserve(S, sequences)`` returned: then `sequences` is None here. Inside
                ``torch.compile`` pass it as an argument: without it, each call leaves the graph to make the tables.
        """
        check_shape("GroupedQueryAttention", "x", x, {"B": None, "S": None, "E": self.embed_dim})
        q, k, v = (self._heads(projection(x)) for projection in (self.q_proj, self.k_proj, self.v_proj))
        window = (-1, -1) if self.window_size is None else (self.window_size, -1)
        if isinstance(cache, PagedKVCache):
            if places is None:
                places, offsets = self._placed(k, v, cache, sequences)
            elif sequences is not None:
                raise ValueError("GroupedQueryAttention: argument `sequences` must be None where `places` is given")
            else:
                cache.check_places(k, v, places)
                offsets = places.cache_seqlens
            q, k = self._rotated(q, k, 0 if offsets is None else -k.shape[-2], offsets)
            cache.write(k, v, places)
            output = ops.attention_paged(
                q, cache.keys, cache.values, places.block_table, places.cache_seqlens, is_causal=True,
                window_size=window, enable_gqa=self.num_kv_heads != self.num_heads, batch_invariant=batch_invariant,
                backend=self._backend,
            )  # fmt: skip
            return self.o_proj(output.transpose(1, 2).flatten(-2))
        for name, given, none in (
            ("sequences", sequences, None), ("batch_invariant", batch_invariant, False), ("places", places, None)
        ):  # fmt: skip
            if given is not none:
                raise ValueError(f"GroupedQueryAttention: argument `{name}` goes with a PagedKVCache alone")
        before = 0 if cache is None else cache.length
        self._check_positions(before + k.shape[-2])
        q, k = self._rotated(q, k, before)
        if cache is not None:
            k, v = cache.update(k, v)
        causal: bool | str = "lower_right" if k.shape[-2] != q.shape[-2] else True
        output = ops.attention(
            q, k, v, is_causal=causal, enable_gqa=self.num_kv_heads != self.num_heads, window_size=window,
            backend=self._backend,
        )  # fmt: skip
        return self.o_proj(output.transpose(1, 2).flatten(-2))

    def _placed(
        self, k: torch.Tensor, v: torch.Tensor, cache: PagedKVCache, sequences: Sequence[int] | None
    ) -> tuple[Places, torch.Tensor | None]:
        """Where new tokens stand, and the lengths that count them; None for the latter where all sequences begin."""
        chosen = cache.check(k, v, sequences)
        longest = max((cache.length(s) for s in chosen), default=0)
        self._check_positions(longest + k.shape[-2])
        places = cache.reserve(k.shape[-2], chosen)
        return places, places.cache_seqlens if longest else None

    # torch.compile calls it outside of the graph. The decorator for that imports the compiler, which takes seconds.
    _placed._torchdynamo_disable = True  # type: ignore[attr-defined]
    _placed._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
        "the tables of a PagedKVCache are made on the host: pass `places=cache.reserve(...)` to the compiled step"
    )

    def new_cache(self, batch_size: int, max_length: int) -> KVCache:
        """An empty cache for this layer, with its device and dtype."""
        w = self.k_proj.weight
        return KVCache(batch_size, self.num_kv_heads, max_length, self.head_dim, w.device, w.dtype)

    def new_paged_cache(self, num_pages: int, page_size: int = 16) -> PagedKVCache:
        """An empty cache in pages for this layer, with its device and dtype, and without sequences."""
        w = self.k_proj.weight
        longest = None if self.rope_theta is None else self.max_position_embeddings
        return PagedKVCache(num_pages, page_size, self.num_kv_heads, self.head_dim, w.device, w.dtype, longest)

    def extra_repr(self) -> str:
        heads = f"{self.embed_dim}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}"
        rotation = "" if self.rope_theta is None else f", rope_theta={self.rope_theta}"
        return self._with_backend(f"{heads}, head_dim={self.head_dim}{rotation}")
