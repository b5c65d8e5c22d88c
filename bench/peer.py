"""A library to compare with, and how it is called for an operation: the libraries themselves are in peers.py."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import torch

from bench.measure.correctness import one_line
from bench.rows.store import PEER
from kernel_ladder.spec import dtype_name, dtype_names
from kernel_ladder.table import Variant

LEVEL = PEER
HALVES = (torch.float16, torch.bfloat16)
FLOATS = (*HALVES, torch.float32)

Call = Callable[..., torch.Tensor]
Unsupported = Callable[..., str | None]


def _takes_all(*inputs: torch.Tensor, **options: Any) -> str | None:
    return None


@dataclass
class Adapter:
    """How a peer is called for one operation.

    ``make()`` imports the library and returns its call, which takes the operation's inputs and options and returns the
    output. ``unsupported`` is that of a variant.
    """

    make: Callable[[], Call]
    dtypes: Sequence[torch.dtype]
    unsupported: Unsupported

    @functools.cached_property
    def call(self) -> Call:
        return self.make()


@dataclass
class Peer:
    """A library to compare with.

    Attributes:
        name: the library's; its backend is ``peer.<name>``.
        requirement: what pip installs it from: the version that the adapters were written for.
        capability: the least compute capability of a GPU that it runs on; None where it needs no GPU.
        adapters: by operation.
    """

    name: str
    requirement: str
    capability: tuple[int, int] | None
    adapters: dict[str, Adapter] = field(default_factory=dict)

    def covers(
        self, op: str, *, dtypes: Sequence[torch.dtype] = FLOATS, unsupported: Unsupported = _takes_all
    ) -> Callable[[Callable[[], Call]], Callable[[], Call]]:
        """Decorate the function that makes this peer's call for an operation. See :class:`Adapter`."""

        def add(make: Callable[[], Call]) -> Callable[[], Call]:
            self.adapters[op] = Adapter(make, dtypes, unsupported)
            return make

        return add

    @property
    def backend(self) -> str:
        return f"{LEVEL}.{self.name}"

    @functools.cached_property
    def version(self) -> str | None:
        """The installed version, or None."""
        package = re.match(r"[\w.-]+", self.requirement)[0]
        if package == "torch":
            return str(torch.__version__)  # with its build, as every row has it
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return None

    @property
    def absent(self) -> str | None:
        """How to get this peer where it is not installed, else None."""
        return None if self.version else f"not installed; `pip install '{self.requirement}'` gets it"

    def _no_gpu_for_it(self, input: torch.Tensor) -> str | None:
        if self.capability is None:
            return None
        if not input.is_cuda:
            return f"{self.name} needs a CUDA GPU, got tensors on {input.device.type}"
        found = torch.cuda.get_device_capability(input.device)
        if found < self.capability:
            least, here = (".".join(map(str, each)) for each in (self.capability, found))
            return f"{self.name} needs compute capability {least}, got {here}"
        return None

    def variant(self, op: str) -> Variant:
        """This peer as a variant of an operation that it covers. The dispatch table does not know it."""
        adapter = self.adapters[op]

        def forward(*inputs: torch.Tensor, **options: Any) -> tuple[torch.Tensor, tuple[()]]:
            return adapter.call(*inputs, **options), ()

        def unsupported(*inputs: torch.Tensor, **options: Any) -> str | None:
            if (reason := self.absent or self._no_gpu_for_it(inputs[0])) is not None:
                return reason
            if inputs[0].dtype not in adapter.dtypes:
                accepted, given = dtype_names(adapter.dtypes), dtype_name(inputs[0].dtype)
                return f"{self.name} takes {accepted} here, got {given}"
            try:
                adapter.call  # noqa: B018  imported now, so that no time measured later holds it
            except Exception as error:  # a library may raise anything where it does not fit the machine
                return f"{self.name} {self.version} cannot be imported: {one_line(error)}"
            return adapter.unsupported(*inputs, **options)

        return Variant(op, self.backend, forward, None, unsupported)
