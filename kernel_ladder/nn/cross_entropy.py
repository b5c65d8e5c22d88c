"""The loss of classifiers and language models."""

from __future__ import annotations

import torch

from kernel_ladder import ops
from kernel_ladder.nn.arguments import only
from kernel_ladder.nn.backend import HasBackend
from kernel_ladder.ops.calls import as_int, as_number
from kernel_ladder.semantics.cross_entropy import check_options


class CrossEntropy(HasBackend, torch.nn.CrossEntropyLoss):
    """:class:`torch.nn.CrossEntropyLoss` of labels by :func:`kernel_ladder.cross_entropy`.

    Args:
        weight: must be None; classes have no weights of their own.
        size_average, reduce: must be None; `reduction` says it.
        ignore_index: the label of rows that do not count.
        reduction: ``"none"``, ``"mean"`` over the rows that count, or ``"sum"``.
        label_smoothing: from 0 to 1, the share of the loss against equal probabilities.
        z_loss: at least 0, the factor of ``logsumexp(row)²``, which is added to each row's loss.
        backend: see :func:`kernel_ladder.use`; None leaves the choice to each call.
    """

    OPS = ("cross_entropy",)

    def __init__(
        self,
        weight: None = None,
        size_average: None = None,
        ignore_index: int = -100,
        reduce: None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        z_loss: float = 0.0,
        backend: str | None = None,
    ) -> None:
        if weight is not None:
            raise ValueError(
                f"CrossEntropy: argument `weight` must be None, got {type(weight).__name__}: classes have no "
                "weights here"
            )
        only("CrossEntropy", "size_average", size_average, None, "`reduction` takes its place")
        only("CrossEntropy", "reduce", reduce, None, "`reduction` takes its place")
        ignore_index, label_smoothing, z_loss = as_int(ignore_index), as_number(label_smoothing), as_number(z_loss)
        check_options("CrossEntropy", ignore_index, reduction, label_smoothing, z_loss, False)
        super().__init__(ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)
        self.z_loss = z_loss
        self.backend = backend

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The loss of logits ``(C,)``, ``(N, C)`` or ``(N, C, d1, ...)``, and labels of that shape without C."""
        return ops.cross_entropy(
            input,
            target,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            backend=self._backend,
        )

    def extra_repr(self) -> str:
        return self._with_backend(f"z_loss={self.z_loss:g}" if self.z_loss else "")
