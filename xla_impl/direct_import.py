"""JAX's import of a DLPack capsule without the Python around it, which takes most of the time of a small call.

``jax.dlpack.from_dlpack`` looks the backend up, asks for the stream, calls a function of jaxlib, and passes the array
through ``jnp.asarray``. Here that function is called alone, with the same arguments (jax/_src/dlpack.py). It is private
and its arguments change between versions. So :func:`find` tries it on a small tensor first, and compares what it gives
with the public import. Where anything differs, the public import stays.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.dlpack import DLDeviceType

#: Calls a function of jaxlib on an object with DLPack's protocol.
Import = Callable[[Any], Any]


def find(device: Any, of_torch: torch.device, public: Import, operand: Callable[[torch.Tensor], Any]) -> Import:
    """The quickest import for a device of JAX, which is `public` where the private function is another than expected.

    `operand` makes an object with DLPack's protocol of a tensor.
    """
    private = private_import()
    if private is None:
        return public
    kind = int(DLDeviceType.kDLCUDA if of_torch.type == "cuda" else DLDeviceType.kDLCPU)
    sample = torch.arange(6, dtype=torch.float32, device=of_torch).view(2, 3)
    for more in ((kind,), ()):  # jaxlib asks for the kind of the device from one version on
        found = _of(private, device, more)
        try:
            if _same(found(operand(sample)), public(operand(sample))):
                return found
        except Exception:  # whatever a function of other arguments raises
            continue
    return public


def private_import() -> Callable[..., Any] | None:
    """jaxlib's function, or None where it has another name."""
    try:
        return importlib.import_module("jax._src.lib")._jax.dlpack_managed_tensor_to_buffer
    except (ImportError, AttributeError):
        return None


def _of(private: Callable[..., Any], device: Any, more: tuple[int, ...]) -> Import:
    def imported(operand: Any) -> Any:
        stream = device.get_stream_for_external_ready_events()
        return private(operand.__dlpack__(stream=stream), device, stream, None, *more)

    return imported


def _same(found: Any, expected: Any) -> bool:
    """Whether two arrays are alike, and views of the same memory."""
    alike = (type(found), found.shape, found.dtype, found.weak_type, found.sharding, found.committed) == (
        type(expected), expected.shape, expected.dtype, expected.weak_type, expected.sharding, expected.committed,
    )  # fmt: skip
    return alike and found.unsafe_buffer_pointer() == expected.unsafe_buffer_pointer()
