"""What each rank of a group checks about DTensors: every operation and placement against the call on one GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import kernel_ladder
from kernel_ladder.errors import BackendError
from kernel_ladder.spec import Case, Inputs, as_tuple
from kernel_ladder.testing.samples import make_inputs


def placements(inputs: Inputs) -> Iterator[tuple[Placement, ...]]:
    """Placements of a call's inputs over one dimension of a mesh: one input sharded, each way; then all alike."""
    given = [x for x in inputs if x is not None]
    whole = (Replicate(),) * len(given)
    yield whole
    for i, x in enumerate(given):
        for dim in range(x.dim()):
            yield (*whole[:i], Shard(dim), *whole[i + 1 :])
        if x.is_floating_point():
            yield (*whole[:i], Partial(), *whole[i + 1 :])
    for dim in range(max(x.dim() for x in given)):
        yield tuple(Shard(dim) if dim < x.dim() else Replicate() for x in given)
        yield tuple(Shard(x.dim() - 1 - dim) if dim < x.dim() else Replicate() for x in given)


def distributed(x: torch.Tensor, mesh: Any, placement: Placement) -> DTensor:
    """`x` as a DTensor leaf. A partial one has `x` on the first rank and zeros on the others."""
    if placement.is_partial():
        summand = x if dist.get_rank() == 0 else torch.zeros_like(x)
        made = DTensor.from_local(summand, mesh, [placement], run_check=False)
    else:
        made = distribute_tensor(x, mesh, [placement])
    return made.detach().requires_grad_(x.is_floating_point())


def whole(x: Any) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def compare(
    op: str, backend: str, case: Case, dtype: torch.dtype, most: int, tolerance: float, device: str = "cpu"
) -> None:
    """Outputs and gradients of a case for up to `most` placements."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    inputs = make_inputs(case, dtype, torch.device(device))
    names = list(kernel_ladder.spec(op).named(inputs))
    given = [x.detach() for x in inputs if x is not None]
    function = getattr(kernel_ladder, op)

    def evaluate(leaves: list[torch.Tensor]) -> list[torch.Tensor]:
        outputs = as_tuple(function(**dict(zip(names, leaves, strict=True)), **case.options, backend=backend))
        wanted = [x for x in leaves if x.requires_grad]
        # A loss whose gradient differs at each element, the same on every rank.
        loss = sum((torch.nan_to_num(whole(y), neginf=0).sin() * (i + 1)).sum() for i, y in enumerate(outputs))
        return [whole(x).detach() for x in (*outputs, *torch.autograd.grad(loss, wanted))]

    expected = evaluate([x.clone().requires_grad_(x.is_floating_point()) for x in given])
    for chosen in list(dict.fromkeys(placements(inputs)))[:most]:
        found = evaluate([distributed(x, mesh, p) for x, p in zip(given, chosen, strict=True)])
        torch.testing.assert_close(
            found, expected, rtol=tolerance, atol=tolerance, msg=lambda m, at=chosen: f"{at}: {m}"
        )


def check_means_of_rows(backend: str) -> None:
    """A mean over rows of which ranks have unequal numbers that count: only scalars move, and gradients are exact."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    torch.manual_seed(0)  # the same on every rank
    rows, classes = 3 * ranks + 1, 10
    hidden, weight = torch.randn(rows, 8, dtype=torch.float64), torch.randn(classes, 8, dtype=torch.float64)
    labels = torch.randint(classes, (rows,))
    labels[:3] = -100  # of the first rank
    of_rows = distribute_tensor(labels, mesh, [Shard(0)])
    more = {"label_smoothing": 0.1, "z_loss": 1e-2, "backend": backend}
    for op, tensors in (("cross_entropy", (hidden @ weight.T,)), ("linear_cross_entropy", (hidden, weight))):
        leaves = [x.clone().requires_grad_() for x in tensors]
        placed = [
            distribute_tensor(x, mesh, [Replicate() if i else Shard(0)]).requires_grad_() for i, x in enumerate(tensors)
        ]
        function = getattr(kernel_ladder, op)
        expected = function(*leaves, labels, **more)
        with CommDebugMode() as moved:
            found = function(*placed, of_rows, **more)
        assert set(moved.get_comm_counts()) == {torch.ops.c10d_functional.all_reduce}, (op, moved.get_comm_counts())
        torch.testing.assert_close(whole(found), expected)
        of_leaves, of_placed = torch.autograd.grad(expected, leaves), torch.autograd.grad(found, placed)
        assert of_placed[0].placements == (Shard(0),)
        torch.testing.assert_close([whole(x) for x in of_placed], list(of_leaves))
        assert whole(function(*placed, torch.full_like(of_rows, -100), backend=backend)).isnan()


def check_float8(backend: str) -> None:
    """Rows, or outputs, of a float8 layer split over ranks. No operand moves: Gloo sends no float8."""
    mesh, rank, ranks = init_device_mesh("cpu", (dist.get_world_size(),)), dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same on every rank
    input, input_scale = kernel_ladder.quantize_float8(torch.randn(ranks, 3 * ranks, 32))
    weight, weight_scale = kernel_ladder.quantize_float8(torch.randn(16, 32))
    tensors = input, weight, input_scale, weight_scale, torch.randn(16)
    expected = kernel_ladder.linear_float8(*tensors, backend=backend)
    for of_rows, of_columns, dim in ((1, None, 1), (0, None, 0), (None, 0, 2), (None, None, None)):
        places = of_rows, of_columns, of_rows, of_columns, of_columns
        given = [
            DTensor.from_local(
                x if place is None else x.chunk(ranks, place)[rank],
                mesh,
                [Replicate() if place is None else Shard(place)],
                run_check=False,
            )
            for x, place in zip(tensors, places, strict=True)
        ]
        found = kernel_ladder.linear_float8(*given, backend=backend)
        assert tuple(found.placements) == ((Replicate() if dim is None else Shard(dim)),), (places, found.placements)
        assert torch.equal(whole(found), expected)


def check_mesh_of_two_dimensions() -> None:
    """Products and attention on a 2 × 2 mesh: batch over one dimension, features or heads over the other."""
    mesh = init_device_mesh("cpu", (2, 2))
    generator = torch.Generator().manual_seed(0)
    calls: list[tuple[str, list[tuple[tuple[int, ...], list[Placement]]], dict[str, Any], tuple[Placement, ...]]] = [
        (
            "linear",
            [((4, 6, 8), [Shard(0), Replicate()]), ((10, 8), [Replicate(), Shard(0)])],
            {},
            (Shard(0), Shard(2)),
        ),
        ("linear", [((4, 6, 8), [Shard(0), Shard(2)]), ((10, 8), [Replicate(), Shard(1)])], {}, (Shard(0), Partial())),
        ("matmul", [((8, 6), [Shard(0), Shard(0)]), ((6, 5), [Replicate(), Replicate()])], {}, (Shard(0), Shard(0))),
        ("attention", [((4, 4, 5, 8), [Shard(0), Shard(1)])] * 3, {"is_causal": True}, (Shard(0), Shard(1))),
        ("gelu", [((5, 7), [Shard(1), Shard(0)])], {}, (Shard(1), Shard(0))),
        ("sum", [((4, 6), [Shard(0), Shard(1)])], {"dim": 1}, (Shard(0), Partial())),
    ]
    for op, operands, options, placed in calls:
        inputs = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape, _ in operands]
        leaves = [x.clone().requires_grad_() for x in inputs]
        sharded = [distribute_tensor(x, mesh, p).requires_grad_() for x, (_, p) in zip(inputs, operands, strict=True)]
        function = getattr(kernel_ladder, op)
        expected, found = function(*leaves, **options, backend="torch"), function(*sharded, **options, backend="torch")
        assert tuple(found.placements) == placed, (op, found.placements)
        torch.testing.assert_close(whole(found), expected)
        of_leaves = torch.autograd.grad(expected.sin().sum(), leaves)
        of_sharded = torch.autograd.grad(whole(found).sin().sum(), sharded)
        torch.testing.assert_close([whole(x) for x in of_sharded], list(of_leaves))


def check_errors() -> None:
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)  # the same on every rank
    x = torch.randn(4, 8)
    placed = distribute_tensor(x, mesh, [Shard(0)])
    with pytest.raises(TypeError, match=r"linear: tensor argument 2 is a torch\.Tensor where another is a DTensor"):
        kernel_ladder.linear(placed, x)
    with pytest.raises(ValueError, match=r"linear: the last dimension of `input` must equal that of `weight`"):
        kernel_ladder.linear(placed, distribute_tensor(torch.randn(4, 6), mesh, [Replicate()]))
    with pytest.raises(BackendError, match="unknown `backend` 'cuba'"):
        kernel_ladder.gelu(placed, backend="cuba")
    # Three heads of keys do not divide by two: heads stay whole.
    q, k = torch.randn(1, 6, 4, 8), torch.randn(1, 3, 4, 8)
    q, k = (distribute_tensor(x, mesh, [Shard(1)]) for x in (q, k))
    found = kernel_ladder.attention(q, k, k, enable_gqa=True, backend="torch")
    expected = kernel_ladder.attention(whole(q), whole(k), whole(k), enable_gqa=True, backend="torch")
    torch.testing.assert_close(whole(found), expected)
    # A dropped element is the one that is dropped on one GPU, and the result is sharded as the input is.
    dropped = kernel_ladder.dropout(placed, 0.5, seed=3, backend="torch")
    assert tuple(dropped.placements) == (Shard(0),)
    assert torch.equal(whole(dropped), kernel_ladder.dropout(x, 0.5, seed=3, backend="torch"))


def check_asynchronous() -> None:
    """A kernel that takes a tensor's address gets it after the collective, forward and backward."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    leaf, leaf_again = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_(), x.clone().requires_grad_()
    placed = leaf.redistribute(mesh, [Replicate()], async_op=True)
    found = kernel_ladder.gelu(placed, backend="triton").redistribute(mesh, [Shard(0)], async_op=True)
    expected = kernel_ladder.gelu(leaf_again, backend="triton")
    assert torch.equal(whole(found), expected)
    whole(found).square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(whole(leaf.grad), leaf_again.grad)
