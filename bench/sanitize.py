"""Run small calls of the CUDA rungs, both passes, under the tools of NVIDIA's compute-sanitizer.

    python -m bench.sanitize                                         # every operation, by every tool
    python -m bench.sanitize --op attention,attention_varlen --tool racecheck --seconds 900

It prints a line for each tool and rung. The exit code is 1 if a tool finds something, a call fails or a time limit
passes, 2 if there is no compute-sanitizer or no rung, and else 0. ``--seconds`` limits each tool at each rung. Tools
slow kernels down by far, so calls are samples of the specs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import torch

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
SECONDS = 600
#: The tool's exit code where it finds something, unlike those of Python.
FOUND = 86
#: Elements of a sample's arguments, and samples of a rung, at most.
LARGEST, SAMPLES = 60_000, 12
#: Bytes of a word, at whose multiples allocations end.
WORD = 16


def sanitizer() -> str | None:
    """Where compute-sanitizer is: on the path, or in the toolkit that CUDA_HOME names."""
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin"
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=str(toolkit))


def command(program: str, tool: str, op: str, rung: str) -> list[str]:
    """The command that runs one rung's calls under one tool."""
    worker = [sys.executable, "-m", "bench.sanitize", "--worker", op, rung]
    return [program, "--tool", tool, "--error-exitcode", str(FOUND), *worker]


def outcome(run: list[str], seconds: float) -> tuple[str, str]:
    """What came of a command, in words: ``clean``, or what is wrong; and all that it printed."""
    # Memory that PyTorch keeps for later calls hides accesses beyond a tensor.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    process = subprocess.Popen(
        run,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the tool and the program that it runs
        printed, _ = process.communicate()
        return f"no result in {seconds:g} s", printed
    if process.returncode == 0:
        return "clean", printed
    return ("FOUND" if process.returncode == FOUND else f"failed with exit code {process.returncode}"), printed


def work(op: str, rung: str) -> int:
    """Run a rung's calls, in the process that the tool watches; return how many."""
    import kernel_ladder
    from kernel_ladder import autograd, table
    from kernel_ladder.spec import as_leaves
    from kernel_ladder.testing.agreement import evaluate
    from kernel_ladder.testing.samples import make_grad, make_inputs

    spec = kernel_ladder.spec(op)
    variant = next(v for v in table.variants(op, "cuda") if v.name == rung)
    calls = 0
    for case in sorted(spec.samples, key=_elements, reverse=True):
        if calls == SAMPLES or case.values != "normal" or not 0 < _elements(case) <= LARGEST:
            continue
        for dtype in (torch.bfloat16, torch.float32):
            inputs = tuple(None if x is None else in_whole_words(x) for x in make_inputs(case, dtype, "cuda"))
            run = lambda *x, **o: autograd.run(variant, x, o)  # noqa: E731
            if variant.unsupported(*as_leaves(inputs), **case.options) is None:
                evaluate(run, inputs, case.options, make_grad(spec, inputs, case.options))
            elif variant.unsupported(*inputs, **case.options) is None:
                evaluate(run, inputs, case.options, None)
            else:
                continue
            torch.cuda.synchronize()
            calls += 1
            break
    print(f"{calls} calls")
    return calls


def in_whole_words(x: torch.Tensor) -> torch.Tensor:
    """`x` in memory that ends at a multiple of 16 bytes, as that of PyTorch's allocator does.

    Loads of rows that begin off 16 bytes read whole words of 16 bytes, of which at least one byte is a row's. Without
    the allocator, the watched memory ends with the tensor, inside of such a word.
    """
    storage = x.untyped_storage()
    memory = torch.zeros(-(-storage.nbytes() // WORD) * WORD, dtype=torch.uint8, device=x.device)
    memory[: storage.nbytes()] = torch.empty(0, dtype=torch.uint8, device=x.device).set_(storage)
    moved = torch.empty(0, dtype=x.dtype, device=x.device)
    return moved.set_(memory.untyped_storage(), x.storage_offset(), x.shape, x.stride())


def _elements(case) -> int:
    return sum(torch.Size(shape).numel() for shape in case.shapes if shape is not None)


def names(text: str, known: tuple[str, ...]) -> list[str]:
    """Names separated by commas. Raises ``ArgumentTypeError`` for one that is not known."""
    found = text.split(",")
    for name in found:
        if name not in known:
            raise argparse.ArgumentTypeError(f"unknown {name!r}; accepted are {', '.join(known)}")
    return found


def positive(text: str) -> float:
    """A time limit. Raises ``ArgumentTypeError`` unless it is a positive number."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a positive number of seconds, got {text!r}")
    return seconds


def parser() -> argparse.ArgumentParser:
    from kernel_ladder import OPS

    ops = tuple(OPS)
    found = argparse.ArgumentParser(prog="python -m bench.sanitize", description=__doc__.splitlines()[0])
    found.add_argument("--op", type=lambda text: names(text, ops), default=list(ops), help="operations (default: all)")
    found.add_argument("--tool", type=lambda text: names(text, TOOLS), default=list(TOOLS), help=", ".join(TOOLS))
    found.add_argument("--seconds", type=positive, default=SECONDS, help=f"for a tool at a rung (default: {SECONDS})")
    found.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    return found


def main(arguments: list[str] | None = None) -> int:
    chosen = parser().parse_args(arguments)
    if chosen.worker:
        return 0 if work(*chosen.worker) else 1
    if (program := sanitizer()) is None:
        print(
            "python -m bench.sanitize: no compute-sanitizer on the path or in CUDA_HOME; the CUDA toolkit has it",
            file=sys.stderr,
        )
        return 2
    if not torch.cuda.is_available():
        print("python -m bench.sanitize: no GPU is visible", file=sys.stderr)
        return 2
    from kernel_ladder import table

    ran = wrong = 0
    for tool in chosen.tool:
        for op in chosen.op:
            for variant in table.variants(op, "cuda"):
                if (reason := variant.here()) is not None:
                    print(f"{tool:10} {op} {variant.name}: not run, {reason}", flush=True)
                    continue
                result, printed = outcome(command(program, tool, op, variant.name), chosen.seconds)
                print(f"{tool:10} {op} {variant.name}: {result}", flush=True)
                ran += 1
                if result != "clean":
                    wrong += 1
                    print("\n".join(f"    {line}" for line in printed.splitlines()[-40:]), flush=True)
    if not ran:
        print("python -m bench.sanitize: no CUDA rung of these operations runs here", file=sys.stderr)
        return 2
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
