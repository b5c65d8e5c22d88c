"""A key-value cache in pages, for sequences of different lengths that come and go."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from kernel_ladder.nn.arguments import as_size, check_dtype, check_shape
from kernel_ladder.nn.cache import without_graph
from kernel_ladder.ops.calls import as_int


class Places(NamedTuple):
    """Where S new tokens of B sequences stand in a :class:`PagedKVCache`: tensors alone, for a compiled step.

    Attributes:
        rows: ``(B · S,)``, int64, of each new token among all ``num_pages · page_size``.
        block_table: ``(B, max_pages)``, int32, as :func:`kernel_ladder.attention_paged` takes it.
        cache_seqlens: ``(B,)``, int32, tokens of each sequence, the new ones included.
    """

    rows: torch.Tensor
    block_table: torch.Tensor
    cache_seqlens: torch.Tensor


class PagedKVCache:
    """Keys and values of many sequences in memory allocated once: ``(num_pages, page_size, H_kv, D)`` each.

    A sequence takes pages as it grows, and gives them back when it ends. No other sequence moves. The tables are made
    on the host: call :meth:`reserve` outside of ``torch.compile``, and pass what it returns to the compiled step.

    Args:
        num_pages, page_size: pages, and tokens of one page.
        num_kv_heads, head_dim: sizes of a token.
        device, dtype: of the memory.
        max_length: tokens of a sequence at most; None is as many as pages hold.

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
        max_length: int | None = None,
    ) -> None:
        sizes = {"num_pages": num_pages, "page_size": page_size, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        shape = [as_size("PagedKVCache", name, size) for name, size in sizes.items()]
        max_length = as_size("PagedKVCache", "max_length", max_length, optional=True)
        check_dtype("PagedKVCache", dtype)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self._free = list(range(shape[0] - 1, -1, -1))  # the next one last
        self._pages: dict[int, list[int]] = {}  # of each sequence, in the order of its tokens
        self._lengths: dict[int, int] = {}
        self._number = 0
        self.max_length = max_length

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
        given = [self._lengths[s] for s in self._all_known(sequences)]
        return torch.tensor(given, dtype=torch.int32, device=self.keys.device)

    def add(self) -> int:
        """Begin a sequence without tokens, and return its number."""
        self._number += 1
        self._lengths[self._number], self._pages[self._number] = 0, []
        return self._number

    def free(self, sequence: int) -> None:
        """End a sequence: its pages serve others. The autograd graph ends with the last one."""
        sequence = self._known(sequence)
        del self._lengths[sequence]
        self._free += reversed(self._pages.pop(sequence))
        if not self._lengths:
            self.keys, self.values = without_graph(self.keys), without_graph(self.values)

    def reset(self) -> None:
        """End all sequences; the memory stays."""
        for sequence in self.sequences:
            self.free(sequence)

    def update(
        self, key: torch.Tensor, value: torch.Tensor, sequences: Sequence[int] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append as many tokens to each of some sequences, and return where all of theirs are.

        It is :meth:`reserve`, then :meth:`write`.

        Args:
            key, value: ``(B, H_kv, S, D)``, S new tokens of B sequences, converted to the cache's dtype.
            sequences: the B sequences of the batch; None is all that are there, in the order of `sequences`.

        Returns:
            ``block_table`` ``(B, max_pages)`` and ``cache_seqlens`` ``(B,)``, both int32, for
            :func:`kernel_ladder.attention_paged`.

        Raises:
            TypeError: an argument is no tensor, or a sequence no int.
            ValueError: shapes do not fit, a sequence is not there or named twice, a sequence would be longer than
                `max_length`, or too few pages are free. Then nothing is changed.
        """
        chosen = self.check(key, value, sequences)
        places = self.reserve(key.shape[2], chosen)
        self.write(key, value, places)
        return places.block_table, places.cache_seqlens

    def reserve(self, new: int, sequences: Sequence[int] | None = None) -> Places:
        """Give pages to `new` more tokens of each of some sequences, and return where they stand.

        The host does all of it, and makes three small tensors. What it returns are arguments of a compiled step, which
        then compiles once for a number of tokens, and once more for any number of pages.

        Raises:
            TypeError: `new` is no int. ValueError: it is below 0, or as :meth:`update`. Then nothing is changed.
        """
        new = as_size("PagedKVCache", "new", new, 0)
        chosen, size = self._chosen(sequences), self.page_size
        lengths = [self._lengths[s] + new for s in chosen]
        if self.max_length is not None and max(lengths, default=0) > self.max_length:
            raise ValueError(
                f"PagedKVCache: {max(lengths)} tokens of a sequence are more than `max_length`, {self.max_length}"
            )
        missing = [-(-n // size) - len(self._pages[s]) for s, n in zip(chosen, lengths, strict=True)]
        if (needed := sum(missing)) > self.free_pages:
            raise ValueError(
                f"PagedKVCache: {new} more tokens of {len(chosen)} sequences need {needed} pages, and "
                f"{self.free_pages} of {self.keys.shape[0]} are free: free a sequence, or make `num_pages` larger"
            )
        rows: list[int] = []
        for s, n, pages in zip(chosen, lengths, missing, strict=True):
            self._pages[s] += [self._free.pop() for _ in range(pages)]
            rows += [self._pages[s][i // size] * size + i % size for i in range(n - new, n)]
            self._lengths[s] = n
        columns = max((len(self._pages[s]) for s in chosen), default=0)
        table = [self._pages[s] + [0] * (columns - len(self._pages[s])) for s in chosen]
        device = self.keys.device
        return Places(
            torch.tensor(rows, dtype=torch.int64, device=device),
            torch.tensor(table, dtype=torch.int32, device=device).view(len(chosen), columns),
            torch.tensor(lengths, dtype=torch.int32, device=device),
        )

    def write(self, key: torch.Tensor, value: torch.Tensor, places: Places) -> None:
        """Store keys and values, ``(B, H_kv, S, D)``, at places that :meth:`reserve` gave, in the cache's dtype.

        Raises:
            TypeError, ValueError: as :meth:`check_places`. Then nothing is changed.
        """
        self.check_places(key, value, places)
        for memory, x in ((self.keys, key), (self.values, value)):
            memory.flatten(0, 1).index_copy_(0, places.rows, x.transpose(1, 2).flatten(0, 1).to(memory.dtype))

    def _known(self, given: Any) -> int:
        sequence = as_int(given)
        if type(sequence) is not int:
            raise TypeError(f"PagedKVCache: a sequence is an int that `add` returned, got {type(given).__name__}")
        if sequence not in self._lengths:
            known = ", ".join(map(str, self.sequences)) or "none"
            raise ValueError(f"PagedKVCache: there is no sequence {sequence}; there are {known}")
        return sequence

    def _all_known(self, sequences: Any) -> tuple[int, ...]:
        if sequences is None:
            return self.sequences
        if not isinstance(sequences, Iterable):
            given = type(sequences).__name__
            raise TypeError(f"PagedKVCache: argument `sequences` must be a sequence of ints or None, got {given}")
        return tuple([self._known(s) for s in sequences])

    def check(self, key: torch.Tensor, value: torch.Tensor, sequences: Sequence[int] | None = None) -> tuple[int, ...]:
        """The sequences that :meth:`update` would append to. It raises as that does, except for too many tokens."""
        chosen = self._chosen(sequences)
        self.check_shapes(key, value, len(chosen))
        return chosen

    def check_shapes(self, key: torch.Tensor, value: torch.Tensor, batch: int) -> None:
        """Raise TypeError or ValueError unless keys and values are new tokens of `batch` sequences."""
        _, _, heads, head_dim = self.keys.shape
        dims: dict[str, int | None] = {"B": batch, "H_kv": heads, "S": None, "D": head_dim}
        check_shape("PagedKVCache", "key", key, dims, " for B sequences")
        check_shape("PagedKVCache", "value", value, {**dims, "S": key.shape[2]}, " for B sequences")

    def check_places(self, key: torch.Tensor, value: torch.Tensor, places: Places) -> None:
        """Raise unless `places` are what :meth:`reserve` gave to as many tokens.

        Raises:
            TypeError: they are none. ValueError: shapes do not fit.
        """
        if not isinstance(places, Places):
            given = type(places).__name__
            raise TypeError(f"PagedKVCache: argument `places` must be Places, which `reserve` returns, got {given}")
        self.check_shapes(key, value, places.cache_seqlens.shape[0])
        batch, _, new, _ = key.shape
        if places.rows.shape[0] != batch * new:
            raise ValueError(
                f"PagedKVCache: argument `places` must hold the {batch * new} tokens of `key`, {new} of each sequence, "
                f"got {places.rows.shape[0]}"
            )

    def _chosen(self, sequences: Sequence[int] | None) -> tuple[int, ...]:
        chosen = self._all_known(sequences)
        if len(set(chosen)) != len(chosen):
            raise ValueError(f"PagedKVCache: argument `sequences` must name each sequence once, got {list(chosen)}")
        return chosen
