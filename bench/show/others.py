"""The block ``others``: sweeps of single operations, on another GPU than the one whose whole sweep is published.

Their rows lie in a folder of their own. No other table reads them, because a table has the rows of one GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import kernel_ladder
from bench.rows import published, store
from bench.rows.store import Row
from bench.show import claims, rates, regret

BLOCK = "others"
#: What names choose may have changed since their rows.
SINCE = "The choices are of the rows' commit. [Selection](docs/selection.md) has what tables and rules choose now."
COMMAND = "python -m bench merge FILE --into bench/results/others/GPU.jsonl"


def write(_: Mapping[Path, Sequence[Row]], folder: Path = published.FOLDER / "others") -> str:
    """Of each GPU the comparison with other libraries, then each operation's rates, with their commit."""
    return "\n\n".join(_of_gpu(path) for path in sorted(folder.glob("*.jsonl")))


def _of_sets(path: Path) -> str:
    """What names chose in the sets of calls that nobody tuned for, and what their choices cost."""
    rows = published.with_other_sets(path, [])
    if not rows:
        return ""
    names = list(dict.fromkeys(f"`{row.set.partition(':')[0]}`" for row in rows))
    where = f", in the set{'s' if len(names) > 1 else ''} {', '.join(names)}"
    return f"{regret.write_rows(rows, where)}\n\n{SINCE}"


def _of_gpu(path: Path) -> str:
    found = store.of_one_machine(store.latest(store.read_given(path)))
    parts = [f"### {found[0].gpu}", claims.write(path, found), _of_sets(path)]
    for op in kernel_ladder.OPS:
        if mine := [row for row in found if row.op == op]:
            parts.append(f"<details><summary>{op}, every shape</summary>")
            parts += [rates.machine(path, mine), rates.of_op(op, mine), "</details>"]
    return "\n\n".join(filter(None, parts))
