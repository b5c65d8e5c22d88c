"""Peers: fakes of every kind pass through a sweep; the real ones agree where they are installed and there is a GPU."""

from __future__ import annotations

import argparse
import io
import re
from contextlib import redirect_stderr, redirect_stdout
from importlib import metadata

import pytest
import torch
from rich.console import Console

import kernel_ladder
from bench import __main__ as command_line
from bench import peers
from bench.__main__ import main
from bench.measure import correctness
from bench.rows import order, store
from bench.rows.store import Row
from bench.show import pictures, readme
from bench.show import table as bench_table
from bench.show.roofline import operations
from kernel_ladder import autograd, table
from kernel_ladder.spec import Case
from kernel_ladder.testing.agreement import evaluate
from kernel_ladder.testing.samples import make_inputs

from ..conftest import DEVICE, needs_gpu, sweeping_small_cases

#: Installed wherever the tests run, so that a fake has a version.
INSTALLED = "pytest>=1"


def _raising(error: Exception):
    def raise_it(*inputs, **options):
        raise error

    return raise_it


class _Overwriting(torch.autograd.Function):
    """Its backward writes over the input that it saved, unseen by autograd, as a kernel does."""

    @staticmethod
    def forward(ctx, input, approximate):
        ctx.save_for_backward(input)
        ctx.approximate = approximate
        return torch.nn.functional.gelu(input, approximate=approximate)

    @staticmethod
    def backward(ctx, grad):
        (input,) = ctx.saved_tensors
        found = torch.ops.aten.gelu_backward(grad, input, approximate=ctx.approximate)
        input.data.copy_(found)
        return found, None


def _fake(name, make, requirement=INSTALLED, **adapter) -> peers.Peer:
    peer = peers.Peer(name, requirement, None)
    peer.covers("gelu", **adapter)(make)
    return peer


@pytest.fixture(scope="module")
def made() -> list[str]:
    """Which fakes were asked for their call, once for each time."""
    return []


@pytest.fixture(scope="module")
def fakes(made) -> dict[str, peers.Peer]:
    def making(name, call):
        def make():
            made.append(name)
            return call

        return make

    coloured = RuntimeError("\x1b[91mno such kernel\x1b[0m\nand a long trace")
    all_of_them = [
        _fake("right", making("right", lambda input, **options: torch.nn.functional.gelu(input, **options))),
        _fake(
            "overwriting", making("overwriting", lambda input, *, approximate: _Overwriting.apply(input, approximate))
        ),
        _fake("wrong", making("wrong", lambda input, **options: input * 0.5)),
        _fake("raising", making("raising", _raising(coloured))),
        _fake("absent", making("absent", None), requirement="no-such-package[extra]==1.2"),
        _fake("broken", _raising(OSError("libfast.so.1 is missing"))),
        _fake("narrow", making("narrow", None), dtypes=[torch.float64]),
        _fake("picky", making("picky", None), unsupported=lambda *inputs, **options: "only on Sundays"),
        _fake("unasked", making("unasked", None)),
    ]
    return {peer.name: peer for peer in all_of_them}


@pytest.fixture(scope="module")
def swept(fakes, tmp_path_factory):
    """Of one sweep with fake peers: the file of rows, the exit code, what was printed and what went to stderr."""
    path = tmp_path_factory.mktemp("peers") / "results" / "here.jsonl"
    names = ",".join(name for name in fakes if name != "unasked")
    argv = ["--op", "gelu", "--backend", "torch.naive", "--dtype", "float32", "--quick", "--no-ceilings"]
    argv += ["--time", "0.05"]
    out, err = io.StringIO(), io.StringIO()
    with sweeping_small_cases(), pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(peers, "PEERS", fakes)
        code = main([*argv, "--peers", names, "--no-pictures", "--output", str(path)])
    return path, code, out.getvalue(), err.getvalue()


def _rows(swept, name: str) -> list[Row]:
    found = [row for row in store.read(swept[0]) if row.backend == f"peer.{name}"]
    assert {row.pass_ for row in found} == {"forward", "backward"}
    assert {row.level for row in found} == {"peer"}
    return found


def test_a_right_peer_is_timed_as_ours_are(swept, made):
    for row in _rows(swept, "right"):
        assert row.us > 0
        assert row.speedup > 0
        assert row.host_us is None if row.pass_ == "backward" else row.host_us > 0  # a quick sweep
        assert row.error <= row.bound
        assert row.compile_s is not None
        assert row.peer_version == metadata.version("pytest")
        (baseline,) = (
            r
            for r in store.read(swept[0])
            if r.backend == "torch.builtin" and (r.pass_, r.shape) == (row.pass_, row.shape)
        )
        assert row.rounds > 0  # as many as the baseline's, unless noise gave one of them rounds of its own
        assert baseline.rounds > 0
    assert made.count("right") == 1, "a call is made once, whatever the number of cases"


def test_a_backward_that_overwrites_what_it_saved_is_right_once_and_timed(swept):
    for row in _rows(swept, "overwriting"):
        assert row.wrong is None
        assert row.us > 0


def test_a_wrong_peer_gets_no_time(swept):
    for row in _rows(swept, "wrong"):
        assert row.us is None
        assert row.error > row.bound
        assert "largest deviation" in row.wrong


def test_a_peer_that_raises_says_what(swept):
    assert {(row.us, row.wrong) for row in _rows(swept, "raising")} == {
        (None, "raised RuntimeError: no such kernel"),
    }


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("absent", "not installed; `pip install 'no-such-package[extra]==1.2'` gets it"),
        ("broken", f"broken {metadata.version('pytest')} cannot be imported: OSError: libfast.so.1 is missing"),
        ("narrow", "narrow takes float64 here, got float32"),
        ("picky", "only on Sundays"),
    ],
)
def test_a_peer_that_cannot_run_says_why(swept, made, name, reason):
    assert {(row.us, row.wrong, row.unsupported) for row in _rows(swept, name)} == {(None, None, reason)}
    if name in ("absent", "narrow"):
        assert name not in made, "nothing is imported to be refused"


def test_only_the_named_are_measured(swept, made):
    assert "peer.unasked" not in {row.backend for row in store.read(swept[0])}
    assert "unasked" not in made


def test_failures_of_peers_cost_ours_nothing(swept):
    path, code, out, err = swept
    assert code == 0, "a peer's failure is not this project's"
    ours = [row for row in store.read(path) if row.level == "torch"]
    assert len(ours) == 2 * len(_rows(swept, "right"))
    assert all(row.us > 0 and row.peer_version is None for row in ours)
    announced = "peer absent: not installed; `pip install 'no-such-package[extra]==1.2'` gets it"
    assert out.count(announced) == 1
    assert out.index(announced) < out.index("peer.wrong")
    for name in ("wrong", "raising"):
        assert f"WRONG: gelu peer.{name} forward float32" in err


def test_tables_and_pictures_show_peers(swept, fakes):
    path = swept[0]
    found = operations(store.latest(store.read(path)))
    console = Console(record=True, width=300)
    bench_table.show(found, console)
    text = console.export_text()
    assert f"version {metadata.version('pytest')}" in text
    for row in found:
        assert row.backend in text
        assert row.unsupported is None or row.unsupported in text
    (picture,) = pictures.draw(path)
    assert b"peer.right" in re.sub(rb"<!--(.*?)-->", rb"\1", picture.read_bytes())
    # Peers are no climb: none is paler.
    both = [pictures.look(backend, ["peer.right", "peer.wrong"]) for backend in ("peer.right", "peer.wrong")]
    assert both[0][0] == both[1][0]
    assert both[0][1] != both[1][1]
    block = "<!-- results:begin {0} -->\n<!-- results:end {0} -->\n"
    page = readme.renew("".join(map(block.format, ("machine", "summary", "gelu"))), {path: found}, path.parent)
    assert f"right {metadata.version('pytest')}" in page
    assert "torch.naive None" not in page
    for row in found:
        assert f"`{row.backend}`" in page
        assert row.unsupported is None or row.unsupported in page


def test_peers_stand_after_every_level():
    def row(backend: str) -> Row:
        return Row("softmax", backend, backend.partition(".")[0], "forward", "float32", "16384x1024")

    climb = [v.name for v in table.variants("softmax")]
    expected = [*climb, "peer.liger", "peer.quack", "peer.max-autotune", "peer.of-tomorrow"]
    shuffled = [*expected[::2][::-1], *expected[1::2]]
    assert [r.backend for r in order.by_climb(map(row, shuffled))] == expected


def test_what_peers_cover_is_in_the_table():
    for name in peers.known():
        assert peers.ops_of(name)
        assert set(peers.ops_of(name)) <= set(kernel_ladder.OPS)
    for backends in peers.IN_TABLE.values():
        for op, backend in backends.items():
            assert backend in kernel_ladder.backends(op)


def test_the_listing(monkeypatch, fakes, capsys):
    monkeypatch.setattr(peers, "PEERS", fakes)
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["peers"]) == 0
    lines = {line.split("│")[1].strip(): line for line in capsys.readouterr().out.splitlines() if "│" in line}
    assert set(lines) == {*fakes, *peers.IN_TABLE}
    assert metadata.version("pytest") in lines["right"]
    assert "`pip install 'no-such-package[extra]==1.2'`" in lines["absent"]
    assert "torch.cudnn" in lines["cudnn"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--peers", "ligre"], "unknown peer 'ligre'; did you mean 'liger'? Known are liger, quack, quack-gemm"),
        (["--op", "gelu", "--peers", "flash-attn-4"], "'flash-attn-4' covers attention, attention_varlen, not gelu"),
        (["--op", "gelu", "--peers", "max-autotune,cudnn"], "peer 'cudnn' covers attention, not gelu"),
        (["--peers", ""], "--peers: no name in ''"),
    ],
    ids=["unknown", "other-operation", "other-operation-in-table", "empty"],
)
def test_bad_names(argv, message, capsys):
    assert main(argv) == 2
    assert message in capsys.readouterr().err


def _selection(*argv: str):
    return command_line._selection(command_line._sweep_parser().parse_args(argv))


def test_choosing():
    assert _selection("--op", "gelu").peers == []
    assert _selection("--peers").peers == peers.known()
    assert _selection("--peers", "peer.quack,liger", "--quick").peers == ["quack", "liger"]


def test_libraries_in_the_table_are_measured_under_that_name_alone():
    selection = _selection("--op", "attention", "--backend", "triton", "--peers", "cudnn")
    assert list(selection.backends) == ["triton", "torch.cudnn"]
    assert peers.variants("attention", selection.peers) == []
    assert _selection("--op", "attention", "--peers", "cudnn").backends is None


def _reason(peer: peers.Peer, op: str, *shapes: tuple[int, ...], **options) -> str | None:
    return peer.adapters[op].unsupported(*(torch.empty(shape, device="meta") for shape in shapes), **options)


def test_reasons_of_row_kernels():
    for peer in (peers.LIGER, peers.QUACK):
        assert _reason(peer, "softmax", (4, 8), dim=-1) is None
        assert _reason(peer, "softmax", (4, 8), dim=1) is None
        assert "dim=0" in _reason(peer, "softmax", (4, 8), dim=0)
        assert "3 dimensions" in _reason(peer, "softmax", (2, 4, 8), dim=-1)
    assert "at most 65536" in _reason(peers.LIGER, "softmax", (4, 65537), dim=-1)


def test_reasons_of_losses():
    plain = {"ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0, "z_loss": 0.0}
    for peer in (peers.LIGER, peers.QUACK):
        assert _reason(peer, "cross_entropy", (4, 8), (4,), **plain) is None
        assert "3 dimensions" in _reason(peer, "cross_entropy", (4, 8, 2), (4, 2), **plain)
    assert "neither" in _reason(peers.QUACK, "cross_entropy", (4, 8), (4,), **{**plain, "z_loss": 0.1})
    logits = torch.empty(4, 8, device="meta", requires_grad=True)
    assert "over the logits" in peers.LIGER.adapters["cross_entropy"].unsupported(logits, logits[:, 0], **plain)


def test_reasons_of_products():
    assert _reason(peers.QUACK_GEMM, "matmul", (8, 16), (16, 24)) is None
    assert "multiples of 8" in _reason(peers.QUACK_GEMM, "matmul", (7, 16), (16, 24))
    assert "multiples of 8" in _reason(peers.QUACK_GEMM, "matmul", (8, 16), (16, 23))
    assert "3 and 2 dimensions" in _reason(peers.QUACK_GEMM, "matmul", (2, 8, 16), (16, 24))


@pytest.mark.parametrize(("capability", "largest"), [((9, 0), 256), ((10, 0), 128)], ids=["hopper", "blackwell"])
def test_reasons_of_attention(monkeypatch, capability, largest):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    def reason(q, k, causal):
        return _reason(peers.FLASH_ATTN_4, "attention", q, k, k, is_causal=causal, scale=None, enable_gqa=False)

    assert reason((1, 2, 32, 64), (1, 2, 32, 64), True) is None
    assert reason((1, 2, 16, 64), (1, 2, 32, 64), False) is None
    # Counted from the top left, as this project's mask is, it would be another operation.
    assert "bottom right" in reason((1, 2, 16, 64), (1, 2, 32, 64), True)
    assert "got 3" in reason((2, 32, 64), (2, 32, 64), False)
    assert "multiples of 8" in reason((1, 2, 32, 12), (1, 2, 32, 12), False)
    assert (reason((1, 2, 32, 256), (1, 2, 32, 256), False) is None) == (largest == 256)


def test_reasons_of_packed_sequences(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def reason(d, d_v, **options):
        shapes = (30, 4, d), (40, 2, d), (40, 2, d_v), (3,), (3,)
        return _reason(peers.FLASH_ATTN_4, "attention_varlen", *shapes, is_causal=True, scale=None, **options)

    assert reason(64, 64) is None
    assert reason(192, 128) is None
    assert "multiples of 8" in reason(60, 64)
    assert "not differentiable" in reason(64, 64, return_lse=True)


def test_reasons_of_machines(monkeypatch):
    peer = peers.Peer("fast", INSTALLED, (9, 0))
    peer.covers("gelu")(lambda: torch.nn.functional.gelu)
    x = torch.zeros(2)
    assert peer.variant("gelu").unsupported(x) == "fast needs a CUDA GPU, got tensors on cpu"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    on_a_gpu = argparse.Namespace(is_cuda=True, device="cuda:0", dtype=torch.float32)
    assert peer.variant("gelu").unsupported(on_a_gpu) == "fast needs compute capability 9.0, got 8.6"


def _attention(name: str, q: tuple[int, ...], k: tuple[int, ...], causal: bool, scale: float | None = None) -> Case:
    return Case(name, (q, k, k), {"is_causal": causal, "scale": scale, "enable_gqa": q[1] != k[1]})


def _loss(name: str, **given: object) -> Case:
    options = {"ignore_index": -100, "label_smoothing": 0.0, "z_loss": 0.0, "wide_loss": False, **given}
    return Case(name, ((130, 64), (1000, 64), (130,)), options, kinds={2: "some_classes@1"})


def _packed(name: str, of_q: list[int], of_k: list[int], causal: bool) -> Case:
    """Grouped heads of sequences at these offsets."""
    kinds = {3: "offsets:" + ",".join(map(str, of_q)), 4: "offsets:" + ",".join(map(str, of_k))}
    shapes = ((of_q[-1], 6, 128), (of_k[-1], 2, 128), (of_k[-1], 2, 128), (len(of_q),), (len(of_k),))
    options = {"max_seqlen_q": 300, "max_seqlen_k": 300, "is_causal": causal, "scale": None, "enable_gqa": True}
    return Case(name, shapes, options, kinds=kinds)


ROWS = Case("rows", ((130, 1000),), {"dim": -1})
REAL = [
    ("liger", ROWS),
    ("liger", _loss("mean", reduction="mean")),
    ("liger", _loss("smoothed", reduction="sum", label_smoothing=0.1, z_loss=1e-2)),
    ("quack", ROWS),
    ("quack", Case("long-rows", ((9, 40_000),), {"dim": -1})),
    ("quack-gemm", Case("product", ((264, 512), (512, 392)))),
    ("flash-attn-4", _attention("full", (2, 3, 200, 64), (2, 3, 200, 64), False)),
    ("flash-attn-4", _attention("causal", (2, 3, 257, 128), (2, 3, 257, 128), True)),
    ("flash-attn-4", _attention("grouped-causal", (1, 8, 384, 128), (1, 2, 384, 128), True)),
    ("flash-attn-4", _attention("fewer-queries", (2, 2, 100, 64), (2, 2, 300, 64), False)),
    ("flash-attn-4", _attention("scale", (1, 2, 256, 64), (1, 2, 256, 64), True, scale=0.3)),
    ("flash-attn-4", _packed("packed", [0, 1, 130, 430], [0, 1, 130, 430], False)),
    ("flash-attn-4", _packed("packed-causal", [0, 65, 129, 400], [0, 200, 329, 600], True)),
    ("max-autotune", ROWS),
    ("max-autotune", Case("tanh", ((130, 1000),), {"approximate": "tanh"})),
]
OF_OPTION = {
    "dim": "softmax", "is_causal": "attention", "approximate": "gelu", "ignore_index": "linear_cross_entropy",
    "max_seqlen_q": "attention_varlen", None: "matmul",
}  # fmt: skip


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize(("name", "case"), REAL, ids=[f"{name}-{case.id}" for name, case in REAL])
def test_real_peers_agree(name, case, dtype):
    """The adapter calls what it should: layouts, options and gradients are right, so that a time is a fair one."""
    peer, op = peers.PEERS[name], OF_OPTION[next(iter(case.options), None)]
    if peer.absent:
        pytest.skip(f"{name}: {peer.absent}")
    if dtype not in peer.adapters[op].dtypes:
        pytest.skip(f"{name} has no {op} in {dtype}")
    variant = peer.variant(op)
    assert variant.unsupported(*make_inputs(case, dtype, DEVICE), **case.options) is None
    expected = correctness.Expected.of(kernel_ladder.spec(op), case, dtype, DEVICE, backward=True)
    run = lambda *x, **options: autograd.run(variant, x, options)  # noqa: E731
    found = expected.check(evaluate(run, expected.inputs, case.options, expected.grad))
    assert found.agrees, str(found)
