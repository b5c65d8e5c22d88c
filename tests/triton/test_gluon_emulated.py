"""Warp-specialised Gluon kernels in Python, against float64: no interpreter takes them, and CI has no GPU."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kernel_ladder import spec
from kernel_ladder.spec import Case
from kernel_ladder.testing.agreement import agreement
from kernel_ladder.testing.samples import make_inputs
from triton_impl.attention import tma as attention_tma
from triton_impl.attention import warp_specialized
from triton_impl.attention.call import Call

from .gluon_emulator import DeadlockError, Descriptor, launch


class Sample(NamedTuple):
    """Shapes and options of a call."""

    heads: tuple[int, int]
    lengths: tuple[int, int]
    dims: tuple[int, int]
    is_causal: bool | str = False
    window_size: tuple[int, int] = (-1, -1)

    def case(self) -> Case:
        (h, h_kv), (q, k), (d, d_v) = self.heads, self.lengths, self.dims
        options = {"is_causal": self.is_causal, "scale": None, "enable_gqa": h != h_kv, "window_size": self.window_size}
        return Case("", ((2, h, q, d), (2, h_kv, k, d), (2, h_kv, k, d_v)), options)


SAMPLES = {
    "full": Sample((2, 2), (128, 128), (64, 64)),
    "ragged": Sample((2, 1), (100, 150), (64, 64)),
    "causal": Sample((1, 1), (200, 200), (64, 64), is_causal=True),
    "lower-right": Sample((2, 1), (70, 190), (64, 64), is_causal="lower_right"),
    "causal-more-queries": Sample((1, 1), (260, 65), (64, 64), is_causal="lower_right"),
    "window": Sample((2, 2), (300, 300), (64, 64), window_size=(40, 20)),
    "window-causal": Sample((2, 1), (130, 257), (64, 64), is_causal="lower_right", window_size=(90, -1)),
    "other-values": Sample((1, 1), (65, 129), (128, 64)),
    "padded-dims": Sample((1, 1), (64, 64), (40, 72), is_causal=True),
}


def forward(call: Call, config: dict, programs: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The forward kernel, as ``warp_specialized._first`` launches it."""
    output, lse = call.empty_results()
    block_n, consumers = config["BLOCK_N"], config["CONSUMERS"]
    batch, heads, seqlen_q, _ = call.q.shape
    tiles = -(-seqlen_q // (consumers * 64))
    count, fold = warp_specialized._programs(
        tiles, batch * heads, call.heads_per_section, call.kind == 1, programs or 3
    )
    d, d_v = call.constants["BLOCK_D"], call.constants["BLOCK_DV"]
    described = Descriptor(call.q, 64, d), Descriptor(call.k, block_n, d), Descriptor(call.v, block_n, d_v)
    arguments = (*attention_tma.arguments(call, output), fold)
    constants = {"BAND": call.kind, "BLOCK_D": d, "BLOCK_DV": d_v, **config}
    launch(warp_specialized._specialized_kernel, count, output, lse, *described, *arguments, **constants)
    return output, lse


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sample", SAMPLES)
def test_the_forward_kernel_agrees(sample, dtype):
    case = SAMPLES[sample].case()
    inputs = make_inputs(case, dtype, "cpu")
    call = Call.of(*inputs, None, case.options["is_causal"], None, case.options["window_size"])
    width = max(64, call.constants["BLOCK_D"], call.constants["BLOCK_DV"])
    for config in warp_specialized.configs(width):
        output, _ = forward(call, config.kwargs)
        found = agreement(spec("attention"), lambda *_, output=output, **options: output, inputs, case.options)
        assert found.agrees, (str(found), config)


def test_the_log_sum_exp_agrees():
    case = SAMPLES["causal-more-queries"].case()
    inputs = make_inputs(case, torch.bfloat16, "cpu")
    call = Call.of(*inputs, None, "lower_right", None, (-1, -1))
    _, lse = forward(call, warp_specialized.configs(64)[0].kwargs)
    expected = kernel_lse(call)
    torch.testing.assert_close(lse.view(expected.shape).double() * math.log(2), expected, rtol=1e-5, atol=1e-5)
    assert bool(expected.isneginf().any()), "the first queries see no key"


def kernel_lse(call: Call) -> torch.Tensor:
    q, k = call.q.double(), call.k.double()
    rows, cols = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None]
    seen = (cols <= rows + call.limits[1]) & (cols >= rows + call.limits[0])
    return (q @ k.mT * call.scale).masked_fill(~seen, -math.inf).logsumexp(-1)


# ---- the emulator --------------------------------------------------------------------------------------------------


@gluon.jit
def _waits(barriers, phase):
    mbarrier.wait(barriers.index(0), phase)


@gluon.jit
def _arrives(barriers, phase):
    mbarrier.arrive(barriers.index(0), count=1)


@gluon.jit
def _meeting_kernel(ARRIVALS: gl.constexpr, PHASE: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(barriers.index(0), count=ARRIVALS)
    gl.warp_specialize([(_waits, (barriers, PHASE)), (_arrives, (barriers, PHASE))], [4], [24])


def test_what_waits_for_ever_is_an_error():
    launch(_meeting_kernel, 1, ARRIVALS=1, PHASE=0)
    launch(_meeting_kernel, 1, ARRIVALS=2, PHASE=1)  # the phase before the first has ended
    with pytest.raises(DeadlockError, match="every partition waits"):
        launch(_meeting_kernel, 1, ARRIVALS=2, PHASE=0)


def test_a_barrier_that_more_arrive_at_than_it_counts_is_an_error():
    with pytest.raises(AssertionError, match="not initialised"):
        launch(_meeting_kernel, 1, ARRIVALS=0, PHASE=1)
