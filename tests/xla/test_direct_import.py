"""The import of operands by jaxlib's function alone: the same arrays as the public one, which stands in for it."""

from __future__ import annotations

import pytest
import torch
from torch.utils.dlpack import to_dlpack

from kernel_ladder import table
from xla_impl import bridge, direct_import

from ..conftest import DEVICE

pytestmark = pytest.mark.skipif(table.unavailable("gelu", "xla") is not None, reason="JAX is not installed")


class Capsule:
    """A tensor as its exporter, for a device without streams too. What is exported has been written."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, self.x.get_device()) if self.x.is_cuda else (1, 0)

    def __dlpack__(self, *, stream: int | None = None, **_: object) -> object:
        if self.x.is_cuda:
            torch.cuda.current_stream(self.x.device).synchronize()
        return to_dlpack(self.x)


class WithoutStreams:
    """A device of JAX that has no stream to wait on."""

    def __init__(self, device: object) -> None:
        self.device = device

    def get_stream_for_external_ready_events(self) -> None:
        return None


def found() -> direct_import.Import:
    """What is found on this machine. On a CPU, jaxlib's function with no stream."""
    device = bridge._device(DEVICE)
    if DEVICE.type == "cuda":
        return direct_import.find(device, DEVICE, bridge.jax().dlpack.from_dlpack, Capsule)
    private = direct_import.private_import()
    assert private is not None
    return direct_import._of(lambda capsule, _, *more: private(capsule, device, *more), WithoutStreams(device), ())


@pytest.mark.parametrize(
    "dtype",
    [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool],
    ids=str,
)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4)], ids=str)
def test_arrays_are_those_of_the_public_import(dtype, shape):
    x = torch.ones(shape, dtype=dtype, device=DEVICE)
    with bridge.wide(x):
        expected = bridge.jax().dlpack.from_dlpack(Capsule(x))
        assert direct_import._same(found()(Capsule(x)), expected)


def test_the_array_keeps_the_tensor():
    x = torch.arange(5.0, device=DEVICE)
    pointer, array = x.data_ptr(), found()(Capsule(x))
    del x
    torch.full((5,), torch.nan, device=DEVICE)
    assert array.unsafe_buffer_pointer() == pointer
    assert array.tolist() == [0, 1, 2, 3, 4]


def test_a_jaxlib_without_the_function(monkeypatch):
    monkeypatch.setattr(direct_import, "private_import", lambda: None)
    public = object()
    assert direct_import.find(None, DEVICE, public, Capsule) is public


def test_a_function_with_other_arguments_or_results(monkeypatch):
    device = WithoutStreams(bridge._device(DEVICE))
    public = bridge.jax().dlpack.from_dlpack

    def refuses(*given):
        raise TypeError(f"takes other arguments, got {len(given)}")

    def copies(capsule, *more):
        return bridge.jax().numpy.array(public(Capsule(torch.zeros(2, 3, device=DEVICE))), copy=True)

    for function in (refuses, copies):
        monkeypatch.setattr(direct_import, "private_import", lambda function=function: function)
        assert direct_import.find(device, DEVICE, public, Capsule) is public
