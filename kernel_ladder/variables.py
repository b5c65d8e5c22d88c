"""Environment variables with a few accepted values."""

from __future__ import annotations

import os

from kernel_ladder.errors import VariableError


def switch(name: str) -> bool:
    """Whether a variable that switches something off is not ``0``; unset and empty mean ``1``.

    Raises:
        VariableError: it is neither.
    """
    value = os.environ.get(name, "").strip()
    if value not in ("", "0", "1"):
        raise VariableError(f"the environment variable {name} must be 0 or 1, got {value!r}; unset means 1")
    return value != "0"
