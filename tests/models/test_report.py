"""What the report of a patch says: modules replaced and left, and why."""

from __future__ import annotations

import pytest
import torch

from kernel_ladder import models
from kernel_ladder.models import kept

pytest.importorskip("transformers", reason="transformers is not installed; pip install kernel_ladder[models]")
families = pytest.importorskip("tests.models.families")

pytestmark = pytest.mark.xdist_group("transformers")  # its import takes seconds in each process


def test_a_report_is_printed(capsys):
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 8), torch.nn.GELU("tanh"), torch.nn.LayerNorm(8), torch.nn.RMSNorm(8)
    )
    report = models.patch(model)
    assert str(report) + "\n" == capsys.readouterr().out
    assert str(report).splitlines() == [
        "Sequential: 3 modules replaced, backend 'auto'",
        "  replaced    1 × GELU: gelu, approximate='tanh'",
        "  replaced    1 × LayerNorm: layer_norm",
        "  replaced    1 × RMSNorm: rms_norm",
        "  left        1 × Linear: 'auto' takes PyTorch's product where 8 divides both features",
    ]
    assert [e.name for e in report.replaced] == ["1", "2", "3"]
    assert models.patch(model, backend="torch", report=False).backend == "torch"
    assert all(m._backend == "torch" for m in model)


def test_auto_leaves_linear_layers_whose_product_is_pytorchs(monkeypatch):
    sizes = [(8, 16), (8, 9), (12, 8)]
    model = torch.nn.Sequential(*(torch.nn.Linear(*size) for size in sizes))
    assert [e.name for e in models.patch(model, report=False).replaced] == ["1", "2"]
    assert len(models.patch(model, "torch", report=False).replaced) == 3
    with pytest.raises(ValueError, match=r"nothing in Linear can be replaced: Linear: 'auto' takes PyTorch's product"):
        models.patch(torch.nn.Linear(8, 8))
    monkeypatch.setenv("KERNEL_LADDER_SELECT", "measure")
    assert len(models.patch(model, report=False).replaced) == 3


class OddRMSNorm(torch.nn.Module):
    """A norm by name that computes something else."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(8)), 1e-6

    def forward(self, x):
        return x * self.weight * 3


class UnknownNorm(OddRMSNorm):
    pass


def test_what_is_left_and_why():
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 8), OddRMSNorm(), UnknownNorm(), torch.nn.Linear(8, 8), torch.nn.GELU()
    )
    model[3].forward = torch.relu
    del model[2].eps
    report = models.patch(model, backend="torch", report=False)
    assert [e.name for e in report.replaced] == ["0", "4"]
    assert {e.name: e.why for e in report.left} == {
        "1": "computes something else",
        "2": "a class that is not known here",
        "3": "has a forward pass of its own, set by other code",
    }
    with pytest.raises(ValueError, match="nothing in OddRMSNorm can be replaced: OddRMSNorm: computes something else"):
        models.patch(OddRMSNorm())
    on_meta = torch.nn.Sequential(families.FAMILIES["llama"]().model.norm.to("meta"), torch.nn.Linear(4, 4))
    (entry,) = models.patch(on_meta, backend="torch", report=False).left
    assert "meta device" in entry.why


def test_what_a_user_would_ask_about_is_listed(capsys):
    """Kinds that stay as they are have a line each, with the reason; activations of replaced blocks have none."""

    class Head(torch.nn.Module):
        def forward(self, x):
            return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    class MoeExperts(torch.nn.Module):
        pass

    parts = [
        torch.nn.Dropout(0.1), torch.nn.Dropout(0.1), torch.nn.Dropout(0.0), torch.nn.Softmax(-1), torch.nn.SiLU(),
        torch.nn.BatchNorm1d(4), torch.nn.GroupNorm(2, 4), torch.nn.CrossEntropyLoss(weight=torch.ones(3)), Head(),
        MoeExperts(), torch.nn.ReLU(), torch.nn.Conv2d(1, 1, 1), families.make("llama").model.layers[0].mlp,
    ]  # fmt: skip
    models.patch(torch.nn.ModuleList(parts), backend="torch")
    left = [line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith("  left")]
    assert left == [
        f"left        {count} × {kind}: {why}"
        for count, kind, why in (
            (2, "Dropout", kept.DROPOUT),
            (1, "Softmax", kept.SOFTMAX),
            (1, "SiLU", kept.SILU),
            (1, "BatchNorm1d", kept.NORM),
            (1, "GroupNorm", kept.NORM),
            (1, "CrossEntropyLoss", kept.WEIGHTED_LOSS),
            (1, "Head", kept.CALLS_ATTENTION),
            (1, "MoeExperts", kept.EXPERTS),
        )
    ]


@pytest.mark.parametrize(("family", "reasons"), [("bert", {kept.DROPOUT, kept.CALLS_LOSS}), ("llama", set())])
def test_dropout_of_attention_is_not_listed_twice(family, reasons):
    """It is said with the attention that does it; a model that computes its loss itself is listed."""
    left = models.patch(families.make(family), backend="torch", report=False).left
    assert {e.why for e in left} == reasons
    assert not [e for e in left if e.name.endswith("attention.self.dropout")]
