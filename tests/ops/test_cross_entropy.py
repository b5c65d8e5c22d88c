"""Cross-entropy beside PyTorch's: rows that do not count, labels that are no class, z-loss, bits of two runs."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

import kernel_ladder as kl
from kernel_ladder.spec import as_leaves
from kernel_ladder.table import Variant

from ..conftest import DEVICE, every_variant, skip_unless_available, skip_unless_it_runs, variant_id

LEVELS = ("torch.naive", "torch", "xla", "triton", "cuda")
OPTIONS = {"ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0, "z_loss": 0.0}
#: Rungs that are not PyTorch's own function, which stops where a label is no class.
OURS = [v for v in every_variant() if v.op == "cross_entropy" and v.level != "compile" and v.name != "torch.builtin"]


def _rows(rows: int, classes: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, target = torch.randn(rows, classes, generator=generator), torch.randint(classes, (rows,), generator=generator)
    return x.to(DEVICE).requires_grad_(), target.to(DEVICE)


def _unchecked(variant: Variant, x: torch.Tensor, target: torch.Tensor, **options: object) -> list[torch.Tensor]:
    """The loss and the gradient of a rung, past the check that refuses such labels in the host's memory."""
    named = {**OPTIONS, **options}
    skip_unless_it_runs(variant, (x, target), named)
    loss, saved = variant.forward(x, target, **named)
    if variant.backward is None:
        return [loss.detach(), torch.autograd.grad(loss.sum(), x)[0]]
    return [loss.detach(), variant.backward(saved, torch.ones_like(loss), (True, False))[0].detach()]


@pytest.mark.parametrize("variant", OURS, ids=variant_id)
def test_a_label_that_is_no_class_reads_nothing(variant):
    """Labels far outside of the tensor: loss NaN and gradient zero in their rows, and the others' as without them."""
    x, target = _rows(6, 37)
    wrong = target.clone()
    wrong[1], wrong[3], wrong[4] = 37, 2**62, -1
    loss, grad = _unchecked(variant, x, wrong, reduction="none")
    right_loss, right_grad = _unchecked(variant, x, target, reduction="none")
    assert loss[[1, 3, 4]].isnan().all()
    assert not grad[[1, 3, 4]].any()
    assert loss[[0, 2, 5]].equal(right_loss[[0, 2, 5]])
    assert grad[[0, 2, 5]].equal(right_grad[[0, 2, 5]])
    mean, grad = _unchecked(variant, x, wrong)
    assert mean.isnan()
    assert not grad[[1, 3, 4]].any()


@pytest.mark.parametrize("classes", [37, 4096, 9001])
@pytest.mark.parametrize("variant", OURS, ids=variant_id)
def test_what_ignored_rows_hold_changes_nothing(variant, classes):
    """NaN in rows that do not count stays there, in both passes; a block may hold the row at once, or in pieces."""
    x, target = _rows(5, classes)
    target[[0, 3]] = -100
    with torch.no_grad():
        x[[0, 3]] = torch.nan
    loss, grad = _unchecked(variant, x, target)
    expected = F.cross_entropy(x[[1, 2, 4]], target[[1, 2, 4]])
    torch.testing.assert_close(loss, expected.detach())
    assert not grad[[0, 3]].any()
    torch.testing.assert_close(grad, torch.autograd.grad(expected, x)[0])


@pytest.mark.parametrize("level", LEVELS)
def test_z_loss_is_the_square_of_the_log_sum_exp(level):
    skip_unless_available("cross_entropy", level.partition(".")[0])
    x, target = _rows(7, 50)
    for reduction in ("mean", "sum"):
        found = kl.cross_entropy(x, target, reduction=reduction, z_loss=0.5, backend=level)
        squares = x.logsumexp(-1).square()
        expected = F.cross_entropy(x, target, reduction=reduction) + 0.5 * getattr(squares, reduction)()
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad(found, x), torch.autograd.grad(expected, x))


@pytest.mark.parametrize("level", LEVELS)
def test_where_no_row_counts(level):
    """The mean of nothing is NaN and the sum is zero, as in PyTorch; the gradient is zero."""
    skip_unless_available("cross_entropy", level.partition(".")[0])
    for rows in (0, 3):
        x, target = _rows(rows, 5)
        target.fill_(2)
        mean, total = (
            kl.cross_entropy(x, target, ignore_index=2, reduction=reduction, backend=level)
            for reduction in ("mean", "sum")
        )
        assert mean.isnan()
        assert total == 0
        assert not torch.autograd.grad(mean, x)[0].any()


def test_labels_are_checked_on_the_host_alone():
    x, target = torch.zeros(3, 4), torch.tensor([0, 4, 1])
    with pytest.raises(IndexError, match="classes from 0 to 3, or -100 in rows to ignore, got 4"):
        kl.cross_entropy(x, target)
    assert kl.cross_entropy(x, target, ignore_index=4).isfinite()
    assert kl.cross_entropy(x.to("meta"), target.to("meta"), backend="torch.naive").shape == ()
    compiled = torch.compile(
        lambda *a: kl.cross_entropy(*a, backend="torch.naive"), fullgraph=True, backend="aot_eager"
    )
    assert compiled(x, target).isnan()


def _chunked(level: str) -> ModuleType:
    skip_unless_available("linear_cross_entropy", level)
    return importlib.import_module(f"{level}_impl.linear_cross_entropy")


@pytest.mark.parametrize("level", ["triton", "cuda"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_logits_are_made_in_chunks(reduction, level, monkeypatch):
    """No product of a chunked rung has all rows of the logits; gradients are added up over the chunks."""
    chunked = _chunked(level)
    shapes, multiply = [], chunked.multiply

    def recorded(c, a, b, **more):
        shapes.append(tuple(c.shape))
        multiply(c, a, b, **more)

    monkeypatch.setattr(chunked, "multiply", recorded)
    for name in ("LEAST_ROWS", "ROW_MULTIPLE"):
        monkeypatch.setattr(chunked, name, 16)
    x, target = _rows(50, 24)
    target = target % 21
    target[7] = -100
    weight = torch.randn(21, 24, device=DEVICE, requires_grad=True)
    found = kl.linear_cross_entropy(x, weight, target, reduction=reduction, backend=f"{level}.chunked")
    expected = kl.linear_cross_entropy(x, weight, target, reduction=reduction, backend="torch.naive")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    grad = torch.linspace(1, 2, found.numel(), device=DEVICE).view(found.shape)
    wanted = torch.autograd.grad(expected, (x, weight), grad)
    for retained in (True, False):  # a second backward pass gives the same
        gradients = torch.autograd.grad(found, (x, weight), grad, retain_graph=retained)
        for a, b in zip(gradients, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    assert max(rows for rows, classes in shapes if classes == 21) == 16


@pytest.mark.parametrize("level", ["triton", "cuda"])
def test_gradients_are_scaled_where_they_lie(level):
    """The last backward pass returns the memory that the forward pass filled; one that keeps the graph copies it."""
    _chunked(level)
    x, target = _rows(20, 24)
    target = target % 21
    weight = torch.randn(21, 24, device=DEVICE, requires_grad=True)
    grad = torch.full((), 0.5, device=DEVICE)

    def loss(**options):
        found = kl.linear_cross_entropy(x, weight, target, backend=f"{level}.chunked", **options)
        return found, {t.data_ptr() for t in found.grad_fn.saved_tensors if t.dim() == 2}

    found, saved = loss()
    assert len(saved) == 2
    kept = [torch.autograd.grad(found, (x, weight), grad, retain_graph=True) for _ in range(2)]
    kept.append(torch.autograd.grad(found, (x, weight), grad, create_graph=True))
    assert saved.isdisjoint(t.data_ptr() for gradients in kept for t in gradients)
    last = torch.autograd.grad(found, (x, weight), grad)
    assert {t.data_ptr() for t in last} == saved
    for gradients in kept:
        assert all(a.equal(b) for a, b in zip(gradients, last, strict=True))
    with pytest.raises(RuntimeError, match="a second time"):
        torch.autograd.grad(found, (x, weight), grad)
    found, saved = loss(reduction="sum")
    found.backward()
    assert {x.grad.data_ptr(), weight.grad.data_ptr()} == saved


@pytest.mark.parametrize("level", ["triton", "cuda"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products_by_tensor_descriptors(dtype, level, monkeypatch):
    """A number of classes that TMA does not take has padded rows of logits, whatever lies in the padding."""
    chunked = _chunked(level)
    made, make = [], chunked._empty_logits

    def filled(x, weight):
        logits = make(x, weight)
        logits.untyped_storage().fill_(255)  # NaN
        made.append(logits.stride(0))
        return logits

    monkeypatch.setattr(chunked, "_empty_logits", filled)
    monkeypatch.setattr(chunked, "LEAST_ROWS", 16)
    if level == "cuda":  # three chunks
        monkeypatch.setattr(chunked, "ROW_MULTIPLE", 16)
    target = torch.randint(0, 77, (40,), device=DEVICE)
    x, weight = ((torch.randn(n, 64, device=DEVICE) / 8).to(dtype).requires_grad_() for n in (40, 77))
    found = kl.linear_cross_entropy(x, weight, target, backend=f"{level}.chunked")
    expected = kl.linear_cross_entropy(x.double(), weight.double(), target, backend="torch.naive")
    torch.testing.assert_close(found.double(), expected, rtol=2e-2, atol=2e-2)
    gradients = (torch.autograd.grad(loss, (x, weight)) for loss in (found, expected))
    for gradient, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=5e-2, atol=2e-3)
    hopper = DEVICE.type == "cpu" or torch.cuda.get_device_capability() >= (9, 0)
    assert set(made) == {80 if hopper else 77}


def test_a_level_without_a_rung_says_so(scratch_table):
    skip_unless_available("linear_cross_entropy", "triton")
    kl.table._variants["linear_cross_entropy", "triton"].clear()
    x, target = _rows(3, 4)
    for backend in ("triton", "triton.chunked"):
        with pytest.raises(kl.UnavailableError, match="the triton level has no rung of linear_cross_entropy"):
            kl.linear_cross_entropy(x, torch.ones(5, 4, device=DEVICE), target, backend=backend)


def test_two_runs_give_the_same_bits():
    for variant in OURS:
        if kl.table.unavailable(variant.op, variant.level) is None:
            inputs = as_leaves(_rows(40, 300))
            first, second = (_unchecked(variant, *inputs) for _ in range(2))
            assert all(a.equal(b) for a, b in zip(first, second, strict=True)), variant.name
