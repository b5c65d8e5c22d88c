"""JAX's modules by the names that its users give them, imported when a kernel is first traced."""

from __future__ import annotations

import importlib
from typing import Any

from xla_impl import bridge


class _Module:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        bridge.jax()  # sets what JAX reads when it is imported
        return getattr(importlib.import_module(self._name), attribute)


jax: Any = _Module("jax")
jnp: Any = _Module("jax.numpy")
lax: Any = _Module("jax.lax")
pl: Any = _Module("jax.experimental.pallas")
plgpu: Any = _Module("jax.experimental.pallas.triton")
