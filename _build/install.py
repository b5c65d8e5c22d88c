"""``python _build/install.py``: ``pip install -e .``, with what takes long told as it happens.

pip hides a build's output, or with ``-v`` shows every command of the compiler, thousands of characters each. This shows
downloads, what the build itself says, and each compiled file with its number; the whole output goes into a log.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOG = ROOT / "build" / "install.log"
#: How much of the log is shown where the installation fails.
TAIL = 40

#: A line of ninja: how many of how many are done, after how many seconds, and the command that was run.
_COMPILED = re.compile(r"^\s*\[(\d+)/(\d+) +([\d.]+)s\] .*? -c (?:\S*/)?((?:csrc|build/together)/\S+)")
_OTHERS = re.compile(r"^\s*(kernel_ladder: .*|(?:Collecting|Downloading|Installing collected packages:|Successfully) .*)")


def told(line: str) -> str | None:
    """What to show of a line of pip's, or None.

    >>> told("  [3/31 41.2s] /usr/local/cuda/bin/nvcc -O1 -c /src/csrc/gelu.cu -o /src/build/gelu.o")
    '   compiled 3 of 31 files: csrc/gelu.cu (41 s)'
    """
    if found := _COMPILED.match(line):
        done, total, seconds, file = found.groups()
        return f"   compiled {done} of {total} files: {file} ({float(seconds):.0f} s)"
    if found := _OTHERS.match(line):
        text = found[1]
        return "   " + (text if len(text) <= 110 or text.startswith("kernel_ladder:") else text[:107] + "…")
    return None


def main(argv: Sequence[str]) -> int:
    """Install, passing `argv` on to pip. Returns pip's exit code."""
    command = [sys.executable, "-m", "pip", "install", "-v", *(argv or ["-e", str(ROOT)])]
    environment = {**os.environ, "NINJA_STATUS": "[%f/%t %es] ", "PYTHONUNBUFFERED": "1"}
    LOG.parent.mkdir(parents=True, exist_ok=True)
    with (
        LOG.open("w", encoding="utf-8") as log,
        subprocess.Popen(
            command,
            env=environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as pip,
    ):
        assert pip.stdout is not None
        for line in pip.stdout:
            log.write(line)
            log.flush()
            if (text := told(line)) is not None:
                print(text, flush=True)
    if pip.returncode:
        lines = LOG.read_text(encoding="utf-8").splitlines()
        print("\n".join(line[:400] for line in lines[-TAIL:]), file=sys.stderr)
        print(f"The installation failed; all of its output is in {LOG}", file=sys.stderr)
    return pip.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
