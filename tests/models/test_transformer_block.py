"""A transformer block of this package's calls, at each level, in the ways in which models use it."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from kernel_ladder import table
from kernel_ladder.errors import UnsupportedError

from ..conftest import DEVICE, captured, needs_gpu
from .transformer_block import SIZE, block, check, compiled, hidden, parameters, results

ROOT = Path(__file__).resolve().parents[2]
BACKENDS = ("auto", *table.LEVELS)
OPS = ("rms_norm", "linear", "attention", "swiglu")

#: How often a block is compiled for any number of sequence lengths: once for the first, once for any other.
COMPILATIONS = 2


pytestmark = pytest.mark.slow


@pytest.fixture(params=BACKENDS)
def backend(request) -> str:
    level = request.param
    if level != "auto":
        for op in OPS:
            if (reason := table.unavailable(op, level)) is not None:
                pytest.skip(reason)
    return level


@pytest.fixture
def eager(backend) -> str:
    """A backend that is also called outside of torch.compile: on a CPU its own compiler takes minutes for a block."""
    if backend == "compile" and DEVICE.type == "cpu":
        pytest.skip("each call is a compilation of its own, by a C++ compiler")
    return backend


def run(backend: str):
    return lambda x, weights: block(x, weights, SIZE.heads, backend)


def test_compiled_in_a_fresh_process(backend):
    """The first call is inside torch.compile, no warning is given, and lengths change without more compilations."""
    found = subprocess.run(
        [sys.executable, "-m", "tests.models.transformer_block", backend],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    lines = found.stdout.splitlines()
    assert f"compilations {COMPILATIONS}" in lines
    assert not [line for line in lines if line.startswith("warning")]
    assert "Warning" not in found.stderr, found.stderr


def test_every_length_may_change_from_the_first_on(backend):
    count, weights = [0], parameters(SIZE, SIZE.dtype)
    torch._dynamo.reset()
    function = compiled(SIZE, backend, count, dynamic=True)
    for length in SIZE.lengths[:3]:
        found = results(function, hidden(SIZE, length, SIZE.dtype), weights)
        check(SIZE, length, found, weights, SIZE.dtype)
    assert count[0] <= COMPILATIONS


EAGER_OR_COMPILED = pytest.mark.parametrize("inside", [False, True], ids=["eager", "compiled"])


def function_of(backend, inside):
    """The block, as it is or compiled."""
    torch._dynamo.reset()
    return compiled(SIZE, backend, [0]) if inside else run(backend)


@EAGER_OR_COMPILED
def test_checkpointed(eager, inside):
    weights, length = parameters(SIZE, SIZE.dtype), SIZE.lengths[0]
    torch._dynamo.reset()

    def function(x, weights):
        return checkpoint(run(eager), x, weights, use_reentrant=False)

    if inside:
        function = torch.compile(function, fullgraph=True, backend="inductor" if DEVICE.type == "cuda" else "aot_eager")
    check(SIZE, length, results(function, hidden(SIZE, length, SIZE.dtype), weights), weights, SIZE.dtype)


def test_inference_and_then_training(eager):
    weights, length = parameters(SIZE, SIZE.dtype), SIZE.lengths[0]
    x = hidden(SIZE, length, SIZE.dtype)
    torch._dynamo.reset()
    count = [0]
    function = compiled(SIZE, eager, count)
    with torch.inference_mode():
        alone = function(x, weights).clone()
        plain = run(eager)(x, weights).clone()
    for each in (function, run(eager)):
        found = results(each, x, weights)
        check(SIZE, length, found, weights, SIZE.dtype)
        tolerance = 8 * torch.finfo(SIZE.dtype).eps * found[0].abs().max().item()
        for output in (alone, plain):
            torch.testing.assert_close(output, found[0], rtol=0, atol=tolerance)


@EAGER_OR_COMPILED
def test_from_two_threads(eager, inside):
    length, expected = SIZE.lengths[0], parameters(SIZE, SIZE.dtype)
    function = function_of(eager, inside)

    def train(_):
        weights = parameters(SIZE, SIZE.dtype)
        return results(function, hidden(SIZE, length, SIZE.dtype), weights)

    with ThreadPoolExecutor(2) as threads:
        for found in threads.map(train, range(2)):
            check(SIZE, length, found, expected, SIZE.dtype)


@needs_gpu
@EAGER_OR_COMPILED
def test_on_a_side_stream(eager, inside):
    function = function_of(eager, inside)
    weights, length = parameters(SIZE, SIZE.dtype), SIZE.lengths[0]
    x, stream = hidden(SIZE, length, SIZE.dtype), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = results(function, x, weights)
    torch.cuda.current_stream().wait_stream(stream)
    check(SIZE, length, found, weights, SIZE.dtype)


@needs_gpu
@EAGER_OR_COMPILED
def test_in_a_cuda_graph(eager, inside):
    """Captured with its backward pass, and replayed on other numbers."""
    function = function_of(eager, inside)
    weights, length = parameters(SIZE, SIZE.dtype), SIZE.lengths[0]
    x = hidden(SIZE, length, SIZE.dtype)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        results(function, x, weights)  # what is tuned, compiled and allocated once
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    if eager == "xla":
        with pytest.raises(UnsupportedError, match="which a CUDA graph cannot capture"), captured(graph):
            results(function, x, weights)
        return
    with captured(graph):
        found = results(function, x, weights)
    for tensor in found:
        tensor.fill_(torch.nan)
    graph.replay()
    check(SIZE, length, found, weights, SIZE.dtype)
