"""Snippets of docs/models.md, docs/distributed.md and docs/exercises.md run, and rungs that pages name are there."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import kernel_ladder
from kernel_ladder import table
from kernel_ladder.exercises import template
from kernel_ladder.exercises.catalog import named

from ..conftest import needs_extension

pytestmark = pytest.mark.xdist_group("transformers")  # its import takes seconds in each process

ROOT = Path(__file__).resolve().parents[2]
#: A snippet runs on a CPU: what it names of a GPU, and what stands in its place.
ON_A_CPU = (
    (r'(autocast|init_device_mesh)\("cuda"', r'\1("cpu"'),
    (r'(backend=|use\()"(?:cuda|triton|auto)"', r'\1"torch"'),
)


def snippets(page: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text()
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def run(snippet: str, page: str, names: dict) -> dict:
    for pattern, instead in ON_A_CPU:
        snippet = re.sub(pattern, instead, snippet)
    exec(compile(snippet, f"docs/{page}", "exec"), names)
    return names


def of_page(page: str) -> list:
    return [pytest.param(snippet, id=str(i)) for i, snippet in enumerate(snippets(page))]


@pytest.mark.parametrize("snippet", of_page("models.md"))
def test_models(snippet, tmp_path, capsys):
    names = {"torch": torch, "kernel_ladder": kernel_ladder}
    if "register_flash_attention" in snippet:
        level = next((each for each in ("cuda", "triton") if table.unavailable("attention", each) is None), None)
        if level is None:
            pytest.skip("neither cuda nor triton is available")
        snippet = snippet.replace('("cuda")', f'("{level}")')
    if "model" in snippet.replace("kernel_ladder.models", ""):
        tf = pytest.importorskip("transformers", reason="transformers is not installed")
        from tests.models.families import make

        ids = torch.arange(1, 9)[None]
        names |= {"model": make("llama"), "inputs": {"input_ids": ids, "labels": ids}, "checkpoint": tmp_path}
        names["AutoModelForCausalLM"] = tf.AutoModelForCausalLM
        if "checkpoint" in snippet:
            names["model"].save_pretrained(tmp_path)
    found = run(snippet, "models.md", names)
    if "report" in found:
        assert "replaced" in capsys.readouterr().out
    if "loss" in found:
        assert found["loss"].isfinite()
    if "cache" in found:
        assert found["y"].shape == (2, 1, 64)


@pytest.fixture
def alone(tmp_path):
    """A process group of this process, and no more."""
    assert not dist.is_initialized()
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("snippet", of_page("distributed.md"))
def test_distributed(snippet, alone):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.manual_seed(0)
    names = {
        "torch": torch, "kernel_ladder": kernel_ladder, "init_device_mesh": init_device_mesh, "Shard": Shard,
        "Replicate": Replicate, "distribute_tensor": distribute_tensor,
        "x": torch.randn(8, 16), "weight": torch.randn(24, 16), "up": torch.randn(32, 16), "down": torch.randn(16, 32),
        "cu_seqlens": torch.tensor([0, 3, 8], dtype=torch.int32),
    }  # fmt: skip
    packed = "cu_seqlens" in snippet
    names |= {name: torch.randn(*((8, 2, 16) if packed else (1, 2, 8, 16))) for name in "qkv"}
    given = dict(names)
    found = run(snippet, "distributed.md", names)
    y = found["y"]
    if "distribute_tensor" in snippet:
        assert y.placements == (Shard(dim=1),)
        expected = kernel_ladder.linear(given["x"], given["weight"], activation="gelu", backend="torch")
        y = y.full_tensor()
    elif "all_gather_matmul" in snippet:
        expected = given["x"] @ given["up"].mT @ given["down"].mT
    elif packed:
        inputs = [given[name] for name in "qkv"]
        expected = kernel_ladder.attention_varlen(*inputs, *2 * [given["cu_seqlens"]], is_causal=True, backend="torch")
    else:
        expected = kernel_ladder.attention(*(given[name] for name in "qkv"), is_causal=True, backend="torch")
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)


def test_the_gap_of_the_first_exercise_is_as_its_page_shows_it():
    (shown,) = snippets("exercises.md")
    assert shown in template.template(named("add"))


#: A rung in backticks, as `cuda.vectorized`. `torch.sum` is a function of PyTorch.
RUNG = re.compile(rf"`((?:{'|'.join(table.LEVELS)})\.[a-z]\w*)`")


@needs_extension
def test_rungs_that_pages_name_are_in_the_table():
    known = {variant.name for op in kernel_ladder.OPS for variant in table.variants(op)}
    missing, right = set(), set()
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for name in RUNG.findall(page.read_text()):
            if name in known:
                right.add(name)
            elif not hasattr(torch, name.removeprefix("torch.")):
                missing.add((os.fspath(page.relative_to(ROOT)), name))
    assert len(right) > 40, "the pattern finds rungs"
    assert not missing, sorted(missing)
