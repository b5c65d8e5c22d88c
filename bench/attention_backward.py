"""Check and time the backward kernels of attention on Hopper, on their own and quickly.

    python -m bench.attention_backward                 # check every rung against float64, then time them
    python -m bench.attention_backward --only check --rungs wgmma
    python -m bench.attention_backward --only time --shapes "D128 causal"

Checks run in a process of their own. It is killed when a case takes longer than 20 seconds, as a kernel does whose
barriers wait for each other forever; the cases after it run in a new process. The bound is that of every agreement
check. Times are medians of interleaved rounds, beside the backward passes of PyTorch's FlashAttention-2 and cuDNN, and
of flash-attn-4 where it is installed. The sweep (``python -m bench``) measures what is published.
"""

from __future__ import annotations

import argparse
import json
import queue
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

RUNGS = ("wgmma", "warp_specialized")
CASE_SECONDS = 20
START_SECONDS = 120
ROUNDS = 7
CALLS = 5

#: Lengths of queries and keys around the edges of tiles of 64 and 128 rows.
LENGTHS = (
    (1, 1),
    (127, 127),
    (128, 128),
    (129, 129),
    (255, 255),
    (1, 129),
    (255, 1),
    (63, 300),
    (129, 700),
    (700, 129),
    (1000, 1100),
)
BANDS: dict[str, dict] = {
    "full": {},
    "causal": {"is_causal": True},
    "lower-right": {"is_causal": "lower_right"},
    "window": {"window_size": (100, 20)},
}


@dataclass(frozen=True)
class Check:
    """One case: head dimensions of queries and values, and what is asked of the gradients.

    ``asks``: ``agree`` with float64; ``lse``, with a gradient of the log-sum-exp too; ``expanded``, for a gradient of
    stride 0; ``repeat``, the same bits in every run; ``unordered``, dQ summed in any order.
    """

    rung: str
    seqlen_q: int
    seqlen_k: int
    d: int
    d_v: int
    heads: int
    heads_kv: int
    band: str
    dtype: str
    asks: str = "agree"
    batch: int = 2

    def __str__(self) -> str:
        sizes = f"B{self.batch} H{self.heads}/{self.heads_kv} Q{self.seqlen_q} K{self.seqlen_k} D{self.d}/{self.d_v}"
        return f"{self.rung}: {sizes} {self.band} {self.dtype} {self.asks}"


def checks(rungs: tuple[str, ...]) -> Iterator[Check]:
    """Every case: the plainest first, so that the first failure says most."""
    for rung in rungs:
        wide = (256, 192) if rung == "wgmma" else ()
        for d in (128, 64, *wide):
            yield Check(rung, 64, 128, d, d, 1, 1, "full", "bfloat16", batch=1)
            yield Check(rung, 256, 256, d, d, 1, 1, "full", "bfloat16", batch=1)
        for d, d_v in ((128, 128), (64, 64), (72, 40), *(((256, 256), (192, 128), (136, 200)) if wide else ())):
            for seqlen_q, seqlen_k in LENGTHS:
                for band in BANDS:
                    yield Check(rung, seqlen_q, seqlen_k, d, d_v, 2, 2, band, "bfloat16")
            yield Check(rung, 300, 400, d, d_v, 6, 2, "lower-right", "float16")
            yield Check(rung, 300, 400, d, d_v, 6, 2, "full", "bfloat16", "lse")
            yield Check(rung, 300, 400, d, d_v, 6, 2, "causal", "bfloat16", "expanded")
        for d in (128, 64, *wide):
            for band in ("full", "causal"):
                yield Check(rung, 1500, 1500, d, d, 16, 8, band, "bfloat16", batch=4)
                yield Check(rung, 1500, 1500, d, d, 16, 8, band, "bfloat16", "repeat", batch=4)
                if rung == "warp_specialized":
                    yield Check(rung, 1500, 1500, d, d, 16, 8, band, "bfloat16", "unordered", batch=4)


# ---- checks, in the process that runs them -------------------------------------------------------------------------


def failure(check: Check) -> str | None:
    """What is wrong with a case's gradients, or None."""
    import kernel_ladder
    from kernel_ladder import autograd, table
    from kernel_ladder.spec import Case
    from kernel_ladder.testing.agreement import agreement
    from kernel_ladder.testing.samples import make_inputs

    # The forward pass of `wgmma` ends at 128; `persistent` goes on, and takes the backward pass of `wgmma` there.
    forward = check.rung if max(check.d, check.d_v) <= 128 else "persistent"
    variant = next(v for v in table.variants("attention") if v.name == f"cuda.{forward}")
    options = {"is_causal": False, "scale": None, "enable_gqa": True, **BANDS[check.band]}
    if check.asks == "lse":
        options["return_lse"] = True
    shapes = (
        (check.batch, check.heads, check.seqlen_q, check.d),
        (check.batch, check.heads_kv, check.seqlen_k, check.d),
        (check.batch, check.heads_kv, check.seqlen_k, check.d_v),
    )
    inputs = make_inputs(Case("", shapes, options), getattr(torch, check.dtype), "cuda")
    if (reason := variant.unsupported(*inputs, **options)) is not None:
        return f"refused: {reason}"
    sizes = (*shapes[0][:-1], check.d_v)
    grad = torch.randn(sizes, device="cuda").to(inputs[0].dtype)
    if check.asks == "expanded":
        grad = grad[..., :1].mean(dim=(0, 2), keepdim=True).to(inputs[0].dtype).expand(sizes)
    if check.asks in ("repeat", "unordered"):
        return _runs_differ(check, variant, inputs, options, grad)
    grads = (grad, torch.randn(sizes[:-1], device="cuda")) if check.asks == "lse" else grad
    result = agreement(
        kernel_ladder.spec("attention"), lambda *x, **o: autograd.run(variant, x, o), inputs, options, grads
    )
    if check.seqlen_k == 1 or (check.seqlen_q == 1 and check.band == "causal"):  # which see one key
        bounds = _bounds_of_one_key(inputs, grad, options)
        if all(d.agrees or (d.reason is None and d.error <= bounds.get(d.name, 0.0)) for d in result.deviations):
            return None
    return None if result.agrees else str(result)


def _bounds_of_one_key(inputs, grad: torch.Tensor, options: dict) -> dict[str, float]:
    """What rounding leaves of the gradients of query and key where there is one key, in place of zero.

    The only weight is 1, so its slope is dO · V − dO · O = 0. Both are float32 sums of D_v products, in other orders.
    """
    query, key, value = (x.double().abs().amax().item() for x in inputs)
    slope = 2 * inputs[2].shape[-1] ** 2 * 2.0**-24 * grad.double().abs().amax().item() * value
    scale = inputs[0].shape[-1] ** -0.5
    queries = inputs[0].shape[-2] * inputs[0].shape[1] // inputs[1].shape[1]
    return {"grad 0": slope * scale * key, "grad 1": slope * scale * query * queries}


def _runs_differ(check: Check, variant, inputs, options: dict, grad: torch.Tensor) -> str | None:
    """Whether twenty runs give other gradients than the first, in any bit or, in a free order, beyond rounding."""
    _, saved = variant.forward(*inputs, **options)
    first = variant.backward(saved, grad, (True,) * 4)[:3]
    for _ in range(20):
        if check.asks == "repeat":
            again = variant.backward(saved, grad, (True,) * 4)[:3]
        else:
            again = backward_of(check.rung, saved, grad, ordered=False)
        for name, x, y in zip(("query", "key", "value"), first, again, strict=True):
            same = torch.equal(x, y) if check.asks == "repeat" or name != "query" else torch.allclose(x, y, 0.02, 0.02)
            if not same:
                return f"the gradient of `{name}` differs by {(x.float() - y.float()).abs().max():.3g} between runs"
    return None


def backward_of(rung: str, saved: tuple, grad: torch.Tensor, ordered: bool = True) -> tuple[torch.Tensor, ...]:
    """The gradients by one rung's operator. `ordered`: dQ in one order, where the rung offers the choice.

    Raises:
        RuntimeError: any order is asked for under ``torch.use_deterministic_algorithms(True)``.
    """
    if not ordered and torch.are_deterministic_algorithms_enabled():
        raise RuntimeError(
            "backward_of: argument `ordered` is False, a sum in any order; torch.use_deterministic_algorithms(True) "
            "accepts one order alone"
        )
    run = getattr(torch.ops.kernel_ladder.attention_backward, rung)
    return run(grad, None, *saved, *((ordered,) if rung == "warp_specialized" else ()))


def work(cases: list[Check]) -> None:
    """Run cases and report each on a line, as JSON."""
    torch.zeros(1, device="cuda")
    print(json.dumps("ready"), flush=True)
    for check in cases:
        try:
            wrong = failure(check)
            torch.cuda.synchronize()
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}".splitlines()[0]
            if "CUDA" in wrong:  # nothing runs in this process any more
                print(json.dumps({"wrong": wrong, "over": True}), flush=True)
                return
        print(json.dumps({"wrong": wrong}), flush=True)


# ---- checks, in the process that watches ----------------------------------------------------------------------------


WORKER = (sys.executable, "-m", "bench.attention_backward", "--worker")


def watched(
    cases: list[Check], command: tuple[str, ...] = WORKER, case_seconds: float = CASE_SECONDS
) -> list[tuple[Check, str]]:
    """The cases that fail, with what is wrong."""
    failed: list[tuple[Check, str]] = []
    done = 0
    while done < len(cases):
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdin is not None
        json.dump([asdict(case) for case in cases[done:]], process.stdin)
        process.stdin.close()
        lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=_read, args=(process, lines), daemon=True).start()
        try:
            if not lines.get(timeout=START_SECONDS):
                raise SystemExit("the process that checks did not start")
            while done < len(cases):
                line = lines.get(timeout=case_seconds)
                report = json.loads(line) if line else {"wrong": "the process ended", "over": True}
                if report["wrong"] is not None:
                    failed.append((cases[done], report["wrong"]))
                    print(f"  {cases[done]}: {report['wrong']}", flush=True)
                done += 1
                if report.get("over"):
                    break
        except queue.Empty:
            failed.append((cases[done], f"no result in {case_seconds} s"))
            print(f"  {cases[done]}: no result in {case_seconds} s", flush=True)
            done += 1
        process.kill()
        process.wait()
    return failed


def _read(process: subprocess.Popen, lines: queue.Queue[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put("")


# ---- times ----------------------------------------------------------------------------------------------------------


class Shape(NamedTuple):
    """A call to time: heads of queries and of keys, head dimensions of queries and of values."""

    batch: int
    heads: int
    heads_kv: int
    length: int
    d: int
    d_v: int
    causal: bool

    @property
    def name(self) -> str:
        heads = f"{self.heads}" if self.heads == self.heads_kv else f"{self.heads}/{self.heads_kv}"
        d = f"{self.d}" if self.d == self.d_v else f"{self.d}/{self.d_v}"
        return f"B{self.batch} H{heads} S{self.length} D{d} {'causal' if self.causal else 'full'}"

    @property
    def flop(self) -> float:
        """Of five products: scores, dQ and dK sum over or have `d` columns, dP and dV `d_v`."""
        return 2 * self.batch * self.heads * self.length**2 * (3 * self.d + 2 * self.d_v) / (2 if self.causal else 1)


SHAPES = [
    Shape(batch, heads, heads, length, d, d, causal)
    for d, heads in ((128, 16), (64, 32))
    for batch, length in ((32, 512), (8, 2048), (4, 4096), (1, 16384))
    for causal in (False, True)
]
SHAPES.append(Shape(2, 32, 8, 4096, 128, 128, True))
SHAPES.append(Shape(2, 16, 16, 4096, 96, 96, True))
SHAPES += [Shape(4, 8, 8, 4096, 256, 256, causal) for causal in (False, True)]
SHAPES.append(Shape(4, 16, 16, 4096, 192, 192, True))
SHAPES += [Shape(2, 16, 16, 4096, 192, 128, causal) for causal in (False, True)]


def calls(shape: Shape) -> dict[str, Callable[[], object]]:
    """The backward pass of one shape by each implementation that runs here."""
    from kernel_ladder import table
    from kernel_ladder.semantics.masks import band

    assert table.variants("attention", "cuda"), "the extension was not built"  # loads the operators
    batch, heads, heads_kv, length, d, d_v, causal = shape
    first, last = band(causal, (-1, -1), length, length)
    made = {}
    q = torch.randn(batch, heads, length, d, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(batch, heads_kv, length, n, device="cuda", dtype=torch.bfloat16) for n in (d, d_v))
    grad = torch.randn(batch, heads, length, d_v, device="cuda", dtype=torch.bfloat16)
    scale = d**-0.5
    output, lse = torch.ops.kernel_ladder.attention.persistent(q, k, v, None, first, last, scale, True)
    saved = (q, k, v, output, lse, None, first, last, scale, True)
    made["flash"] = lambda: backward_of("flash", saved, grad)
    made["wgmma"] = lambda: backward_of("wgmma", saved, grad)
    if d <= 128:
        made["warp_specialized"] = lambda: backward_of("warp_specialized", saved, grad)
        made["… unordered"] = lambda: backward_of("warp_specialized", saved, grad, ordered=False)

    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    for name, backend in (("FA2", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION)):
        try:
            with sdpa_kernel(backend):
                theirs = torch.nn.functional.scaled_dot_product_attention(
                    *leaves, is_causal=causal, enable_gqa=heads != heads_kv
                )
                made[name] = _grad_call(theirs, leaves, grad)
                made[name]()
        except RuntimeError:
            made.pop(name, None)
    try:
        from flash_attn.cute import flash_attn_func

        rows = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v)]
        made["FA4"] = _grad_call(flash_attn_func(*rows, causal=causal)[0], rows, grad.transpose(1, 2).contiguous())
        made["FA4"]()
    except (ImportError, RuntimeError, TypeError):
        made.pop("FA4", None)
    return made


def _grad_call(output: torch.Tensor, leaves: list[torch.Tensor], grad: torch.Tensor) -> Callable[[], object]:
    return lambda: torch.autograd.grad(output, leaves, grad, retain_graph=True)


def milliseconds(call: Callable[[], object]) -> float:
    """The mean of a few calls, by events on the GPU."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(CALLS):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / CALLS


def time_all(words: str) -> None:
    """Print TFLOP/s of each shape whose name has all of the words."""
    print(f"\nTFLOP/s of the backward pass, bfloat16, {torch.cuda.get_device_name()}; median of {ROUNDS} rounds")
    names = ("flash", "wgmma", "warp_specialized", "… unordered", "FA2", "cuDNN", "FA4")
    print(f"{'':34}" + "".join(f"{name:>18}" if len(name) > 9 else f"{name:>10}" for name in names))
    for shape in SHAPES:
        if not all(word in shape.name for word in words.split()):
            continue
        made = calls(shape)
        for call in made.values():
            milliseconds(call)
        times: dict[str, list[float]] = {implementation: [] for implementation in made}
        for _ in range(ROUNDS):
            for implementation, call in made.items():
                times[implementation].append(milliseconds(call))
        rates = {i: f"{shape.flop / statistics.median(t) / 1e9:.0f}" for i, t in times.items()}
        print(
            f"{shape.name:34}" + "".join(f"{rates.get(n, '–'):>{18 if len(n) > 9 else 10}}" for n in names), flush=True
        )
        del made
        torch.cuda.empty_cache()


def kernel_times(words: str) -> None:
    """Print the time of each kernel of our rungs, at the first shape whose name has all of the words."""
    from torch.profiler import ProfilerActivity, profile

    shape = next(s for s in SHAPES if all(word in s.name for word in words.split()))
    made = calls(shape)
    print(f"\nMicroseconds a kernel, {shape.name}")
    for name in ("flash", "wgmma", "warp_specialized", "… unordered"):
        made[name]()
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            for _ in range(CALLS):
                made[name]()
            torch.cuda.synchronize()
        print(f"  {name}")
        for event in sorted(found.key_averages(), key=lambda e: -e.self_device_time_total):
            print(f"    {event.self_device_time_total / CALLS:9.1f}  {event.key[:90]}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.attention_backward", description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("check", "time", "kernels"), help="one part (default: all three)")
    parser.add_argument("--rungs", nargs="+", choices=RUNGS, default=RUNGS, help="rungs to check (default: both)")
    parser.add_argument("--shapes", default="", help='words in the names of shapes to time, as "D128 causal"')
    parser.add_argument("--kernels-at", default="S4096 D128", help="words in the name of the shape that is profiled")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.worker:
        work([Check(**case) for case in json.load(sys.stdin)])
        return 0
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA GPU is visible")
    failed = []
    if chosen.only in (None, "check"):
        cases = list(checks(tuple(chosen.rungs)))
        print(f"Checking {len(cases)} cases against float64", flush=True)
        failed = watched(cases)
        print(f"{len(cases) - len(failed)} of {len(cases)} agree", flush=True)
    if chosen.only == "time" or (chosen.only is None and not failed):
        time_all(chosen.shapes)
    if chosen.only == "kernels" or (chosen.only is None and not failed):
        kernel_times(chosen.kernels_at)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
