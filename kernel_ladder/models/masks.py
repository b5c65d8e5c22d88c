"""The masks of ``attn_implementation="kernel_ladder"``: a causal sliding window stays a number, all others are tensors.

Only fast rungs take windows, and none of them takes a boolean mask. transformers builds each mask by a function of its
attention implementation. Its own for PyTorch's attention expands every window to a tensor of each query and key.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from kernel_ladder import gpu
from kernel_ladder.semantics.masks import seen


class CausalWindow:
    """The mask of queries that see their own key and the ``size - 1`` keys before it; a tensor only where one is asked.

    :func:`kernel_ladder.models.attention.attention_forward` reads `size`. Torch functions, indices and attributes see
    the boolean tensor, True where a query sees a key, so that code which does not know this class computes the same.

    Args:
        size: keys that a query sees, at least 1.
        shape: of the tensor, ``(B, 1, S_q, S_k)``; query i and key i are the same token.
        device: of the tensor.
    """

    def __init__(self, size: int, shape: tuple[int, ...], device: Any) -> None:
        self.size, self.shape, self.device = size, torch.Size(shape), device

    def tensor(self) -> torch.Tensor:
        """The boolean mask, expanded over the batch."""
        *_, rows, columns = self.shape
        return seen(1 - self.size, 0, rows, columns, self.device).expand(self.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.tensor()[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*_expanded(args), **_expanded(kwargs or {}))


def _expanded(x: Any) -> Any:
    if isinstance(x, CausalWindow):
        return x.tensor()
    if isinstance(x, dict):
        return {name: _expanded(y) for name, y in x.items()}
    return type(x)(map(_expanded, x)) if type(x) in (tuple, list) else x


def build_mask(*args: Any, **given: Any) -> torch.Tensor | CausalWindow | None:
    """A mask as transformers' ``sdpa_mask`` builds it, with its arguments, except for windows.

    A causal sliding window over tokens from the first one on, none of them padding, gives a :class:`CausalWindow`. One
    query that sees every key of its window gives None. All else is what ``sdpa_mask`` gives: patterns with more than a
    window, a padding mask with padding, queries that continue a cache, and tensors of lengths.

    While a call is traced, no padding mask can be read. Where there is none, or that of :func:`without_padding`, a
    causal mask of equal lengths is None, and so is a mask that hides nothing: some releases of transformers make
    tensors of both in a graph. A causal window stays one.
    """
    from transformers.masking_utils import sdpa_mask

    padding = given.get("attention_mask")
    if torch.compiler.is_compiling() and _repeats_one_element(padding):
        padding = given["attention_mask"] = None
    if isinstance(padding, CausalWindow):  # generate() builds masks itself, and the model passes them on
        return padding
    if not args and not _is_traced() and _is_causal_window(given):
        size, queries, keys = given["local_size"], given["q_length"], given["kv_length"]
        first, first_key = given.get("q_offset", 0), given.get("kv_offset", 0)
        if all(type(n) is int for n in (size, queries, keys, first, first_key)) and keys >= size:
            if queries > 1 and first == first_key == 0 and keys >= queries and _all_real(padding, 0, queries):
                return CausalWindow(size, (given["batch_size"], 1, queries, keys), given.get("device", "cpu"))
            sees_all = first_key + keys - 1 <= first < first_key + size
            if queries == 1 and sees_all and _all_real(padding, first_key, first_key + keys):
                return None
    if args or padding is not None or not torch.compiler.is_compiling():
        return sdpa_mask(*args, **given)
    if _hides_nothing(given):
        return None
    if not _counts_from_the_first(given):
        return sdpa_mask(**given)
    size, keys = given.get("local_size"), given["kv_length"]
    if size is None or keys < size:
        return None
    if _is_window_of(given.get("config"), given):
        return CausalWindow(size, (given["batch_size"], 1, keys, keys), given.get("device", "cpu"))
    return sdpa_mask(**given)


def takes_padding(model: Any) -> bool:
    """Whether a model without an encoder has the arguments that :func:`without_padding` looks at."""
    names = inspect.signature(model.forward).parameters
    return {"attention_mask", "position_ids"} <= set(names) and not model.config.is_encoder_decoder


def without_padding(module: torch.nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[Any, Any] | None:
    """A pre-hook of causal models: says that nothing is padded, while torch.compile traces a call that says nothing.

    Without a padding mask and a cache, transformers looks for packed sequences in the positions. In a graph it cannot
    read them, and makes a mask of each query and key. A call that gives no positions has none but its tokens' own.
    """
    tokens = args[0] if len(args) == 1 else given.get("input_ids")
    told = ("attention_mask", "position_ids", "past_key_values", "cache")  # the last two are one, by transformers' age
    silent = all(given.get(name) is None for name in told)
    if not torch.compiler.is_compiling() or len(args) > 1 or tokens is None or not silent:
        return None
    mask = torch.ones((), dtype=torch.bool, device=tokens.device).expand(tokens.shape[0], tokens.shape[1])
    return args, {**given, "attention_mask": mask}


def _repeats_one_element(padding: Any) -> bool:
    """Whether a padding mask is one element, expanded, as that of :func:`without_padding` is."""
    return isinstance(padding, torch.Tensor) and padding.dim() == 2 and padding.stride() == (0, 0)


def _counts_from_the_first(given: dict[str, Any]) -> bool:
    """Whether a mask without padding has as many queries as keys, and may be left away."""
    if not given.get("allow_is_causal_skip", True):
        return False
    offsets = given.get("q_offset", 0), given.get("kv_offset", 0)
    return all(isinstance(n, int) and n == 0 for n in offsets) and bool(given["q_length"] == given["kv_length"])


def _hides_nothing(given: dict[str, Any]) -> bool:
    """Whether a mask without padding is that of an encoder, in which every token sees all others."""
    size = given.get("local_size")
    return bool(given.get("allow_is_bidirectional_skip", False) and (size is None or given["kv_length"] < size))


def _is_window_of(config: Any, given: dict[str, Any]) -> bool:
    """Whether a mask of ``local_size`` is a causal window in a graph, where its function cannot be looked at.

    transformers' masks of chunks have a ``local_size`` too, of another name in the configuration, and those of windows
    on both sides have another keyword.
    """
    chunk, window = (getattr(config, name, None) for name in ("attention_chunk_size", "sliding_window"))
    return "allow_is_causal_skip" in given and chunk is None and window == given["local_size"]


def _is_causal_window(given: dict[str, Any]) -> bool:
    """Whether a mask's pattern is a causal sliding window of ``local_size`` keys and no more."""
    from transformers.masking_utils import sliding_window_causal_mask_function

    size, function = given.get("local_size"), given.get("mask_function")
    if size is None or function is None or not given.get("allow_is_causal_skip", True):
        return False
    return _same(function, sliding_window_causal_mask_function(size))


def _same(one: Any, other: Any) -> bool:
    """Whether two functions have the same code, and closures of the same functions and numbers."""
    if one is other:
        return True
    if isinstance(one, FunctionType) and isinstance(other, FunctionType):
        return one.__code__ is other.__code__ and _same(_closure(one), _closure(other))
    if type(one) is tuple and type(other) is tuple:
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is int and type(other) is int and one == other


def _closure(function: Callable[..., Any]) -> tuple[Any, ...]:
    return tuple(cell.cell_contents for cell in getattr(function, "__closure__", None) or ())


def _is_traced() -> bool:
    """Whether values of tensors cannot be read, or would become constants of a graph."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or gpu.capturing()


def _all_real(padding: Any, start: int, stop: int) -> bool:
    """Whether tokens `start` to `stop` of every sequence are no padding, by a padding mask ``(B, S)`` or None."""
    if padding is None:
        return True
    if not isinstance(padding, torch.Tensor) or padding.dim() != 2 or padding.shape[1] < stop:
        return False
    return type(padding) is torch.Tensor and bool(padding[:, start:stop].all())
