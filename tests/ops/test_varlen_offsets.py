"""Offsets of packed sequences that do not fit: refused on the host, and harmless on a GPU."""

from __future__ import annotations

import math

import pytest
import torch

import kernel_ladder
from kernel_ladder import table

from ..conftest import DEVICE, needs_gpu, variant_id

HEADS, DIM, ROWS = 2, 64, 10
#: Offsets of sequences in ten rows that do not fit, and what the message says of them.
WRONG = {
    "past": ((0, 4, 50), "from 0 to 10"),
    "far-past": ((0, 4, 2**31 - 1), "from 0 to 10"),
    "fall": ((0, 8, 4), "from 0 to 10"),
    "fall-inside": ((0, 8, 4, 10), "never fall"),
    "below": ((-(2**31), 4, 10), "from 0 to 10"),
    "below-inside": ((0, -7, 10), "never fall"),
    "late": ((3, 4, 10), "from 0 to 10"),
    "short": ((0, 4, 9), "from 0 to 10"),
    "nowhere": ((2**31 - 1, -(2**31), 2**31 - 1), "from 0 to 10"),
}

VARIANTS = [
    v
    for v in table.variants("attention_varlen")
    if (table.unavailable("attention_varlen", v.level) or v.here()) is None
]


def offsets(places: tuple[int, ...], device: torch.device | str = "cpu") -> torch.Tensor:
    return torch.tensor(places, dtype=torch.int32, device=device)


@pytest.mark.parametrize(("places", "message"), WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("of", ["q", "k"])
@pytest.mark.parametrize("variant", VARIANTS, ids=variant_id)
def test_offsets_on_the_host_are_checked(variant, of, places, message):
    right = offsets((*range(len(places) - 1), ROWS))
    of_q, of_k = (offsets(places), right) if of == "q" else (right, offsets(places))
    x = torch.zeros(ROWS, HEADS, DIM)
    with pytest.raises(ValueError, match=f"`cu_seqlens_{of}` .*{message}"):
        kernel_ladder.attention_varlen(x, x, x, of_q, of_k, backend=variant.name)


@pytest.mark.parametrize("of", ["q", "k"])
def test_the_longest_length_on_the_host_is_checked(of):
    x, places = torch.zeros(ROWS, HEADS, DIM), offsets((0, 3, 10))
    with pytest.raises(
        ValueError, match=f"`max_seqlen_{of}` must be at least the longest sequence .* got 6 for one of 7"
    ):
        kernel_ladder.attention_varlen(x, x, x, places, places, **{f"max_seqlen_{of}": 6})


class Guarded:
    """Tensors inside of larger buffers, of which all else is NaN: a read spreads it, a write replaces it."""

    MARGIN = 4096

    def __init__(self) -> None:
        self.made: list[tuple[torch.Tensor, torch.Tensor]] = []

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        count = torch.Size(shape).numel()
        buffer = torch.full((count + 2 * self.MARGIN,), math.nan, dtype=dtype, device=DEVICE)
        inside = buffer[self.MARGIN : self.MARGIN + count].view(shape)
        self.made.append((buffer, inside.zero_()))
        return inside

    def neighbours(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Blocks of a tensor's size, of which every second one is given back: what C++ allocates comes to lie there."""
        blocks = [torch.full(shape, math.nan, dtype=dtype, device=DEVICE) for _ in range(64)]
        self.made += [(block, block[:0]) for block in blocks[::2]]

    def check(self) -> None:
        for buffer, inside in self.made:
            assert not inside.isnan().any(), "what lies around a tensor was read"
            assert int(buffer.isnan().sum()) == buffer.numel() - inside.numel(), "what lies around a tensor was written"


@pytest.fixture
def guarded(monkeypatch) -> Guarded:
    """Outputs and gradients that Triton's variants allocate lie in guard zones too."""
    guard, new_empty, empty = Guarded(), torch.Tensor.new_empty, torch.empty

    def new_empty_inside(self, shape, *, dtype=None, **others):
        made_here = not others and shape != 0  # Triton's interpreter makes views of nothing
        return guard.tensor(shape, dtype or self.dtype) if made_here else new_empty(self, shape, dtype=dtype, **others)

    def empty_inside(*shape, **options):
        is_lse = options.get("dtype") is torch.float32
        return guard.tensor(shape[0], torch.float32) if is_lse else empty(*shape, **options)

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty_inside)
    monkeypatch.setattr(torch, "empty", empty_inside)
    return guard


#: Those that read offsets where they do not know what these are.
ON_A_DEVICE = [v for v in VARIANTS if v.level == "triton" or (DEVICE.type == "cuda" and v.level != "compile")]


@pytest.mark.skipif(not ON_A_DEVICE, reason="no variant reads offsets on a device here")
@pytest.mark.parametrize("places", [places for places, _ in WRONG.values()], ids=WRONG)
@pytest.mark.parametrize("of", ["q", "k", "both"])
@pytest.mark.parametrize("variant", ON_A_DEVICE, ids=variant_id)
def test_wrong_offsets_reach_nothing_outside_of_the_tensors(variant, of, places, guarded):
    """As on a GPU, where offsets are not looked at. Rows that no sequence has get no value."""
    dtype, shape = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32, (ROWS, HEADS, DIM)
    right = (*range(len(places) - 1), ROWS)
    of_q = offsets(right if of == "k" else places, DEVICE)
    of_k = offsets(right if of == "q" else places, DEVICE)
    inputs = [guarded.tensor(shape, dtype).normal_() for _ in range(3)]
    if DEVICE.type == "cuda":
        guarded.neighbours(shape, dtype)
    for is_causal in (False, True):
        options = {"is_causal": is_causal, "scale": None, "enable_gqa": False, "max_seqlen_q": ROWS}
        # The variant itself, past the check of the public function.
        wanted = [x.detach().requires_grad_(variant.level == "torch") for x in inputs]
        assert variant.unsupported(*wanted, of_q, of_k, **options, max_seqlen_k=ROWS) is None
        output, saved = variant.forward(*wanted, of_q, of_k, **options, max_seqlen_k=ROWS)
        if variant.backward is not None:
            variant.backward(saved, torch.ones_like(output), (True, True, True, False, False))
        elif output.requires_grad:
            output.backward(torch.ones_like(output))
        guarded.check()


@needs_gpu
@pytest.mark.parametrize("variant", ON_A_DEVICE, ids=variant_id)
def test_right_offsets_are_right_beside_wrong_ones(variant):
    """A call with offsets that do not fit leaves the process as it was."""
    x = torch.randn(ROWS, HEADS, DIM, dtype=torch.bfloat16, device=DEVICE)
    right = offsets((0, 4, ROWS), DEVICE)
    options = {"max_seqlen_q": ROWS, "max_seqlen_k": ROWS}
    before = kernel_ladder.attention_varlen(x, x, x, right, right, **options, backend=variant.name)
    kernel_ladder.attention_varlen(x, x, x, offsets((0, 8, 2**30), DEVICE), right, **options, backend=variant.name)
    after = kernel_ladder.attention_varlen(x, x, x, right, right, **options, backend=variant.name)
    assert torch.equal(before, after)
