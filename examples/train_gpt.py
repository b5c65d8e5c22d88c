"""Train a small GPT, built from kernel_ladder.nn, once per backend, and draw the loss curves on one picture.

The text is the language reference that ships with Python's standard library, byte by byte. Every backend starts from
the same weights and sees the same batches, so curves differ by rounding alone. On a GPU all run under autocast in
bfloat16; a run of the formulas in float32 shows how far rounding takes them. A table goes beside the picture. The exit
code is 1 where a curve leaves the float32 one farther than PyTorch's own bfloat16 does.

    python examples/train_gpt.py                                    # what this machine has; on a CPU a tiny model
    python examples/train_gpt.py --backends torch cuda --steps 2000 --width 768 --layers 12 --heads 12
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics

import torch

from kernel_ladder import nn
from kernel_ladder.errors import UnavailableError

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
#: The formulas without autocast, beside which every other run stands on a GPU.
REFERENCE = "torch.naive in float32"
#: Runs of PyTorch in bfloat16: their distance from the reference is what rounding explains.
EAGER = ("torch", "torch.naive")
#: Times that distance. Runs of equal rounding differ too: each is one path of many.
SLACK = 1.5
#: Steps whose mean loss is compared.
SMOOTHED = 25


@dataclass(frozen=True)
class Config:
    """Sizes of the model, in elements, and of the training."""

    width: int = 512 if ON_GPU else 64
    layers: int = 8 if ON_GPU else 2
    heads: int = 8 if ON_GPU else 2
    context: int = 512 if ON_GPU else 64
    batch: int = 32 if ON_GPU else 8
    steps: int = 1000 if ON_GPU else 100
    learning_rate: float = 1e-3
    seed: int = 0


@dataclass
class Run:
    """What a backend's training gave: the loss of each step, seconds a step (median), bytes of GPU memory at most."""

    losses: list[float] = field(default_factory=list)
    step_seconds: float = 0.0
    peak_bytes: int = 0


class Block(torch.nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, config: Config, backend: str) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width, backend=backend)
        self.attention = nn.GroupedQueryAttention(config.width, config.heads, backend=backend)
        self.norm2 = nn.LayerNorm(config.width, backend=backend)
        self.mlp = nn.GeluMLP(config.width, 4 * config.width, approximate="tanh", backend=backend)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(torch.nn.Module):
    """Bytes ``(B, S)`` to logits ``(B, S, 256)``."""

    def __init__(self, config: Config, backend: str) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(256, config.width)
        self.positions = torch.nn.Embedding(config.context, config.width)
        self.blocks = torch.nn.Sequential(*(Block(config, backend) for _ in range(config.layers)))
        self.norm = nn.LayerNorm(config.width, backend=backend)
        self.head = nn.Linear(config.width, 256, bias=False, backend=backend)
        for p in self.parameters():
            if p.dim() == 2:
                torch.nn.init.normal_(p, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions(positions))))


def text() -> torch.Tensor:
    """The bytes of Python's language reference."""
    return torch.tensor(list("\n\n".join(topics[name] for name in sorted(topics)).encode()), dtype=torch.uint8)


def batches(config: Config):
    """Random pieces of the text, one byte longer than the context, on the device."""
    data, generator = text(), torch.Generator().manual_seed(config.seed)
    while True:
        starts = torch.randint(len(data) - config.context - 1, (config.batch,), generator=generator)
        pieces = torch.stack([data[s : s + config.context + 1] for s in starts.tolist()])
        yield pieces.long().to(DEVICE, non_blocking=True)


def train(config: Config, backend: str, autocast: bool = ON_GPU) -> Run:
    """Train from the config's seed; with `autocast` in bfloat16.

    Raises:
        BackendError, UnavailableError: the modules have no such backend, or not on this machine.
    """
    torch.manual_seed(config.seed)
    model = GPT(config, backend).to(DEVICE)
    loss_of = nn.CrossEntropy(backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), config.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    run, seconds = Run(), []
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    for _, piece in zip(range(config.steps), batches(config), strict=False):
        started = time.perf_counter()
        with torch.autocast(DEVICE.type, torch.bfloat16) if autocast else nullcontext():
            logits = model(piece[:, :-1])
            loss = loss_of(logits.flatten(0, 1), piece[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(loss.item())  # waits for the GPU
        seconds.append(time.perf_counter() - started)
    run.step_seconds = statistics.median(seconds)
    run.peak_bytes = torch.cuda.max_memory_allocated() if ON_GPU else 0
    return run


def distance(run: Run, other: Run) -> float:
    """How far two loss curves lie apart at most, in nats a byte, each the mean over :data:`SMOOTHED` steps."""
    smooth = min(SMOOTHED, len(run.losses))
    apart = torch.tensor(run.losses) - torch.tensor(other.losses)
    return float(apart.unfold(0, smooth, 1).mean(1).abs().max())


def astray(runs: dict[str, Run]) -> list[str]:
    """Backends whose curve leaves the reference farther than rounding explains; none without runs to judge by."""
    if REFERENCE not in runs or not (eager := [runs[name] for name in EAGER if name in runs]):
        return []
    bound = SLACK * max(distance(run, runs[REFERENCE]) for run in eager)
    return [name for name, run in runs.items() if not distance(run, runs[REFERENCE]) <= bound]  # NaN is astray too


def table(runs: dict[str, Run], config: Config) -> str:
    """The runs as a Markdown table, with the distance of their curves from the first run's."""
    first = next(iter(runs.values()))
    device = torch.cuda.get_device_name() if ON_GPU else "a CPU"
    lines = [
        f"{config.layers} layers, {config.width} wide, {config.heads} heads; {config.batch} × {config.context} bytes a "
        f"step, {config.steps} steps; {device}, PyTorch {torch.__version__}.",
        "",
        f"| backend | last {SMOOTHED} losses | farthest from {next(iter(runs))} | step | peak memory |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, run in runs.items():
        last = statistics.mean(run.losses[-SMOOTHED:])
        memory = f"{run.peak_bytes / 2**30:.2f} GiB" if ON_GPU else "–"
        away = f"{distance(run, first):.4f}"
        lines.append(f"| {name} | {last:.4f} | {away} | {run.step_seconds * 1e3:.1f} ms | {memory} |")
    return "\n".join(lines) + "\n"


def draw(runs: dict[str, Run], path: Path) -> None:
    """Draw the loss curves of all backends, and write the picture to `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for backend, run in runs.items():
        axes.plot(run.losses, label=f"{backend}: {run.step_seconds * 1e3:.1f} ms a step", linewidth=1.2, alpha=0.8)
    axes.set(xlabel="step", ylabel="cross-entropy, nats a byte", title="A GPT on Python's language reference")
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> dict[str, Run]:
    """The runs by backend. Those whose curve goes astray are told by :func:`astray`."""
    parser = argparse.ArgumentParser(description="Train a small GPT once per backend, and draw the loss curves.")
    levels = ["torch.naive", "torch", "compile", "xla", "triton", "cuda"] if ON_GPU else ["torch.naive", "torch"]
    parser.add_argument("--backends", nargs="+", default=levels, help=f"default: {' '.join(levels)}")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("train_gpt.png"),
        help="the picture, beside which a table goes (default: %(default)s)",
    )
    parser.add_argument("--float32", action="store_true", help="on a GPU, do not use autocast with bfloat16")
    defaults = Config()
    for name, value in vars(defaults).items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=type(value), default=value, help="default: %(default)s")
    given = parser.parse_args(arguments)
    config = Config(**{name: getattr(given, name) for name in vars(defaults)})
    autocast = ON_GPU and not given.float32
    runs: dict[str, Run] = {}
    for backend in ([REFERENCE] if autocast else []) + given.backends:
        try:
            if backend == REFERENCE:
                run = train(config, "torch.naive", autocast=False)
            else:
                run = train(config, backend, autocast)
        except UnavailableError as error:
            print(f"{backend:<16} left out: {error}")
            continue
        runs[backend] = run
        memory = f", {run.peak_bytes / 2**30:.2f} GiB" if ON_GPU else ""
        print(f"{backend:<16} loss {run.losses[-1]:.4f}, {run.step_seconds * 1e3:.1f} ms a step{memory}", flush=True)
    if not runs:
        parser.exit(1, "none of these backends is available here\n")
    draw(runs, given.out)
    given.out.with_suffix(".md").write_text(table(runs, config), encoding="utf-8")
    print(f"wrote {given.out} and {given.out.with_suffix('.md')}")
    return runs


if __name__ == "__main__":
    if found := astray(main()):
        sys.exit(f"farther from {REFERENCE} than PyTorch in bfloat16: {', '.join(found)}")
