"""The ``backend`` of a module: checked when it is set, not in the first forward pass."""

from __future__ import annotations

from typing import ClassVar

import torch

from kernel_ladder import selection


def check_backend(ops: tuple[str, ...], backend: str | None) -> None:
    """Raise unless every operation has this backend on this machine.

    Raises:
        TypeError: `backend` is neither a str nor None. BackendError: an operation has no such backend.
        UnavailableError: not on this machine.
    """
    if backend is not None:
        for op in ops:
            selection.check(op, backend)


class HasBackend:
    """A module that passes its ``backend`` to calls of the operations in ``OPS``; None is the calls' own default."""

    OPS: ClassVar[tuple[str, ...]] = ()
    _backend: str | None = None

    @property
    def backend(self) -> str | None:
        return self._backend

    @backend.setter
    def backend(self, backend: str | None) -> None:
        check_backend(self._ops(), backend)
        self._backend = backend

    def _ops(self) -> tuple[str, ...]:
        """The operations that this module calls."""
        return self.OPS

    def _with_backend(self, representation: str) -> str:
        if self._backend is None:
            return representation
        return ", ".join(part for part in (representation, f"backend={self._backend!r}") if part)


class HasParts(HasBackend, torch.nn.Module):
    """A module made of others, which have the parameters."""

    def reset_parameters(self) -> None:
        for part in self.children():
            part.reset_parameters()  # type: ignore[operator]

    def extra_repr(self) -> str:
        return self._with_backend("")
