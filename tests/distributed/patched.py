"""A patched model of Hugging Face's on a group, under FSDP2, DDP and tensor parallelism, against the plain one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from bench.scaling.check import hold_model
from kernel_ladder import models
from kernel_ladder.models.patching import UNDO

Results = dict[str, torch.Tensor]


def _fsdp(model: Any, mesh: DeviceMesh) -> Any:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _fsdp_head_apart(model: Any, mesh: DeviceMesh) -> Any:
    """The model's forward pass sees a shard of the head's weight."""
    fully_shard(model.lm_head, mesh=mesh)
    return _fsdp(model, mesh)


def _ddp(model: Any, mesh: DeviceMesh) -> Any:
    return DistributedDataParallel(model)


def _tensor_parallel(model: Any, mesh: DeviceMesh) -> Any:
    """Heads and hidden features shared among the ranks."""
    plan: dict[str, Any] = {}
    for part, of_columns, of_rows in (
        ("self_attn", ("q_proj", "k_proj", "v_proj"), "o_proj"),
        ("mlp", ("gate_proj", "up_proj"), "down_proj"),
    ):
        plan |= {f"model.layers.*.{part}.{name}": ColwiseParallel() for name in of_columns}
        plan[f"model.layers.*.{part}.{of_rows}"] = RowwiseParallel()
    return parallelize_module(model, mesh, plan)


def _tensor_parallel_words(model: Any, mesh: DeviceMesh) -> Any:
    """The words of the embedding and of the head are shared too."""
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    return parallelize_module(_tensor_parallel(model, mesh), mesh, plan)


#: How a model is spread over the group.
WAYS: dict[str, Callable[[Any, DeviceMesh], Any]] = {
    "FSDP2": _fsdp,
    "FSDP2, the head apart": _fsdp_head_apart,
    "DDP": _ddp,
    "tensor parallelism": _tensor_parallel,
    "tensor parallelism, words too": _tensor_parallel_words,
}
#: Ways in which each rank has its own part of the batch.
OF_DATA = ("FSDP2", "FSDP2, the head apart", "DDP")
#: Ways in which the head's weight is a DTensor, so that the loss is that of logits.
WITH_LOGITS = ("FSDP2, the head apart", "tensor parallelism, words too")


def made(device: str) -> tuple[Any, dict[str, Any]]:
    """A plain Llama in training, and a batch in which every sequence has as many labels that count."""
    from tests.models import families

    model = families.make("llama", device).train()
    tokens = torch.randint(3, 61, (4, 6), generator=torch.Generator().manual_seed(1)).to(device)
    labels = tokens.clone()
    labels[:, 2] = -100
    return model, {"input_ids": tokens, "labels": labels, "use_cache": False}


def whole(x: Any) -> torch.Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach()


def results(model: Any, loss: torch.Tensor) -> Results:
    """The loss and, by the plain model's names, the gradients."""
    gradients = {name.removeprefix("module."): whole(p.grad) for name, p in model.named_parameters()}
    return {"loss": whole(loss), **gradients}


@functools.cache
def expected(device: str) -> tuple[Results, Results]:
    """The plain model's results in one process: in float64, and in float32."""
    found = []
    for dtype in (torch.float64, torch.float32):
        model, batch = made(device)
        loss = model.to(dtype)(**batch).loss
        loss.backward()
        found.append(results(model, loss))
    return found[0], found[1]


def compare(name: str, backend: str, around: str = "nothing", device: str = "cpu") -> None:
    """Loss and gradients of a patched model; its output has logits only where the head's weight is a DTensor."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model, batch = made(device)
    models.patch(model, backend=backend, report=False)
    for layer in model.model.layers:
        if around == "checkpoints":
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
        elif around == "compile":
            layer.compile(backend="aot_eager", fullgraph=True)
    model = WAYS[name](model, init_device_mesh(device, (size,)))
    if name in OF_DATA:
        batch = {key: x.chunk(size)[rank] if isinstance(x, torch.Tensor) else x for key, x in batch.items()}
    output = model(**batch)
    output.loss.backward()
    assert (output.logits is None) == (name not in WITH_LOGITS)
    loss = whole(output.loss)
    if name in OF_DATA:
        dist.all_reduce(loss)
        loss /= size
    found, (exact, naive) = results(model, loss), expected(device)
    assert found.keys() == exact.keys()
    fault = hold_model(list(exact), [found[key] for key in exact], list(exact.values()), list(naive.values()))
    assert fault is None, fault


def check_order() -> None:
    """A patch comes before the shards. It may be undone after them: the model is FSDP2's, and plain, from then on."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model, batch = made("cpu")
    plain = type(model)
    models.patch(model, backend="torch", report=False)
    _fsdp(model, mesh)
    assert model(**batch).logits is None
    models.unpatch(model)
    assert isinstance(model, FSDPModule)
    assert type(model).__mro__[2] is plain
    output = model(**batch)
    assert output.logits is not None
    output.loss.backward()
    torch.testing.assert_close(results(model, output.loss), expected("cpu")[1], rtol=1e-4, atol=1e-6)
    refused = r"parameter `model\.\S+` of argument `model` is a DTensor; patch the model first"
    for spread in (_fsdp, _tensor_parallel):
        model = spread(made("cpu")[0], mesh)
        with pytest.raises(ValueError, match=refused):
            models.patch(model, backend="torch", report=False)
        assert not hasattr(model, UNDO)
