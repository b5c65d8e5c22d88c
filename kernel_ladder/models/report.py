"""What a patch replaced in a model, what it left, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple


class Entry(NamedTuple):
    """A module by its name in the model, its class, and what replaced it or why nothing did."""

    name: str
    kind: str
    why: str


@dataclass
class Report:
    """Modules of a model: those replaced, and those left that were looked at, each with the reason."""

    model: str
    backend: str
    replaced: list[Entry] = field(default_factory=list)
    left: list[Entry] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{self.model}: {len(self.replaced)} modules replaced, backend {self.backend!r}"]
        lines += _grouped("replaced", self.replaced) + _grouped("left", self.left)
        return "\n".join(lines)


def _grouped(verb: str, entries: Iterable[Entry]) -> list[str]:
    counts = Counter((entry.kind, entry.why) for entry in entries)
    return [f"  {verb:<9}{count:>4} × {kind}: {why}" for (kind, why), count in counts.items()]
