"""Python processes that need not import PyTorch, most of what they would do: forks of one that has.

Only torch is imported in advance, nothing of this project. So a fork imports kernel_ladder, its levels and bench
itself, with its own environment, as a process does that a user starts. Tests of what importing torch does, or warns
of, start real processes.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def run_python(
    arguments: Sequence[str], env: Mapping[str, str] | None = None, cwd: Path | str = ROOT
) -> subprocess.CompletedProcess[str]:
    """What ``subprocess.run([sys.executable, *arguments], capture_output=True, text=True)`` returns.

    `arguments` begin with "-c" and code, or with "-m" and a module. `env` is the whole environment; by default that of
    this process.
    """
    if arguments[0] not in ("-c", "-m"):
        raise ValueError(f"`arguments` must begin with '-c' or '-m', got {arguments[0]!r}")
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        said = [Path(folder, name) for name in ("stdout", "stderr")]
        request = {
            "arguments": list(arguments),
            "env": dict(os.environ if env is None else env),
            "cwd": str(cwd),
            "said": [str(path) for path in said],
        }
        print(json.dumps(request), file=server.stdin, flush=True)
        answer = server.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process that forks has ended, with exit status {server.wait()}")
        texts = [path.read_text(encoding="utf-8") for path in said]
    return subprocess.CompletedProcess([sys.executable, *arguments], int(answer), *texts)


@functools.cache
def _server() -> subprocess.Popen[str]:
    """The process that forks. It ends when this one does, whose end closes its input."""
    command = [sys.executable, "-m", "tests.processes"]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


# ---- in the process that forks


def _serve() -> None:
    import torch  # noqa: F401

    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _become(json.loads(line))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _become(request: dict[str, Any]) -> None:
    """Run what is asked for as the interpreter does a program, and end this process with its exit status."""
    for stream, path in enumerate((os.devnull, *request["said"])):
        file = os.open(path, os.O_RDWR | os.O_CREAT)
        os.dup2(file, stream)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    option, what, *others = request["arguments"]
    sys.argv = [option, *others]
    sys.path[0] = "" if option == "-c" else os.getcwd()
    folders = request["env"].get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [folder for folder in folders if folder not in ("", *sys.path)]
    status = 0
    try:
        if option == "-c":
            main = type(sys)("__main__")
            sys.modules["__main__"] = main
            exec(compile(what, "<string>", "exec"), main.__dict__)
        else:
            runpy.run_module(what, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status & 0xFF)


if __name__ == "__main__":
    _serve()
