"""The block `when compilers help`: each compiler beside the formula and kernels by hand, at every call of a chain."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.rows.store import Row
from bench.show import helps

from .test_climb import _row


def at(shape: str, naive: float, compiled: float, by_hand: float, **more) -> list[Row]:
    times = {"torch.naive": naive, "compile.default": compiled, "triton.fused": by_hand, "cuda.naive": 2 * by_hand}
    return [Row(**{**_row(name, us).__dict__, "shape": shape, **more}) for name, us in times.items()]


def test_ratios_are_of_every_call_of_the_sweep_and_the_best_by_hand():
    rows = [*at("8x8", 100, 50, 40), *at("8x8", 100, 200, 40, dtype="float32"), *at("9x9", 1, 1, 1, set="models")]
    gains, costs = helps.ratios("gelu", "compile.default", "forward", rows)
    assert gains == {"8x8": 2, "8x8 float32": 0.5}
    assert costs == {"8x8": 1.25, "8x8 float32": 5}
    assert helps.ratios("gelu", "compile.default", "backward", rows) == ({}, {})
    wrong = [Row(**{**row.__dict__, "wrong": "1 of 8 differ"}) for row in rows]
    assert helps.ratios("gelu", "compile.default", "forward", wrong) == ({}, {})


@pytest.mark.parametrize(
    ("gains", "costs", "said"),
    [
        ({}, {}, []),
        ({"a": 2.0, "b": 8.0}, {"a": 1.02, "b": 0.98}, ["4 ×", "1 ×", "nowhere", "nowhere"]),
        (
            {"a": 0.5, "b": 2.0},
            {"a": 4.0, "b": 0.25},
            [
                *("1 ×, slower at 1 of 2, most by 2 × at a", "1 ×"),
                *("at 1 of 2, most by 4 × at a", "at 1 of 2, most by 4 × at b"),
            ],
        ),
        (
            {},
            {name: 2.0 + 0.5 * place for place, name in enumerate("abcde")},
            ["–", "2.91 ×", "at all 5, most by 4 × at e", "nowhere"],
        ),
    ],
)  # fmt: skip
def test_cells_have_means_and_the_farthest_call(gains, costs, said):
    assert helps.judged(gains, costs) == said


def test_the_block_has_a_line_a_compiler_and_pass():
    written = helps.write(Path("gpu.jsonl"), at("8x8", 100, 50, 40))
    assert written.splitlines()[4:] == [
        "| **gelu** | forward | torch.compile | 2 × | 1.25 × | at all 1, most by 1.25 × at 8x8 | nowhere |"
    ]
    assert helps.write(Path("gpu.jsonl"), []) == ""
