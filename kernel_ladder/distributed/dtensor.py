"""A call on DTensors: redistribute what its sharding rule asks for, run the call on each GPU's part, wrap the results.

PyTorch moves the data (:mod:`torch.distributed.tensor`) and differentiates the moves. Nothing else of a call changes:
each GPU selects and runs a rung for its part, forward and backward, in eager code and inside torch.compile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from kernel_ladder.distributed.sharding import Name, Names, Rule, rule_of
from kernel_ladder.spec import Inputs, Options, as_tuple


def call(op: str, inputs: Inputs, options: Options, run: Callable[[Inputs], Any], anew: Callable[..., Any]) -> Any:
    """The result of a call, of which at least one input is a DTensor, as DTensors.

    Args:
        op: the operation.
        inputs: the call's tensors, checked, None for one that is absent. All are DTensors on one mesh.
        options: the call's options.
        run: runs the call on tensors of one GPU.
        anew: makes another call of the table on DTensors: ``anew(op, inputs, options)``.

    Raises:
        TypeError: a torch.Tensor among DTensors. ValueError: two meshes.
    """
    mesh = _mesh_of(op, inputs)
    rule = rule_of(op, inputs, options)
    chosen = _chosen(rule, inputs, mesh)
    if op == "linear" and "k" in chosen and (inputs[2] is not None or options["activation"] is not None):
        return _reduced_linear(inputs, options, anew)
    if options.get("reduction") == "mean" and any(chosen):
        return _mean_of_rows(op, inputs, options, anew)
    pairs = list(zip(inputs, rule.inputs, strict=True))
    local = tuple([None if x is None else _local(x, names, chosen) for x, names in pairs])
    sizes: dict[str, int] = {}
    for x, names in pairs:
        for name, size in zip(names or (), () if x is None else x.shape, strict=False):
            if name is not None and name not in sizes:  # the heads of queries come before those of keys
                sizes[name] = size
    result = run(local)
    outputs = tuple(
        [_global(y, names, chosen, sizes, mesh) for y, names in zip(as_tuple(result), rule.outputs, strict=True)]
    )
    if not rule.names():  # an operation that needs its tensors whole gives back the first's own shards
        first = tuple([p if isinstance(p, (Shard, Replicate)) else Replicate() for p in inputs[0].placements])
        outputs = tuple([y.redistribute(mesh, first) if y.dim() == inputs[0].dim() else y for y in outputs])
    return outputs if isinstance(result, tuple) else outputs[0]


def _mesh_of(op: str, inputs: Inputs) -> Any:
    mesh = None
    for i, x in enumerate(inputs):
        if x is None:
            continue
        if not isinstance(x, DTensor):
            raise TypeError(
                f"{op}: tensor argument {i + 1} is a torch.Tensor where another is a DTensor; distribute it too: "
                "torch.distributed.tensor.distribute_tensor(x, mesh, [Replicate()])"
            )
        if mesh is None:
            mesh = x.device_mesh
        elif x.device_mesh != mesh:
            raise ValueError(f"{op}: all DTensors must be on one device mesh, got {mesh} and {x.device_mesh}")
    return mesh


def _reduced_linear(inputs: Inputs, options: Options, anew: Callable[..., Any]) -> Any:
    """linear with its inner dimension sharded: the bias and the activation follow the sum over GPUs."""
    input, weight, bias = inputs
    output = anew("linear", (input, weight, None), {**options, "activation": None})
    whole = [Replicate() if p.is_partial() else p for p in output.placements]
    output = output.redistribute(output.device_mesh, whole)
    if options["activation"] is None:
        return anew("add", (output, bias), {})
    approximate = {"approximate": "tanh" if options["activation"] == "gelu_tanh" else "none"}
    return anew("gelu", (output,), approximate) if bias is None else anew("bias_gelu", (output, bias), approximate)


def _mean_of_rows(op: str, inputs: Inputs, options: Options, anew: Callable[..., Any]) -> Any:
    """A loss whose rows are split: the sum in float32 or wider over the number of labels that count, of all GPUs."""
    input, target = inputs[0], inputs[-1]
    if op == "cross_entropy":
        wide = torch.promote_types(input.dtype, torch.float32)
        total = anew(op, inputs, {**options, "reduction": "none"}).sum(dtype=wide)
        result_dtype = wide if options.get("wide_loss") else input.dtype
    else:
        total = anew(op, inputs, {**options, "reduction": "sum", "wide_loss": True})
        result_dtype = total.dtype if options["wide_loss"] else input.dtype
    count = (target != options["ignore_index"]).sum()
    whole = [Replicate()] * input.device_mesh.ndim
    total, count = (x.redistribute(input.device_mesh, whole) for x in (total, count))
    return (total / count).to(result_dtype)


def _chosen(rule: Rule, inputs: Inputs, mesh: Any) -> list[Name]:
    """The name to split over each dimension of the mesh, or None to compute the whole on each: the least moved bytes.

    Of equal costs the first of these: nothing split, then the names in the order of the inputs.
    """
    chosen: list[Name] = []
    for mesh_dim in range(mesh.ndim):
        best, least = None, _cost(None, mesh_dim, rule, inputs, mesh)
        for name in rule.names():
            shards = mesh.size(mesh_dim)
            for other, before in enumerate(chosen):
                if before == name:
                    shards *= mesh.size(other)
            if rule.divisible.get(name, shards) % shards != 0:
                continue
            cost = _cost(name, mesh_dim, rule, inputs, mesh)
            if cost < least:
                best, least = name, cost
        chosen.append(best)
    return chosen


def _cost(name: Name, mesh_dim: int, rule: Rule, inputs: Inputs, mesh: Any) -> float:
    """Bytes that each GPU receives so that every input is split along `name` over one dimension of the mesh.

    A slice of what is there already costs a little, so that replicated inputs stay so.
    """
    total = 0.0
    shards = mesh.size(mesh_dim)
    for x, names in zip(inputs, rule.inputs, strict=True):
        if x is None or names is None:
            continue
        now, wanted = x.placements[mesh_dim], _placement(names, name)
        whole = math.prod(x.shape) * x.element_size()
        if now == wanted:
            continue
        if now.is_replicate():
            total += whole / shards * 1e-3
        elif now.is_partial():
            total += whole * (2 if wanted.is_replicate() else 1)
        else:
            total += whole if wanted.is_replicate() else whole / shards
    return total


def _placement(names: Names | None, name: Name) -> Placement:
    return Shard(names.index(name)) if name is not None and names and name in names else Replicate()


def _local(x: DTensor, names: Names | None, chosen: Sequence[Name]) -> torch.Tensor:
    """This GPU's part of an input, redistributed if it must be."""
    wanted = tuple([_placement(names, name) for name in chosen])
    if tuple(x.placements) != wanted:
        x = x.redistribute(x.device_mesh, wanted)
    # Where the call is split along a name that this input lacks, each GPU's gradient is one summand of its gradient.
    gradient = [
        Partial() if placement.is_replicate() and name is not None else placement
        for placement, name in zip(wanted, chosen, strict=True)
    ]
    return _waited(x.to_local(grad_placements=gradient))


class _Waited(torch.autograd.Function):
    """A tensor, and in the backward pass its gradient, once the collective that writes it is done."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return _arrived(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return _arrived(grad)


def _arrived(x: torch.Tensor) -> torch.Tensor:
    """The tensor in which an asynchronous collective's result is; views of it are no wait for PyTorch."""
    return x.wait() if isinstance(x, AsyncCollectiveTensor) else x.view_as(x)


def _waited(x: torch.Tensor) -> torch.Tensor:
    """`x` for kernels that take its address: PyTorch waits for a collective only before its own operators."""
    if torch.compiler.is_compiling():  # the graph holds the wait
        return x
    if x.requires_grad and torch.is_grad_enabled():
        return _Waited.apply(x)
    return _arrived(x)


def _global(local: torch.Tensor, names: Names, chosen: Sequence[Name], sizes: dict[str, int], mesh: Any) -> DTensor:
    """An output as a DTensor. Of a name that it lacks, each GPU has one summand."""
    placements = [
        Replicate() if name is None else Shard(names.index(name)) if name in names else Partial() for name in chosen
    ]
    dims = range(len(names))
    shape = torch.Size([local.shape[i] if name is None else sizes[name] for i, name in enumerate(names)])
    stride = tuple([math.prod([max(shape[j], 1) for j in dims if _inside(local, j, i)]) for i in dims])
    return DTensor.from_local(_waited(local), mesh, placements, run_check=False, shape=shape, stride=stride)


def _inside(x: torch.Tensor, j: int, i: int) -> bool:
    """Whether dimension j of a dense tensor varies faster than i."""
    return x.stride(j) < x.stride(i) or (x.stride(j) == x.stride(i) and j > i)
