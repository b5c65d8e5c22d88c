"""The drawn figures of the documentation, made anew at every build of the site.

A figure is a function that draws on a :class:`figures.canvas.Canvas` and returns its caption. Its numbers are computed:
rates come from committed rows, addresses from the expression that ``csrc`` compiles, timelines from a small simulation.

    python _build/figures FOLDER     writes every figure as FOLDER/NAME.svg
"""

from __future__ import annotations

from collections.abc import Callable

from figures import addresses, compilers, launches, machine, processor, schedules, softmax, threads, traffic
from figures.canvas import Canvas, as_svg

FIGURES: dict[str, Callable[[Canvas], str]] = {
    "memory_hierarchy": machine.memory_hierarchy,
    "roofline": machine.roofline,
    "coalescing": addresses.coalescing,
    "odd_rows": addresses.odd_rows,
    "swizzle": addresses.swizzle,
    "pipeline": schedules.pipeline,
    "pingpong": schedules.pingpong,
    "stream_k": schedules.stream_k,
    "multicast": traffic.multicast,
    "fusion_bytes": traffic.fusion_bytes,
    "attention_memory": traffic.attention_memory,
    "online_softmax": softmax.online_softmax,
    "launch_timelines": launches.launch_timelines,
    "four_clocks": launches.four_clocks,
    "compile_stages": compilers.compile_stages,
    "hlo_fusion": compilers.hlo_fusion,
    "threads_or_block": threads.threads_or_block,
    "grid": threads.grid,
    "reduction": threads.reduction,
    "streaming_multiprocessor": processor.streaming_multiprocessor,
    "bytes_in_flight": processor.bytes_in_flight,
    "occupancy": processor.occupancy,
    "tile_reuse": processor.tile_reuse,
}


def draw(name: str) -> tuple[str, str]:
    """A figure as SVG text to stand in a page, and its caption.

    Raises:
        LookupError: there is no figure of that name.
    """
    if name not in FIGURES:
        raise LookupError(f"no figure {name!r}; figures are {', '.join(FIGURES)}")
    return as_svg(name, FIGURES[name])
