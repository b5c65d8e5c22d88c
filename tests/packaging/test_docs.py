"""The code in README.md and docs runs, and the pages are complete."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch._inductor import config

import kernel_ladder
from bench.measure import environment
from bench.show import readme
from kernel_ladder import autograd, table
from kernel_ladder.exercises.catalog import EXERCISES
from kernel_ladder.inspection.heads import ladder
from kernel_ladder.testing.agreement import agreement
from kernel_ladder.testing.samples import make_inputs

from ..conftest import DEVICE

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
ENVIRONMENT = (ROOT / "docs" / "environment.md").read_text()
PAGES = (README, *((ROOT / "docs" / f"{name}.md").read_text() for name in ("start", "extending", "determinism")))
PYTHON = re.findall(r"^```python\n(.*?)^```", "\n".join(PAGES), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("index", range(len(PYTHON)))
def test_the_readmes_code_runs(index, scratch_table):
    if "softmax" in PYTHON[index] and "softmax" not in kernel_ladder.OPS:
        pytest.skip("no softmax in the table")
    exec(compile(PYTHON[index], f"README.md, block {index}", "exec"), {})


def test_the_compilers_answer_in_lesson_7(capsys):
    """Which of two spellings it finds is of a version, which the lesson names."""
    if not torch.__version__.startswith("2.13") or DEVICE.type != "cpu":
        pytest.skip(f"the lesson's answer is of a CPU with PyTorch 2.13, this is {torch.__version__} on {DEVICE.type}")
    lesson = (ROOT / "docs" / "lessons" / "7-compile.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```", lesson, re.MULTILINE | re.DOTALL)
    assert "The first, on a CPU with PyTorch 2.13." in lesson
    with config.patch(fx_graph_cache=True):  # the block sets it
        exec(compile(block, "docs/lessons/7-compile.md", "exec"), {})
    assert capsys.readouterr().out.split() == ["1", "0"]


def test_the_readmes_variant_agrees(scratch_table):
    (example,) = (block for block in PYTHON if "register(" in block)
    before = set(kernel_ladder.backends("gelu"))
    exec(compile(example, "README.md", "exec"), {})
    (added,) = set(kernel_ladder.backends("gelu")) - before
    variant = table._variants["gelu", "torch"][added]
    spec, ran = kernel_ladder.spec("gelu"), 0
    for case in spec.samples:
        inputs = make_inputs(case, torch.float32, DEVICE)
        if variant.unsupported(*inputs, **case.options) is None:
            result = agreement(spec, lambda *x, **o: autograd.run(variant, x, o), inputs, case.options)
            assert result.agrees, f"{case}: {result}"
            ran += 1
    assert ran


def test_every_operation_has_its_tables():
    for op in kernel_ladder.OPS:
        for page, block in (("RESULTS.md", op), (f"docs/climb/{op}.md", f"climb {op}")):
            text = (ROOT / page).read_text()
            assert f"<!-- results:begin {block} -->" in text
            assert f"<!-- results:end {block} -->" in text


def test_every_table_is_as_the_rows_make_it(capsys):
    status = environment._output("git", "status", "--porcelain", "--", "bench/results")  # None without git
    if status is None or status:
        pytest.skip("bench/results holds rows that are not committed, or there is no git to ask")
    assert readme.main(["--check"]) == 0, capsys.readouterr().err
    assert readme.main(["--check", "--folders"]) == 0, capsys.readouterr().err


def test_every_rung_has_a_card_and_every_operation_lab_notes():
    for op in kernel_ladder.OPS:
        page = (ROOT / "docs" / "climb" / f"{op}.md").read_text()
        headings = re.findall(r"^## (.*)$", page, re.MULTILINE)
        steps = [variant.name for variant in table.variants(op) if variant.level != "torch"]
        assert steps
        for step in steps:
            assert step in headings, f"docs/climb/{op}.md has no card for {step}"
        notes = (ROOT / "docs" / "lab-notes" / f"{op}.md").read_text()
        assert "| tried | expected | got | why |" in notes or "Nothing was tried" in notes


def test_every_environment_variable_is_explained():
    read = set()
    for folder in ("kernel_ladder", "_build", *table.LEVELS.values()):
        for path in (ROOT / folder).rglob("*.py"):
            read |= set(re.findall(r"\bKERNEL_LADDER_[A-Z]+\b", path.read_text()))
    assert read
    for name in read:
        assert f"`{name}`" in ENVIRONMENT, f"docs/environment.md does not explain {name}"


def test_every_file_of_tests_is_in_the_table():
    table_ = (ROOT / "CONTRIBUTING.md").read_text()
    for path in (ROOT / "tests").rglob("test_*.py"):
        assert f"`{path.name}`" in table_, f"CONTRIBUTING.md does not say what {path.name} holds"


def test_commands_of_the_pages_name_what_exists():
    pages = {page: page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]}
    started = {(page, name) for page, text in pages.items() for name in re.findall(r"exercise start (\w+)", text)}
    assert len(started) > 10
    for page, name in started:
        assert name in {each.name for each in EXERCISES}, f"{page} starts the exercise {name}"
    profiled = re.compile(r"python -m bench profile (\w+) --backend ([\w.,]+)")
    inspected = re.compile(r"python -m kernel_ladder inspect (\w+) --backend ([\w.,]+)")
    for page, text in pages.items():
        for op, backends in profiled.findall(text) + inspected.findall(text):
            assert op in kernel_ladder.OPS, f"{page}: {op}"
            for level, _, rung in (backend.partition(".") for backend in backends.split(",")):
                assert level in table.LEVELS, f"{page}: {op} {level}"
                assert not rung or rung in ladder(op, level), f"{page}: {op} {level}.{rung}"


def test_exercises_are_in_their_page():
    page = (ROOT / "docs" / "exercises.md").read_text()
    for each in EXERCISES:
        assert f"| `{each.name}` | {each.difficulty} |" in page
        assert f"| {each.op} `{each.rung}` |" in page


def test_lessons_are_read_in_one_order():
    lessons = sorted((ROOT / "docs" / "lessons").glob("[1-8]-*.md"))
    listed = re.findall(r"- lessons/([1-8]-\w+\.md)", (ROOT / "mkdocs.yml").read_text())
    tabled = re.findall(r"\]\(([1-8]-\w+\.md)\)", (ROOT / "docs" / "lessons" / "index.md").read_text())
    assert listed == tabled == [page.name for page in lessons]
    for page, after in zip(lessons, [*(f"({each.name})" for each in lessons[1:]), "(../exercises.md)"], strict=True):
        last = page.read_text().rstrip().splitlines()[-1]
        assert last.startswith("Next: ")
        assert after in last, page


def test_a_term_in_italics_is_in_the_glossary():
    text = (ROOT / "docs" / "glossary.md").read_text().lower()
    terms = {part for bold in re.findall(r"\*\*(.+?)\*\*", text) for part in re.split(r"[,()] *| and ", bold)}
    pages = [ROOT / "docs" / "primer.md", *(ROOT / "docs" / "lessons").glob("*.md")]
    found = 0
    for page in pages:
        prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for term in re.findall(r"(?<!\*)\*([^*\n.]+)\*(?!\*)", prose):
            word = term.lower().strip()
            assert {word, word.removesuffix("s"), word.removesuffix("es")} & {t.strip() for t in terms}, (
                f"{page}: {term}"
            )
            found += 1
    assert found > 40


def test_pages_that_the_readme_names_stand():
    named = re.findall(r"`(docs/[\w/-]+(?:\.md|/))`", README)
    assert len(named) > 10
    for name in named:
        assert (ROOT / name).exists(), f"README.md names {name}"
    assert len(README.splitlines()) <= 250


def test_links_to_files_stand():
    for page in ("README.md", "CONTRIBUTING.md", "docs/extending.md", "docs/measuring.md"):
        for name in re.findall(r"`((?:kernel_ladder|torch_ref|tests|_build)/[\w/]+\.py)`", (ROOT / page).read_text()):
            assert (ROOT / name).exists(), f"{page} names {name}"
