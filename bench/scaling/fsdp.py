"""A training step of a patched Llama-like model under FSDP2, against the same model on one GPU.

Every rank has a batch of its own, so the problem grows with the ranks. One GPU's time for the whole is n times that of
one batch.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import kernel_ladder
import kernel_ladder.models
from bench.scaling.check import hold_model
from bench.scaling.rows import ONE_GPU, OURS, UNPATCHED
from bench.scaling.run import Problem, Run
from bench.scaling.timing import Way

OP = "fsdp_step"
#: Of the vocabulary of the model that is timed.
WORDS = 32000


@dataclass(frozen=True)
class Sizes:
    """Of a model: widths, heads, layers, words, and tokens of each rank's sequence."""

    hidden: int
    heads: int
    inner: int
    layers: int
    words: int
    tokens: int

    @property
    def shape(self) -> str:
        return f"{self.layers} layers, hidden {self.hidden} H{self.heads} inner {self.inner}, S{self.tokens} a GPU"

    def flops(self) -> int:
        """Of both passes, for one rank's sequence."""
        weights = self.layers * self.hidden * (4 * self.hidden + 3 * self.inner) + self.hidden * self.words
        scores = 4 * self.hidden * (self.tokens * (self.tokens + 1) // 2)
        return 6 * self.tokens * weights + round(3.5 * self.layers * scores)


def sizes(run: Run) -> Sizes:
    """A model of half a billion parameters, or a tiny one."""
    if run.dry:
        return Sizes(32, 2, 64, 2, 48, 16)
    return Sizes(2048, 16, 5632, 4 if run.quick else 10, WORDS, 4096)


class Attention(torch.nn.Module):
    """Causal attention by PyTorch's function, until `attend` is replaced."""

    def __init__(self, of: Sizes) -> None:
        super().__init__()
        self.width, self.attend = of.hidden // of.heads, torch.nn.functional.scaled_dot_product_attention
        self.qkv = torch.nn.Linear(of.hidden, 3 * of.hidden, bias=False)
        self.out = torch.nn.Linear(of.hidden, of.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (-1, self.width)).transpose(1, 2) for part in parts)
        return self.out(self.attend(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class Mlp(torch.nn.Module):
    """A SwiGLU network by the names that Llama gives to its parts."""

    def __init__(self, of: Sizes) -> None:
        super().__init__()
        self.gate_proj = torch.nn.Linear(of.hidden, of.inner, bias=False)
        self.up_proj = torch.nn.Linear(of.hidden, of.inner, bias=False)
        self.down_proj = torch.nn.Linear(of.inner, of.hidden, bias=False)
        self.act_fn = torch.nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Layer(torch.nn.Module):
    def __init__(self, of: Sizes) -> None:
        super().__init__()
        self.norm1, self.norm2 = torch.nn.RMSNorm(of.hidden), torch.nn.RMSNorm(of.hidden)
        self.attention, self.mlp = Attention(of), Mlp(of)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Model(torch.nn.Module):
    """Token embeddings, layers, and logits of the next token."""

    def __init__(self, of: Sizes) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(of.words, of.hidden)
        self.layers = torch.nn.ModuleList(Layer(of) for _ in range(of.layers))
        self.norm = torch.nn.RMSNorm(of.hidden)
        self.logits = torch.nn.Linear(of.hidden, of.words, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.logits(self.norm(x))


def made(run: Run, of: Sizes, dtype: torch.dtype, sharded: bool, backend: str | None) -> Model:
    """The model of the same numbers on every rank; patched where `backend` names one."""
    torch.manual_seed(0)
    with run.device:
        model = Model(of).to(run.dtype).to(dtype)
    if backend is not None:
        kernel_ladder.models.patch(model, backend=backend, report=False)
        for layer in model.layers:
            layer.attention.attend = functools.partial(kernel_ladder.attention, backend=backend)
    if sharded:
        mesh = init_device_mesh(run.device.type, (run.gpus,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def _tokens(run: Run, of: Sizes, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(of.words, (1, of.tokens + 1), generator=generator).to(run.device)


def loss_of(model: Model, tokens: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the next tokens."""
    logits = model(tokens[:, :-1]).flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())


def check(run: Run, of: Sizes) -> str | None:
    """Why gradients on this group do not agree with float64 on one GPU, over all ranks' batches; None where they do.

    The standard is PyTorch's own model in the same dtype on the same group.
    """

    def sharded(backend: str | None) -> list[torch.Tensor]:
        model = made(run, of, run.dtype, True, backend)
        loss_of(model, _tokens(run, of, run.group.rank)).backward()
        return [p.grad.full_tensor() for p in model.parameters()]

    model = made(run, of, torch.float64, False, None)
    losses = [loss_of(model, _tokens(run, of, rank)) for rank in range(run.gpus)]
    (sum(losses) / run.gpus).backward()
    exact = [p.grad for p in model.parameters()]
    names = [name for name, _ in model.named_parameters()]
    return hold_model(names, sharded(run.backend), exact, sharded(None))


def _stepping(run: Run, of: Sizes, sharded: bool, backend: str | None) -> Any:
    model, tokens = made(run, of, run.dtype, sharded, backend), _tokens(run, of, run.group.rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=run.device.type == "cuda")

    def step() -> None:
        loss_of(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(run: Run) -> None:
    """Emit the rows of a step: forward, backward and AdamW."""
    of = sizes(run)
    small = sizes(run) if run.dry else Sizes(256, 4, 512, 2, 512, 128)
    fault = run.fault(lambda: check(run, small))
    problem = Problem(OP, "forward+backward", of.shape, run.gpus * of.flops(), 0, one_gpu_does=1 / run.gpus)
    if fault is not None:
        run.wrong(problem, run.backend, fault)
        return
    for backend in dict.fromkeys((run.backend, None)):
        steps, reason = run.group.agree(
            lambda backend=backend: [_stepping(run, of, sharded, backend) for sharded in (True, False)]
        )
        role, name = (OURS, backend) if backend else (UNPATCHED, "torch.builtin")
        if steps is None:
            run.refuse(problem, (role, name), str(reason))
            continue
        sharded, whole = steps
        run.measure(problem, {(role, name): Way(sharded), (ONE_GPU, name): Way(whole, alone=True)})
        del steps, sharded, whole
        run.free()
