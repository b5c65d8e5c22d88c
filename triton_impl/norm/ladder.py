"""The steps of every normalisation in Triton, in one table: what normalises rows, and what gives their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from triton_impl.common.gluon import requirements
from triton_impl.norm import cluster, cluster_backward, persistent_cluster, rows, short_backward
from triton_impl.norm.rows import Kind
from triton_impl.runtime.aot import Entry


class Step(NamedTuple):
    """A step: its forward and its backward pass, and why it takes no such rows, or does not run here."""

    normalised: Callable
    refused: Callable[..., str | None]
    gradients: Callable
    here: Callable[[], str | None] = lambda: None


STEPS = {
    "online": Step(*rows.FORWARD["online"], rows.backward),
    # Rows that it has in one block forward are in a cluster's backward, where they may; and short ones a warp's alone.
    "fused": Step(*rows.FORWARD["fused"], short_backward.backward),
    "cluster": Step(cluster.forward, cluster.refused, short_backward.backward, requirements.here),
}


def ahead_of_time(kind: Kind) -> list[Entry]:
    """Specialisations that stand for the calls of a normalisation."""
    modules = (rows, cluster, persistent_cluster, cluster_backward, short_backward)
    return [e for module in modules for e in module.ahead_of_time(kind)]
