"""The steps of every normalisation in Triton, in one table: what normalises rows, and what gives their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from triton_impl import gluon, norms, norms_cluster, norms_cluster_backward, norms_short_backward, norms_staying
from triton_impl.aot import Entry
from triton_impl.norms import Kind


class Step(NamedTuple):
    """A step: its forward and its backward pass, and why it takes no such rows, or does not run here."""

    normalised: Callable
    refused: Callable[..., str | None]
    gradients: Callable
    here: Callable[[], str | None] = lambda: None


STEPS = {
    "online": Step(*norms.FORWARD["online"], norms.backward),
    # Rows that it has in one block forward are in a cluster's backward, where they may; and short ones a warp's alone.
    "fused": Step(*norms.FORWARD["fused"], norms_short_backward.backward),
    "cluster": Step(norms_cluster.forward, norms_cluster.refused, norms_short_backward.backward, gluon.here),
}


def ahead_of_time(kind: Kind) -> list[Entry]:
    """Specialisations that stand for the calls of a normalisation."""
    modules = (norms, norms_cluster, norms_staying, norms_cluster_backward, norms_short_backward)
    return [e for module in modules for e in module.ahead_of_time(kind)]
