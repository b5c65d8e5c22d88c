"""A key-value cache in pages, for sequences of different lengths that come and go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class PagedKVCache:
    """Keys and values of many sequences in memory allocated once: ``(num_pages, page_size, H_kv, D)`` each.

    A sequence takes pages as it grows, and gives them back when it ends. No other sequence moves. The tables are made
    on the host, so the cache is for inference outside of ``torch.compile``.

    Args:
        num_pages, page_size: pages, and tokens of one page.
        num_kv_heads, head_dim: sizes of a token.
        device, dtype: of the memory.

    Attributes:
        keys, values: the memory, as ``key_cache`` and ``value_cache`` of :func:`kernel_ladder.attention_paged`.

    Source: Kwon et al., PagedAttention, arXiv:2309.06180.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        for name, size in (("num_pages", num_pages), ("page_size", page_size)):
            if size < 1:
                raise ValueError(f"PagedKVCache: argument `{name}` must be 1 or more, got {size}")
        shape = (num_pages, page_size, num_kv_heads, head_dim)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self._free = list(range(num_pages - 1, -1, -1))  # the next one last
        self._pages: dict[int, list[int]] = {}  # of each sequence, in the order of its tokens
        self._lengths: dict[int, int] = {}
        self._number = 0

    @property
    def page_size(self) -> int:
        """Tokens of one page."""
        return self.keys.shape[1]

    @property
    def free_pages(self) -> int:
        """Pages that no sequence has."""
        return len(self._free)

    @property
    def sequences(self) -> tuple[int, ...]:
        """The sequences that are there, in the order in which they were added."""
        return tuple(self._lengths)

    def length(self, sequence: int) -> int:
        """Tokens of a sequence so far."""
        return self._lengths[self._known(sequence)]

    def lengths(self, sequences: Sequence[int] | None = None) -> torch.Tensor:
        """Tokens so far of some sequences, or of all: ``(B,)``, int32, as `offsets` of :func:`kernel_ladder.rope`."""
        chosen = self.sequences if sequences is None else sequences
        return torch.tensor([self.length(s) for s in chosen], dtype=torch.int32, device=self.keys.device)

    def add(self) -> int:
        """Begin a sequence without tokens, and return its number."""
        self._number += 1
        self._lengths[self._number], self._pages[self._number] = 0, []
        return self._number

    def free(self, sequence: int) -> None:
        """End a sequence: its pages serve others."""
        del self._lengths[self._known(sequence)]
        self._free += reversed(self._pages.pop(sequence))

    def reset(self) -> None:
        """End all sequences; the memory stays."""
        for sequence in self.sequences:
            self.free(sequence)

    def update(
        self, key: torch.Tensor, value: torch.Tensor, sequences: Sequence[int] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append as many tokens to each of some sequences, and return where all of theirs are.

        Args:
            key, value: ``(B, H_kv, S, D)``, S new tokens of B sequences.
            sequences: the B sequences of the batch; None is all that are there, in the order of `sequences`.

        Returns:
            ``block_table`` ``(B, max_pages)`` and ``cache_seqlens`` ``(B,)``, both int32, for
            :func:`kernel_ladder.attention_paged`.

        Raises:
            ValueError: shapes do not fit, a sequence is not there or named twice, or too few pages are free. Then
                nothing is changed.
        """
        chosen = self.check(key, value, sequences)
        new, size = key.shape[2], self.page_size
        lengths = [self._lengths[s] + new for s in chosen]
        missing = [-(-n // size) - len(self._pages[s]) for s, n in zip(chosen, lengths, strict=True)]
        if (needed := sum(missing)) > self.free_pages:
            raise ValueError(
                f"PagedKVCache: {new} more tokens of {len(chosen)} sequences need {needed} pages, and "
                f"{self.free_pages} of {self.keys.shape[0]} are free: free a sequence, or make `num_pages` larger"
            )
        rows: list[int] = []  # in the memory of all pages, of each new token
        for s, n, pages in zip(chosen, lengths, missing, strict=True):
            self._pages[s] += [self._free.pop() for _ in range(pages)]
            rows += [self._pages[s][i // size] * size + i % size for i in range(n - new, n)]
            self._lengths[s] = n
        places = torch.tensor(rows, dtype=torch.int64, device=self.keys.device)
        for memory, x in ((self.keys, key), (self.values, value)):
            memory.flatten(0, 1).index_copy_(0, places, x.transpose(1, 2).flatten(0, 1))
        columns = max((len(self._pages[s]) for s in chosen), default=0)
        table = [self._pages[s] + [0] * (columns - len(self._pages[s])) for s in chosen]
        block_table = torch.tensor(table, dtype=torch.int32, device=self.keys.device).view(len(chosen), columns)
        return block_table, torch.tensor(lengths, dtype=torch.int32, device=self.keys.device)

    def _known(self, sequence: int) -> int:
        if sequence not in self._lengths:
            known = ", ".join(map(str, self.sequences)) or "none"
            raise ValueError(f"PagedKVCache: there is no sequence {sequence!r}; there are {known}")
        return sequence

    def check(self, key: torch.Tensor, value: torch.Tensor, sequences: Sequence[int] | None = None) -> tuple[int, ...]:
        """The sequences that :meth:`update` would append to. It raises as that does, except for pages that lack."""
        chosen = self.sequences if sequences is None else tuple(sequences)
        for sequence in chosen:
            self._known(sequence)
        if len(set(chosen)) != len(chosen):
            raise ValueError(f"PagedKVCache: argument `sequences` must name each sequence once, got {list(chosen)}")
        _, _, heads, head_dim = self.keys.shape
        for name, x in (("key", key), ("value", value)):
            of_token = x.dim() == 4 and (x.shape[1], x.shape[3]) == (heads, head_dim)
            if not of_token or x.shape[0] != len(chosen) or x.shape != key.shape:
                raise ValueError(
                    f"PagedKVCache: argument `{name}` must have shape (B, H_kv, S, D) = ({len(chosen)}, {heads}, S, "
                    f"{head_dim}) for {len(chosen)} sequences, got {tuple(x.shape)}"
                )
        return chosen
