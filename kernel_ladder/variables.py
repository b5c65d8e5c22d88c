"""Environment variables with a few accepted values."""

from __future__ import annotations

import os

from kernel_ladder.errors import VariableError


def switch(name: str) -> bool:
    """Whether a switch is on: ``0`` means off; ``1``, unset and empty mean on.

    Raises:
        VariableError: the variable has another value.
    """
    value = os.environ.get(name, "").strip()
    if value not in ("", "0", "1"):
        raise VariableError(f"the environment variable {name} must be 0 or 1, got {value!r}; unset means 1")
    return value != "0"
