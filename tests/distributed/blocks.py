"""A transformer block of this package's calls on a group: tensor and sequence parallel, FSDP2 and DDP."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import kernel_ladder as kl

HEADS, HEADS_KV, WIDTH = 4, 2, 32


class Linear(torch.nn.Linear):
    backend = "torch"

    def forward(self, input):
        return kl.linear(input, self.weight, self.bias, backend=self.backend)


class RMSNorm(torch.nn.RMSNorm):
    backend = "torch"

    def forward(self, input):
        return kl.rms_norm(input, self.normalized_shape, self.weight, self.eps, backend=self.backend)


class Block(torch.nn.Module):
    """Pre-norm attention with grouped heads, and a SwiGLU network."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.backend = backend
        of_kv = WIDTH // HEADS * HEADS_KV
        self.norm1, self.norm2 = RMSNorm(WIDTH), RMSNorm(WIDTH)
        self.q, self.k, self.v = Linear(WIDTH, WIDTH), Linear(WIDTH, of_kv), Linear(WIDTH, of_kv)
        self.out = Linear(WIDTH, WIDTH)
        self.gate, self.up = Linear(WIDTH, 2 * WIDTH, bias=False), Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = Linear(2 * WIDTH, WIDTH)
        for module in self.modules():
            module.backend = backend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        q, k, v = (
            m(h).unflatten(-1, (heads, WIDTH // HEADS)).transpose(1, 2)
            for m, heads in ((self.q, HEADS), (self.k, HEADS_KV), (self.v, HEADS_KV))
        )
        a = kl.attention(q, k, v, is_causal=True, enable_gqa=True, backend=self.backend)
        x = kl.add(x, self.out(a.transpose(1, 2).flatten(-2)), backend=self.backend)
        h = self.norm2(x)
        return kl.add(x, self.down(kl.swiglu(self.gate(h), self.up(h), backend=self.backend)), backend=self.backend)


def made(backend: str) -> tuple[Block, torch.Tensor]:
    torch.manual_seed(0)
    dtype = torch.float64 if backend == "torch" else torch.float32
    return Block(backend).to(dtype), torch.randn(4, 8, WIDTH, dtype=dtype)


def loss_of(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


def expected(backend: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    block, x = made(backend)
    loss = loss_of(block(x))
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in block.named_parameters()}


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def hold(block: torch.nn.Module, loss: torch.Tensor, backend: str, prefix: str = "") -> None:
    tolerance = 1e-10 if backend == "torch" else 1e-4
    want, gradients = expected(backend)
    torch.testing.assert_close(whole(loss).detach(), want, rtol=tolerance, atol=tolerance)
    found = {name.removeprefix(prefix): whole(p.grad) for name, p in block.named_parameters()}
    torch.testing.assert_close(found, gradients, rtol=tolerance, atol=tolerance)


def parallel(block: Block, mesh, sequence: bool) -> Block:
    """Heads and hidden features shared among the ranks; between the products, the sequence or nothing."""
    between = Shard(1) if sequence else Replicate()
    first = ColwiseParallel(input_layouts=between, use_local_output=False)
    last = RowwiseParallel(output_layouts=between, use_local_output=False)
    plan = dict.fromkeys(("q", "k", "v", "gate", "up"), first) | dict.fromkeys(("out", "down"), last)
    if sequence:
        plan |= dict.fromkeys(("norm1", "norm2"), SequenceParallel(sequence_dim=1, use_local_output=False))
        return parallelize_module(block, mesh, plan)
    for norm in (block.norm1, block.norm2):
        norm.weight = torch.nn.Parameter(distribute_tensor(norm.weight.detach(), mesh, [Replicate()]))
    return parallelize_module(block, mesh, plan)


def tensor_parallel(backend: str, sequence: bool, around: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    block, x = made(backend)
    block = parallel(block, mesh, sequence)
    x = distribute_tensor(x, mesh, [Shard(1) if sequence else Replicate()])
    function: Callable = block
    if around == "compile":
        function = torch.compile(block, backend="aot_eager", fullgraph=True)
    elif around == "checkpoint":
        function = lambda x: checkpoint(block, x, use_reentrant=False)  # noqa: E731
    loss = loss_of(function(x))
    loss.backward()
    assert isinstance(block.q.weight.grad, DTensor)
    hold(block, loss, backend)


def data_parallel(backend: str, kind: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    block, x = made(backend)
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (size,))
        module = fully_shard(block, mesh=mesh)
    else:
        module = torch.nn.parallel.DistributedDataParallel(block)
    loss = loss_of(module(x.chunk(size)[rank]))
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    hold(block, total / size, backend)


def everything() -> None:
    tensor_parallel("torch", False, "nothing")
    tensor_parallel("torch", True, "checkpoint")
    tensor_parallel("triton", True, "compile")
    data_parallel("triton", "fsdp")
    data_parallel("torch", "ddp")
