"""Writes every figure into a folder, to look at."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from figures import FIGURES, draw


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python _build/figures FOLDER", file=sys.stderr)
        return 2
    folder = Path(arguments[0])
    folder.mkdir(parents=True, exist_ok=True)
    for name in FIGURES:
        (folder / f"{name}.svg").write_text(draw(name)[0])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
