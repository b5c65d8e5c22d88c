"""Check one way to run a model against the plain model in more digits, then time its passes."""

from __future__ import annotations

import copy
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import torch

import kernel_ladder.models
from bench.measure import alone, environment, timing
from bench.measure.correctness import one_line
from bench.patched.rows import ANEW, DECODE, FORWARD, LIGER, PLAIN, STEP, PatchedRow
from bench.patched.subjects import CAUSAL, Subject
from bench.scaling.check import hold_model
from kernel_ladder.cli.device import version_of

#: Seconds of rounds for each pass, and how many rounds at least and at most.
SECONDS, LEAST, MOST = 2.0, 5, 100
#: Of the batch that is checked.
CHECKED_TOKENS = 256
#: Of decoding: tokens of the prompt, and two numbers of new ones. The difference of their times has no prompt in it.
PROMPT, SHORT, LONG = 512, 32, 96
QUICK_LENGTHS = (8, 2, 4)
#: Prompts of decoding anew, each longer than all that was decoded before.
PROMPTS_ANEW = 3


def patched(model: torch.nn.Module, by: str) -> None:
    """Patch a model in place.

    Raises:
        ImportError: no Liger. ValueError: Liger does not know the model, or nothing in it can be replaced.
    """
    if by == LIGER:
        from liger_kernel.transformers import monkey_patch

        if model.config.model_type not in monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN:
            raise ValueError(f"Liger does not know models of type {model.config.model_type!r}")
        monkey_patch._apply_liger_kernel_to_instance(model=model)
    elif by != PLAIN:
        kernel_ladder.models.patch(model, backend=by, report=False)


def _results(model: Any, given: dict[str, torch.Tensor], call: Callable[..., Any] | None = None) -> list[torch.Tensor]:
    """Logits in evaluation; then loss and gradients in training."""
    call = model if call is None else call  # a compiled model may have no truth value
    unlabelled = {name: x for name, x in given.items() if name != "labels"}
    with torch.no_grad():
        logits = call(**unlabelled).logits
    model.train()
    loss = call(**given).loss
    loss.backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    model.zero_grad()
    model.eval()
    return [logits, loss.detach(), *gradients]


def wrong(subject: Subject, model: Any, by: str, compiled: bool, quick: bool) -> str | None:
    """Why a way's logits, loss or gradients do not agree, or None. The standard is the plain model in its dtype.

    `model` is the plain one, and stays as it is.
    """
    batch, tokens = subject.batch_of(quick)
    given = subject.inputs(model, min(batch, 2), min(tokens, CHECKED_TOKENS))
    wider = torch.float64 if model.dtype == torch.float32 else torch.float32
    exactly = {name: x.to(wider) if isinstance(x, torch.Tensor) and x.is_floating_point() else x
               for name, x in given.items()}  # fmt: skip
    exact = _results(copy.deepcopy(model).to(wider), exactly)
    naive = _results(model, given)
    other = copy.deepcopy(model)
    patched(other, by)
    found = _results(other, given, torch.compile(other) if compiled else None)
    torch._dynamo.reset()
    names = ["logits", "loss", *(f"the gradient of {name}" for name, _ in model.named_parameters())]
    return hold_model(names, found, exact, naive)


def seconds_of(
    call: Callable[[], object], device: torch.device, budget: float, after_first: Callable[[], object] | None = None
) -> tuple[float, list[float]]:
    """Seconds of the first call, and of each later one, with the host's part. `after_first` is called between them.

    Later calls have GPU and host alone; the first has no seconds in which another job of the GPU had stopped this one.
    """

    stopped = alone.Stopped()
    first = _once(call, device) - stopped.seconds
    if after_first is not None:
        after_first()
    rounds: list[float] = []
    with alone.alone(device):
        _once(call, device)
        while len(rounds) < LEAST or (sum(rounds) < budget and len(rounds) < MOST):
            rounds.append(_once(call, device))
    return first, rounds


def _once(call: Callable[[], object], device: torch.device) -> float:
    timing.synchronize(device)
    begin = time.perf_counter()
    call()
    timing.synchronize(device)
    return time.perf_counter() - begin


def row_of(subject: Subject, by: str, compiled: bool, pass_: str, dtype: torch.dtype, quick: bool) -> PatchedRow:
    facts, (batch, tokens) = environment.facts(), subject.batch_of(quick)
    import transformers

    return PatchedRow(
        subject.family, subject.like, f"{subject.layers(quick)} layers, {batch} × {tokens} tokens", by, compiled, pass_,
        str(dtype).removeprefix("torch."), None, None, None, None, None, None, facts["gpu"], facts["torch"],
        facts["triton"], transformers.__version__, version_of("liger_kernel") if by == LIGER else None,
        facts["commit"], facts["dirty"], datetime.now(UTC).isoformat(timespec="milliseconds"),
    )  # fmt: skip


def _timed(row: PatchedRow, first: float, rounds: list[float], tokens: int) -> PatchedRow:
    low, median, high = statistics.quantiles(rounds, n=4)
    return dataclasses.replace(
        row, us=1e6 * median, low_us=1e6 * low, high_us=1e6 * high, tokens_per_s=tokens / median, first_s=first
    )


def step_of(subject: Subject, model: Any, call: Any, quick: bool) -> Callable[[], object]:
    """A training step of a model, which it leaves in training; `call` is the model, compiled or not."""
    given = subject.inputs(model, *subject.batch_of(quick))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=next(model.parameters()).is_cuda)
    model.train()

    def step() -> None:
        call(**given).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def forward_of(subject: Subject, model: Any, call: Any, quick: bool) -> Callable[[], object]:
    """A forward pass without labels of a model, which it leaves in evaluation."""
    given = {k: x for k, x in subject.inputs(model, *subject.batch_of(quick)).items() if k != "labels"}
    model.eval()
    return torch.no_grad()(lambda: call(**given))


def _training(subject: Subject, row: PatchedRow, model: Any, call: Any, quick: bool, budget: float) -> PatchedRow:
    device = next(model.parameters()).device
    on_gpu = device.type == "cuda"
    if on_gpu:
        environment.give_memory_back(device)
        torch.cuda.reset_peak_memory_stats()
    step = step_of(subject, model, call, quick)
    batch, tokens = subject.batch_of(quick)
    peaks: list[int] = []

    def note_peak() -> None:
        if on_gpu:
            peaks.append(torch.cuda.max_memory_allocated())
            torch.cuda.reset_peak_memory_stats()

    first, rounds = seconds_of(step, device, budget, note_peak)
    note_peak()
    whole, later = (max(peaks), peaks[-1]) if peaks else (None, None)
    return dataclasses.replace(_timed(row, first, rounds, batch * tokens), peak_bytes=whole, later_peak_bytes=later)


def _forward(subject: Subject, row: PatchedRow, model: Any, call: Any, quick: bool, budget: float) -> PatchedRow:
    forward = forward_of(subject, model, call, quick)
    first, rounds = seconds_of(forward, next(model.parameters()).device, budget)
    batch, tokens = subject.batch_of(quick)
    return _timed(row, first, rounds, batch * tokens)


def _decode(subject: Subject, row: PatchedRow, model: Any, quick: bool) -> PatchedRow:
    """Greedy tokens of one sequence. A compiled way has a static cache, whose steps transformers compiles."""
    prompt, short, long = QUICK_LENGTHS if quick else (PROMPT, SHORT, LONG)
    given = subject.inputs(model, 1, prompt)["input_ids"]
    first, less = seconds_of(lambda: _generate(model, given, short, row.compiled), given.device, 0.0)
    _, more = seconds_of(lambda: _generate(model, given, long, row.compiled), given.device, 0.0)
    each = [(b - a) / (long - short) for a, b in zip(sorted(less), sorted(more), strict=False)]
    return _tokens_timed(row, subject, quick, f"{prompt}", first, each)


def _decode_anew(subject: Subject, row: PatchedRow, model: Any, quick: bool) -> PatchedRow:
    """The same where each token's cache has a length that the process has not met, as in most programs that generate.

    The first tokens of a prompt have been met when it is timed, so that its own pass is in both times.
    """
    prompt, short, long = QUICK_LENGTHS if quick else (PROMPT, SHORT, LONG)
    prompts = [prompt + place * (long + long // 3) for place in range(1, PROMPTS_ANEW + 1)]
    begin, each = time.perf_counter(), []
    for tokens in prompts:
        given = subject.inputs(model, 1, tokens)["input_ids"]
        _generate(model, given, short, False)
        with alone.alone(given.device):
            less, more = (
                _once(functools.partial(_generate, model, given, count, False), given.device) for count in (short, long)
            )
        each.append((more - less) / (long - short))
    shown = f"{prompts[0]} to {prompts[-1]}"
    return _tokens_timed(row, subject, quick, shown, time.perf_counter() - begin, each)


def _generate(model: Any, given: torch.Tensor, count: int, static: bool) -> None:
    cache = {"cache_implementation": "static"} if static else {}
    model.generate(
        given, attention_mask=torch.ones_like(given), max_new_tokens=count, min_new_tokens=count, do_sample=False,
        pad_token_id=0, **cache,
    )  # fmt: skip


def _tokens_timed(
    row: PatchedRow, subject: Subject, quick: bool, prompt: str, first: float, each: list[float]
) -> PatchedRow:
    row = dataclasses.replace(row, shape=f"{subject.layers(quick)} layers, 1 × {prompt} tokens")
    timed = _timed(row, first, each, 1)
    if timed.low_us is not None and timed.low_us > 0:
        return timed
    return dataclasses.replace(row, unsupported="a token's time is lost in the noise of the prompt's")


def measure(subject: Subject, by: str, compiled: bool, passes: list[str], quick: bool) -> list[PatchedRow]:
    """The rows of one way, in a process that has run no other."""
    device = environment.device()
    alone.while_tuning(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if subject.kind != CAUSAL:
        passes = [pass_ for pass_ in passes if pass_ not in (DECODE, ANEW)]
    if compiled:  # with a static cache, which has one length
        passes = [pass_ for pass_ in passes if pass_ != ANEW]
    rows = [row_of(subject, by, compiled, pass_, dtype, quick) for pass_ in passes]
    model = subject.make(quick, dtype, device)
    try:
        fault = wrong(subject, model, by, compiled, quick)
        patched(model, by)
    except Exception as error:
        return [dataclasses.replace(row, unsupported=one_line(error)) for row in rows]
    if fault is not None:
        return [dataclasses.replace(row, wrong=fault) for row in rows]
    call = torch.compile(model) if compiled else model
    made = []
    for row in rows:
        environment.give_memory_back(device)
        try:
            if row.pass_ == FORWARD:
                made.append(_forward(subject, row, model, call, quick, 0.0 if quick else SECONDS))
            elif row.pass_ == STEP:
                made.append(_training(subject, row, model, call, quick, 0.0 if quick else SECONDS))
            else:
                decode = _decode if row.pass_ == DECODE else _decode_anew
                made.append(decode(subject, row, model.eval(), quick))
        except Exception as error:
            made.append(dataclasses.replace(row, unsupported=one_line(error)))
    return made
