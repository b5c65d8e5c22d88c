"""Tensors that pass to JAX and back: values, dtypes, lifetimes, what later writes do, and what is refused."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

import kernel_ladder as kl
import xla_impl
from bench.measure import timing
from kernel_ladder import gpu, table
from kernel_ladder.errors import raise_for_memory
from xla_impl import bridge, rung

from ..conftest import DEVICE, captured

pytestmark = pytest.mark.skipif(table.unavailable("gelu", "xla") is not None, reason="JAX is not installed")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_dtypes_stay(dtype):
    x = torch.randn(3, 5, device=DEVICE).to(dtype)
    assert kl.add(x, x, backend="xla").dtype is dtype
    torch.testing.assert_close(kl.add(x, x, backend="xla"), x + x, rtol=0, atol=0)


def test_float64_is_not_rounded_to_float32():
    x = torch.full((2,), 1 + 2.0**-40, dtype=torch.float64, device=DEVICE)
    assert (kl.add(x, torch.zeros_like(x), backend="xla") == x).all()


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, ::2],
        lambda x: x.t(),
        lambda x: x[:1].expand(4, -1),
        lambda x: x[1:],
        lambda x: torch._neg_view(x),
        lambda x: x[:0],
        lambda x: x[0, 0],
    ],
    ids=["strided", "transposed", "expanded", "offset", "negative", "empty", "scalar"],
)
def test_layouts(view):
    x = view(torch.randn(4, 6, device=DEVICE))
    torch.testing.assert_close(kl.gelu(x, backend="xla"), kl.gelu(x, backend="torch.naive"))


def test_later_writes_change_no_result():
    x = torch.ones(1 << 22, device=DEVICE)[1:]  # does not begin on 64 bytes: JAX copies it, and not at once
    y = kl.add(x, x, backend="xla")
    x.zero_()
    assert (y == 2).all()


def test_results_outlive_their_inputs():
    results = [kl.softmax(torch.randn(64, 512, device=DEVICE), backend="xla") for _ in range(20)]
    gc.collect()
    for y in results:
        torch.testing.assert_close(y.sum(-1), torch.ones(64, device=DEVICE))
        y.zero_()


def test_threads():
    x = torch.randn(64, 100, device=DEVICE)
    expected, found = kl.softmax(x, backend="torch"), []

    def work():
        found.extend(kl.softmax(x, backend="xla") for _ in range(10))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 40
    for y in found:
        torch.testing.assert_close(y, expected)


def test_inside_torch_compile():
    x = torch.randn(4, 64, device=DEVICE, requires_grad=True)
    function = torch.compile(lambda x: kl.gelu(x * 2, backend="xla") + 1, fullgraph=True, backend="aot_eager")
    y = function(x)
    (found,) = torch.autograd.grad(y.sum(), x)
    expected = kl.gelu(x * 2, backend="torch") + 1
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(found, torch.autograd.grad(expected.sum(), x)[0])


@pytest.mark.skipif(DEVICE.type != "cuda", reason="no CUDA GPU is visible")
def test_a_cuda_graph_is_refused():
    x, graph = torch.randn(8, device=DEVICE), torch.cuda.CUDAGraph()
    with pytest.raises(kl.UnsupportedError, match="CUDA graph"), captured(graph):
        kl.gelu(x, backend="xla")


@pytest.mark.skipif(DEVICE.type != "cuda", reason="no CUDA GPU is visible")
def test_work_of_a_side_stream_is_waited_for():
    stream = torch.cuda.Stream()
    x = torch.zeros(1 << 24, device=DEVICE)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(50):
            x += 1
        y = kl.add(x, x, backend="xla")
        x.zero_()
    torch.cuda.synchronize()
    assert (y == 100).all()


@pytest.mark.skipif(DEVICE.type != "cuda", reason="no CUDA GPU is visible")
def test_graphs_are_captured_while_jax_is_at_work():
    """As a sweep does: XLA's thread watches its stream while this thread captures."""
    x = torch.randn(1 << 22, device=DEVICE)
    with timing.side_stream(DEVICE):
        for _ in range(30):
            y = kl.gelu(x, backend="xla.jit")
            assert timing._capture(lambda: x + 1) is not None
    torch.testing.assert_close(y, kl.gelu(x, backend="torch"))


def fake_gpu(monkeypatch) -> SimpleNamespace:
    """What a rung asks of an input's device, on a machine whose JAX has a GPU."""
    monkeypatch.setattr(bridge, "platforms", lambda: frozenset(("cpu", "cuda")))
    return SimpleNamespace(device=torch.device("cuda", 0), is_cuda=True)


def test_capture_in_a_cuda_graph_is_refused_with_its_reason(monkeypatch):
    x = fake_gpu(monkeypatch)
    monkeypatch.setattr(gpu, "capturing", lambda: False)
    assert rung.unsupported(x) is None
    monkeypatch.setattr(gpu, "capturing", lambda: True)
    assert "which a CUDA graph cannot capture" in rung.unsupported(x)


def test_a_gpu_that_jax_lacks_is_refused_with_the_way_to_it(monkeypatch):
    x = fake_gpu(monkeypatch)
    monkeypatch.setattr(bridge, "platforms", lambda: frozenset(("cpu",)))
    assert "`pip install kernel_ladder[xla-cuda13]`" in rung.unsupported(x)


class Stream:
    """A stream of a GPU that is not there: its name, and what it was told to wait for."""

    def __init__(self, name: str, busy: bool = True) -> None:
        self.name, self.busy, self.waits, self.cuda_stream = name, busy, [], int(name, 36)

    def query(self) -> bool:
        return not self.busy

    def wait_stream(self, other: Stream) -> None:
        self.waits.append(other.name)

    def wait_event(self, event: list[str]) -> None:
        self.waits.append(event[-1])


def test_a_call_waits_for_every_stream_that_reads_results(monkeypatch):
    """JAX may write where a dropped result was, while another stream's kernels still read it."""
    monkeypatch.setattr(bridge, "_streams", {})
    a, b, c = Stream("a"), Stream("b"), Stream("c", busy=False)
    for current in (a, a, b, c, a):
        bridge.follow_other_streams(torch.device("cuda", 0), current)
    assert (a.waits, b.waits, sorted(c.waits)) == (["b"], ["a"], ["a", "b"])


def test_every_stream_of_jax_waits_once_for_the_current_one(monkeypatch):
    """JAX imports operands on several streams in turn. One event orders them all."""
    device, current, jax_streams = torch.device("cuda", 0), Stream("a"), {7: Stream("7"), 8: Stream("8")}
    records: list[str] = []

    class Event(list):
        def record(self, stream: Stream) -> None:
            self.append(stream.name)
            records.append(stream.name)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: jax_streams[8])
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(bridge, "_external", lambda pointer, device: jax_streams[pointer])
    monkeypatch.setattr(bridge, "_events", bridge._Events())
    for _ in range(2):
        order = bridge.Order(device)
        for stream in (7, 1, 7, -1, order.pointer):
            order.before(stream)
    assert records == ["a", "a"]
    assert [stream.waits for stream in jax_streams.values()] == [["a", "a"], ["a", "a"]]
    current.cuda_stream = 0
    assert bridge.Order(device).pointer == 1  # DLPack's name of the default stream


def test_an_operand_exports_its_own_memory_in_the_calls_order(monkeypatch):
    x, asked = torch.arange(6.0).view(2, 3), []
    operand = bridge.Operand(x, SimpleNamespace(before=asked.append))
    y = torch.from_dlpack(operand.__dlpack__(stream=7, max_version=(1, 0)))
    assert asked == [7]
    assert torch.equal(x, y)
    assert x.data_ptr() == y.data_ptr()


@pytest.mark.skipif(DEVICE.type != "cuda", reason="no CUDA GPU is visible")
def test_a_dropped_result_is_not_overwritten_while_another_stream_reads_it():
    x, zero, side = torch.ones(1 << 24, device=DEVICE), torch.zeros(1 << 24, device=DEVICE), torch.cuda.Stream()
    kl.add(zero, zero, backend="xla.jit")  # compiled before the other stream is kept busy
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = kl.add(x, x, backend="xla.jit")
        torch.cuda._sleep(1 << 28)  # a tenth of a second
        found = y.clone()
        del y
    for _ in range(4):
        kl.add(zero, zero, backend="xla.jit")
    torch.cuda.synchronize()
    assert (found == 2).all()


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (None, r"JAX is not installed; `pip install kernel_ladder\[xla\]`"),
        ("0.4.30", r"JAX 0\.4\.30 is too old; `pip install --upgrade kernel_ladder\[xla\]` installs 0\.10"),
    ],
)
def test_without_jax_the_level_is_unavailable_with_the_way_to_it(monkeypatch, found, reason):
    spec_of = xla_impl.importlib.util.find_spec
    monkeypatch.delenv("KERNEL_LADDER_REQUIRE", raising=False)
    if found is None:
        monkeypatch.setattr(xla_impl.importlib.util, "find_spec", lambda name: None if name == "jax" else spec_of(name))
    else:
        monkeypatch.setattr(xla_impl.metadata, "version", lambda name: found)
    table.forget()
    gpu.forget()
    try:
        with pytest.raises(kl.UnavailableError, match=f"gelu: backend 'xla' is unavailable: {reason}"):
            kl.gelu(torch.zeros(2), backend="xla")
        assert re.match(reason, kl.backends("gelu")["xla.jit"])
    finally:
        monkeypatch.undo()
        table.forget()
        gpu.forget()


def test_memory_that_is_short_is_pytorchs_own_error():
    short = RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes.")
    with pytest.raises(torch.OutOfMemoryError, match="RESOURCE_EXHAUSTED"):
        raise_for_memory(short)


@pytest.mark.parametrize("always", [False, True])
def test_pytorch_gives_back_memory_that_jax_lacks(monkeypatch, always):
    done = []

    def program(x):
        done.append("called")
        if always or len(done) == 1:
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1024 bytes.")
        return (x,)

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("emptied"))
    x = torch.arange(3.0)
    if always:
        with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
            bridge.run(program, (x,))
    else:
        assert torch.equal(bridge.run(program, (x,))[0], x)
    assert done == ["called", "emptied", "called"]


def test_another_seed_compiles_nothing():
    x = torch.randn(64, device=DEVICE)
    sizes = []
    for seed in (1, 2**40 + 1):
        found = kl.dropout(x, 0.5, seed=seed, backend="xla")
        assert torch.equal(found, kl.dropout(x, 0.5, seed=seed, backend="torch.naive"))
        sizes.append(rung.PROGRAMS["dropout", "xla.jit"].forward({"p": 0.5})._cache_size())
    assert sizes[0] == sizes[1] > 0


def test_jax_is_imported_by_a_call_alone():
    code = """
import os, sys, torch, kernel_ladder as kl
x = torch.zeros(3)
kl.backends("gelu"), kl.gelu(x, backend="torch")
assert "jax" not in sys.modules
kl.gelu(x, backend="xla")
assert "jax" in sys.modules and os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
