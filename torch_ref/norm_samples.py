"""Samples and sweep of the normalisations: rows of every length, with and without weight and bias."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kernel_ladder.spec import Case

#: Shapes of the input and its parameters, from the input's shape and the number of dimensions that make a row.
Shapes = Callable[[tuple[int, ...], int], tuple[tuple[int, ...] | None, ...]]

SWEEP = [(65536, 256), (16384, 1024), (16384, 4096), (8192, 16384), (4096, 65536), (2048, 131072)]
QUICK = {(16384, 1024), (16384, 4096)}


def cases(shapes: Shapes, options: Callable[[tuple[int, ...]], dict[str, Any]]) -> list[Case]:
    """Awkward rows in the last dimension. ``options(row)`` gives a call's options for the shape of a row."""

    def case(id: str, shape: tuple[int, ...], **more: str) -> Case:
        return Case(id, shapes(shape, 1), options(shape[-1:]), **more)

    return [
        case("one", (1,)),
        case("vector", (77,)),
        case("empty-rows", (3, 0)),
        case("no-rows", (0, 3)),
        case("column", (7, 1)),
        case("short", (70, 5)),
        case("many-rows", (131, 24)),
        case("prime", (3, 1009)),
        case("tile-1", (5, 1023)),
        case("tile+1", (5, 1025)),
        case("vector-multiple", (33, 256)),
        case("two-warps", (19, 2048)),
        case("wide", (9, 4096)),
        case("4d", (2, 3, 5, 64)),
        case("transposed", (37, 53), layout="transposed"),
        case("transposed-middle", (4, 37, 64), layout="transposed"),
        case("strided", (6, 129), layout="strided"),
        case("sliced", (6, 264), layout="sliced"),
        case("expanded", (9, 40), layout="expanded"),
        case("large", (31, 130), values="large"),
        case("offset", (31, 1000), values="offset"),
        case("offset-long", (3, 20000), values="offset"),
        case("constant", (3, 4096), values="constant"),
        case("nan", (9, 50), values="nan"),
        case("inf", (9, 50), values="inf"),
        case("medium", (3, 20000)),
        case("long", (2, 65537)),
        case("two-clusters", (5, 65536)),
        case("long-vectors", (3, 98_312)),
        case("longest-vectors", (2, 131_072)),
        case("million", (1, 1_000_000)),
    ]


def sweep(shapes: Shapes, options: Callable[[tuple[int, ...]], dict[str, Any]]) -> list[Case]:
    """Rows from short to long, each with its parameters."""
    return [Case(f"{m}x{n}", shapes((m, n), 1), options((n,)), quick=(m, n) in QUICK) for m, n in SWEEP]
