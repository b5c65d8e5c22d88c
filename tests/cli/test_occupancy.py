"""Architectures by name: what they have, and how many blocks fit on an SM."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_ladder.inspection import architecture

ARCHITECTURES = st.sampled_from(list(architecture.ARCHITECTURES.values()))


@given(ARCHITECTURES, st.integers(1, 32), st.integers(1, 255), st.integers(0, 227 * 1024))
def test_occupancy_stays_within_the_sm(arch, warps, registers, shared):
    found = architecture.occupancy(arch, 32 * warps, registers, shared)
    assert 0 <= found.share <= 1
    assert found.blocks * 32 * warps <= arch.threads
    assert found.blocks * 32 * warps * registers <= architecture.REGISTERS
    assert found.blocks * (shared + architecture.SHARED_RESERVED) <= arch.shared
    assert found.limited_by
    assert architecture.occupancy(arch, 32 * warps, min(registers + 8, 255), shared).blocks <= found.blocks
    assert architecture.occupancy(arch, 32 * warps, registers, shared + 1024).blocks <= found.blocks


def test_occupancy_of_known_kernels():
    hopper = architecture.named("sm_90a")
    assert architecture.occupancy(hopper, 256, 32, 0) == architecture.Occupancy(8, 1.0, ("threads", "registers"))
    assert architecture.occupancy(hopper, 128, 16, 100 * 1024).limited_by == ("shared memory",)
    # 168 registers a thread, 5376 a warp: three warps a scheduler, twelve in all, of which a block of eight takes one.
    assert architecture.occupancy(hopper, 256, 168, 0).blocks == 1
    assert architecture.occupancy(hopper, 1024, 255, 0).blocks == 0


@pytest.mark.parametrize("text", ["sm_90", "sm_90a", "SM90", "90", "9.0"])
def test_names_of_an_architecture(text):
    assert architecture.named(text).number == 90


def test_features_by_capability():
    assert "wgmma" in architecture.features(90)
    assert "TMA" not in architecture.features(89)
    assert "cp.async" in architecture.features(80)
    for number in (100, 120):
        assert "wgmma" not in architecture.features(number)
        assert "TMA" in architecture.features(number)
