"""The drawn figures of the documentation show what is so: addresses, sums, schedules, and rates from committed rows."""

from __future__ import annotations

import importlib.util
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from kernel_ladder import table

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("figures", ROOT / "_build" / "figures" / "__init__.py")
figures = importlib.util.module_from_spec(SPEC)
sys.modules["figures"] = figures  # its modules import each other by this name
SPEC.loader.exec_module(figures)

from figures import addresses, compilers, launches, processor, schedules, softmax, threads  # noqa: E402


@pytest.mark.parametrize("name", figures.FIGURES)
def test_a_figure_is_svg_that_takes_the_pages_colours(name):
    image, caption = figures.draw(name)
    root = ElementTree.fromstring(image)
    assert root.tag.endswith("svg")
    assert "width" not in root.attrib, "the page sets the width"
    assert "currentColor" in image
    assert "#000000" not in image, "black text or lines would vanish on a dark page"
    assert caption.endswith(".")
    _, _, width, _ = map(float, root.attrib["viewBox"].split())
    assert width * 96 / 72 <= 880, "pixels"


def test_an_unknown_figure_is_refused_by_name():
    with pytest.raises(LookupError, match=r"no figure 'swizle'; figures are .*swizzle"):
        figures.draw("swizle")


def test_the_swizzle_is_a_permutation_without_bank_conflicts():
    offsets = {addresses.swizzled(row, chunk) for row in range(8) for chunk in range(8)}
    assert offsets == set(range(0, 1024, 16))
    for chunk in range(8):
        assert len({addresses.bank_group(addresses.swizzled(row, chunk)) for row in range(8)}) == 8


@pytest.mark.parametrize(("width", "stride", "sectors"), [(2, 2, 2), (4, 4, 4), (16, 16, 16), (2, 8192, 32), (4, 8, 8)])
def test_sectors_of_a_warps_load(width, stride, sectors):
    assert addresses.sectors(width, stride) == sectors


@pytest.mark.parametrize(("begin", "end"), [(21, 42), (16, 40), (50257, 100514), (3, 5)])
def test_vectors_cover_a_row_and_are_aligned_between_its_ends(begin, end):
    for first in (begin, begin // addresses.VECTOR * addresses.VECTOR):
        found = addresses.vectors(begin, end, first)
        assert [i for a, b, _ in found for i in range(a, b)] == list(range(begin, end))
    assert all(aligned for *_, aligned in found[1:-1])
    assert all((b - a, a % addresses.VECTOR) == (addresses.VECTOR, 0) for a, b, aligned in found if aligned)


def test_the_online_softmax_is_the_formulas():
    *_, (_, _, total, output) = softmax.steps()
    assert output / total == pytest.approx(softmax.direct(), rel=1e-12)


@pytest.mark.parametrize(("tiles", "sms"), [(9, 4), (3, 4), (8, 4), (13, 5), (517, 132)])
def test_stream_k_does_every_tile_once_in_equal_shares(tiles, sms):
    parts = schedules.split(tiles, sms)
    done = dict.fromkeys(range(tiles), 0.0)
    for mine in parts:
        for tile, begin, end in mine:
            done[tile] += end - begin
        assert sum(end - begin for _, begin, end in mine) == pytest.approx(tiles / sms)
    assert list(done.values()) == pytest.approx([1.0] * tiles)


def test_more_stages_are_never_slower_and_stop_helping():
    ends = [schedules.pipelined(12, stages)[-1][1] for stages in range(1, 7)]
    assert ends == sorted(ends, reverse=True)
    assert ends[0] > ends[3] == ends[4] == ends[5]


def test_operators_of_gelus_formula_move_what_lesson_1_says():
    chain = launches.operators()
    conversions = [name for name, *_ in chain if name == "convert"]
    assert (len(chain), len(conversions)) == (12, 2)
    assert sum(reads + writes for name, reads, writes in chain if name != "convert") == 23 * 2  # float32 is twice T


def test_instructions_of_hlo_use_those_before_them():
    for i, (opcode, operands) in enumerate(compilers.INSTRUCTIONS):
        assert all(operand < i for operand in operands), opcode
    used = {operand for _, operands in compilers.INSTRUCTIONS for operand in operands}
    assert used == {-1, *range(len(compilers.INSTRUCTIONS) - 1)}, "only the last instruction is the result"


@pytest.mark.skipif(table.unavailable("gelu", "xla") is not None, reason="JAX is not installed")
def test_instructions_of_hlo_are_those_that_jax_lowers():
    import jax

    from xla_impl.gelu import formula

    x = jax.ShapeDtypeStruct((4, 8), jax.numpy.bfloat16)
    text = jax.jit(lambda x: formula(jax, x, approximate="tanh")).lower(x).as_text()
    opcodes = re.findall(r"= stablehlo\.(\w+)", text)
    found = [opcode for opcode in opcodes if opcode not in ("constant", "broadcast_in_dim")]
    assert sorted(found) == sorted(opcode for opcode, _ in compilers.INSTRUCTIONS)


def test_a_block_of_triton_is_what_its_threads_hold():
    assert threads.program_block() == threads.WARPS * addresses.LANES * threads.ELEMENTS


def test_threads_of_a_grid_cover_each_element_once():
    found = [threads.place(i) for i in range(threads.LENGTH)]
    assert len(set(found)) == threads.LENGTH
    for i, (block, thread, warp, lane) in enumerate(found):
        assert i == block * threads.BLOCK_THREADS + thread
        assert thread == warp * addresses.LANES + lane


@pytest.mark.parametrize("lanes", [2, 8, 32])
def test_every_lane_has_the_sum_after_its_shuffles(lanes):
    values = [float(3 * i + 1) for i in range(lanes)]
    steps = threads.shuffled(values)
    assert len(steps) == lanes.bit_length()
    assert steps[-1] == [sum(values)] * lanes


def test_bytes_that_an_sm_needs_are_those_of_the_primer():
    (said,) = re.findall(r"an SM must have (\d+) KB \(H100\)", (ROOT / "docs" / "primer.md").read_text())
    assert processor.kib_needed() == pytest.approx(float(said), rel=0.1)


@pytest.mark.parametrize(("rows", "columns", "flop"), [(1, 1, 0.5), (32, 32, 16), (128, 128, 64)])
def test_flop_for_each_byte_of_a_tile(rows, columns, flop):
    assert processor.intensity(rows, columns) == flop


def test_pages_name_figures_that_exist():
    pages = "".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    named = set(re.findall(r"\{\{ figure (\w+) \}\}", pages))
    assert named == set(figures.FIGURES)
