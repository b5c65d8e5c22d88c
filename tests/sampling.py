"""A share of the cases that take long, of tests marked ``sampled``: all of them take an hour.

Most are made anew by a compiler. Without a GPU, those of Triton are interpreted, or compiled for a GPU that is not
there, and those of CUDA disassemble the extension.

A case is chosen by its name's checksum, so that the same ones run everywhere. ``--every-case`` runs all. The mark takes
``level=`` where a case's name tells none, and ``device=`` where a test chooses for itself on the other.
"""

from __future__ import annotations

import re
import zlib

import pytest

#: Modes of ``compile.default``: the same code, launched or tuned in another way. Packed sequences take them a minute a
#: call, because their formula has all scores.
MODES_OF_DEFAULT = ("compile.reduce_overhead", "compile.max_autotune")

#: Of how many cases one is run, by what stands in its name: rungs first, then levels.
SHARES = {
    "cpu": {"compile": 12, "xla": 12, "triton": 3, "cuda": 3},
    "cuda": {**dict.fromkeys(MODES_OF_DEFAULT, 40), "compile": 16, "xla": 16, "triton": 12},
}
_RUNG = re.compile(r"\b(torch|compile|xla|triton|cuda)\.\w+")


def choose(config: pytest.Config, items: list[pytest.Item], device: str) -> None:
    """Leave out of `items` what is not of the share."""
    left_out = [item for item in items if not _is_chosen(item, device)]
    config.hook.pytest_deselected(items=left_out)
    out = set(map(id, left_out))
    items[:] = [item for item in items if id(item) not in out]


def _is_chosen(item: pytest.Item, device: str) -> bool:
    marker = item.get_closest_marker("sampled")
    if marker is None or marker.kwargs.get("device", device) != device:
        return True
    share = SHARES[device].get(rung := marker.kwargs.get("level") or _rung(item))
    share = share or SHARES[device].get(rung.partition(".")[0], 1)
    return zlib.crc32(item.nodeid.encode()) % share == 0


def _rung(item: pytest.Item) -> str:
    """The rung or level that a case is of."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    in_name = _RUNG.search(item.nodeid.partition("[")[2])
    return getattr(params.get("variant"), "name", None) or (in_name and in_name[0]) or params.get("level") or ""
