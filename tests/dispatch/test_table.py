"""The dispatch table: names mean what they say, and nothing is replaced in silence."""

from __future__ import annotations

import gc
import os
import subprocess
import threading

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import kernel_ladder
from kernel_ladder import BackendError, UnavailableError, UnsupportedError, selection, table
from kernel_ladder.selection.orders import ORDERS
from kernel_ladder.testing.samples import make_inputs

from ..conftest import DEVICE, every_variant, pytorchs_own, skip_unless_it_runs, typical_case, variant_id
from ..processes import run_python


def resolve(op: str, backend: str | None, dtype: torch.dtype = torch.float32):
    case = typical_case(op)
    return selection.resolve(op, backend, make_inputs(case, dtype, DEVICE), case.options)


def steps(*names: str, **unsupported):
    """Register variants ``torch.<name>`` of gelu, each with its reason to refuse, if any."""
    for name in names:
        reason = unsupported.get(name)
        table.register(
            "gelu",
            f"torch.{name}",
            forward=lambda input, **options: (input, ()),
            unsupported=lambda *inputs, reason=reason, **options: reason,
        )


@pytest.fixture(autouse=True)
def no_choice_from_outside(monkeypatch):
    monkeypatch.delenv(table.ENV_BACKEND, raising=False)


@pytest.mark.parametrize("variant", every_variant(), ids=variant_id)
def test_a_variants_name_means_that_variant(variant):
    case = typical_case(variant.op)
    inputs = make_inputs(case, torch.float32, DEVICE)
    skip_unless_it_runs(variant, inputs, case.options)
    assert selection.resolve(variant.op, variant.name, inputs, case.options) is variant


@pytest.mark.parametrize("op", kernel_ladder.OPS)
def test_a_levels_name_means_its_last_supported_variant(op, scratch_table):
    assert resolve(op, "torch") in table.variants(op, "torch")
    if op == "gelu":
        steps("early", "late", "latest", latest="not these")
        assert resolve("gelu", "torch").name == "torch.late"


@pytest.mark.parametrize("op", kernel_ladder.OPS)
def test_none_is_auto_and_auto_is_the_builtin_on_the_cpu(op):
    assert resolve(op, None) is resolve(op, "auto")
    if DEVICE.type == "cpu":
        assert resolve(op, None).name == pytorchs_own(op)


def test_every_name_in_auto_exists():
    for op in kernel_ladder.OPS:
        names = {*table.LEVELS, *(v.name for v in table.variants(op))}
        for name in ORDERS[op]:
            # Without the extension its variants are unknown, and so are those of a level that failed to import.
            assert name in names or not table.variants(op, name.partition(".")[0]), name


def test_auto_skips_what_does_not_support_the_inputs():
    if DEVICE.type == "cpu":
        pytest.skip("auto chooses among levels on a GPU only")
    assert resolve("gelu", "auto").level == ("triton" if table.unavailable("gelu", "cuda") else "cuda")
    assert resolve("gelu", "auto", torch.float64).name == "torch.builtin"


def test_use_nests_and_ends_with_its_block():
    with kernel_ladder.use("torch.naive"):
        assert resolve("gelu", None).name == "torch.naive"
        with kernel_ladder.use("torch.builtin"):
            assert resolve("gelu", None).name == "torch.builtin"
            assert resolve("gelu", "torch.naive").name == "torch.naive", "a call's own backend comes first"
        assert resolve("gelu", None).name == "torch.naive"
        with pytest.raises(KeyError), kernel_ladder.use("torch.builtin"):
            raise KeyError
        assert resolve("gelu", None).name == "torch.naive", "an exception must not leave a choice behind"
    assert resolve("gelu", None) is resolve("gelu", "auto")


def test_use_holds_for_its_thread_only():
    seen = []
    with kernel_ladder.use("torch.naive"):
        thread = threading.Thread(target=lambda: seen.append(resolve("gelu", None)))
        thread.start()
        thread.join()
    assert seen == [resolve("gelu", "auto")]


def test_the_environment_chooses_where_nothing_else_does(monkeypatch):
    monkeypatch.setenv(table.ENV_BACKEND, "torch.naive")
    assert resolve("gelu", None).name == "torch.naive"
    with kernel_ladder.use("torch.builtin"):
        assert resolve("gelu", None).name == "torch.builtin"
    monkeypatch.setenv(table.ENV_BACKEND, "")
    assert resolve("gelu", None) is resolve("gelu", "auto")
    monkeypatch.setenv(table.ENV_BACKEND, "tritn")
    with pytest.raises(BackendError, match="'tritn'; did you mean 'triton'"):
        resolve("gelu", None)


@pytest.mark.parametrize(
    ("backend", "near"),
    [
        ("cud", "cuda"),
        ("torch.naiv", "torch.naive"),
        ("Triton", "triton"),
        ("auto.x", "auto"),
        ("torch.", "torch"),
        ("torch.naive.", "torch.naive"),
    ],
)
@pytest.mark.parametrize("op", kernel_ladder.OPS)
def test_an_unknown_backend_names_its_neighbours(op, backend, near):
    with pytest.raises(BackendError, match=f"{op}: unknown `backend` '{backend}'; did you mean .*'{near}'"):
        resolve(op, backend)
    with pytest.raises(BackendError, match=f"{op}: unknown `backend` '{backend}'; did you mean .*'{near}'"):
        table.named(op, backend)


def test_an_unknown_backend_of_use_is_refused_at_once():
    with pytest.raises(BackendError, match=r"use: unknown `backend` 'torch\.naif'"), kernel_ladder.use("torch.naif"):
        pytest.fail("entered")
    with pytest.raises(BackendError, match=r"use: unknown `backend` 'torch\.'"), kernel_ladder.use("torch."):
        pytest.fail("entered")
    with pytest.raises(TypeError, match="`backend` must be a str, got NoneType"), kernel_ladder.use(None):
        pytest.fail("entered")


def test_use_alone_chooses_nothing_and_says_so():
    with pytest.warns(RuntimeWarning, match=r"use\('torch\.naive'\) alone .* `with kernel_ladder\.use\(") as warned:
        kernel_ladder.use("torch.naive")
    assert table.ENV_BACKEND in str(warned[0].message)
    assert warned[0].filename == __file__, "the warning is for the line that dropped it"
    assert resolve("gelu", None) is resolve("gelu", "auto")


def test_use_is_silent_wherever_it_chooses(recwarn):
    @kernel_ladder.use("torch.naive")
    def decorated(depth: int = 2) -> str:
        with kernel_ladder.use("torch.builtin"):
            inner = decorated(depth - 1) if depth else "torch.naive"
        return inner if resolve("gelu", None).name == inner else "lost"

    with kernel_ladder.use("torch"):
        pass
    block = kernel_ladder.use("torch.naive")
    for _ in range(2):
        with block:
            assert resolve("gelu", None).name == "torch.naive"
            with pytest.raises(RuntimeError, match=r"entered already; call use\('torch\.naive'\) anew"), block:
                pytest.fail("entered")
        assert resolve("gelu", None) is resolve("gelu", "auto")
    assert decorated() == "torch.naive"
    for wrong in ("torch.naif", 3):
        with pytest.raises((BackendError, TypeError)):
            kernel_ladder.use(wrong)
    del block
    gc.collect()
    assert not recwarn.list


def test_a_decorated_function_in_several_threads():
    @kernel_ladder.use("torch.naive")
    def name(together: threading.Barrier) -> str:
        together.wait()
        found = resolve("gelu", None).name
        together.wait()
        return found

    barrier, seen = threading.Barrier(4), []
    threads = [threading.Thread(target=lambda: seen.append(name(barrier))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == ["torch.naive"] * 4


def test_a_backend_that_is_not_a_string():
    with pytest.raises(TypeError, match="gelu: argument `backend` must be a str or None, got int"):
        kernel_ladder.gelu(torch.zeros(2), backend=3)


def test_an_unknown_operation():
    for call in (kernel_ladder.spec, kernel_ladder.backends, kernel_ladder.variants):
        with pytest.raises(BackendError, match="unknown operation 'gel'; did you mean 'gelu'"):
            call("gel")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kernel_ladder.backends(3), "unknown operation 3; Operations are gelu, "),
        (lambda: kernel_ladder.variants("gelu", "tritn"), "gelu: unknown level 'tritn'; levels are torch, "),
        (lambda: table.register("softmx", "triton.mine", forward=None), "unknown operation 'softmx'; did you mean"),
    ],
    ids=["no-name", "level", "register"],
)
def test_what_the_table_does_not_have_is_named(call, message):
    with pytest.raises(BackendError, match=message):
        call()


@pytest.mark.parametrize("op", ["gelu", "softmax", "sum"])
def test_tensors_that_hold_others_are_pytorchs(op):
    case = typical_case(op, most=20_000)
    (x,) = make_inputs(case, torch.float32, torch.device("cpu"))
    held, function = TwoTensor(x, x), getattr(kernel_ladder, op)
    for backend in ("auto", "torch", "torch.naive"):
        found = function(held, **case.options, backend=backend)
        assert isinstance(found, TwoTensor)
        torch.testing.assert_close(found.a, function(x, **case.options, backend="torch"))
    for backend in ("triton", "xla", "cuda"):
        with pytest.raises(UnsupportedError, match=f"{backend} takes tensors that are memory of their own, got a TwoT"):
            function(held, **case.options, backend=backend)


def test_unsupported_gives_the_variants_own_sentence(scratch_table):
    steps("odd", odd="sizes must be even")
    with pytest.raises(UnsupportedError, match=r"gelu: torch\.odd does not support this call: sizes must be even"):
        resolve("gelu", "torch.odd")


def test_a_level_without_a_supporting_variant_gives_every_reason(scratch_table):
    climb = table._variants["gelu", "torch"]
    climb.clear()
    steps("one", "two", one="first reason", two="second reason")
    with pytest.raises(UnsupportedError, match=r"torch\.two: second reason; torch\.one: first reason"):
        resolve("gelu", "torch")


def test_unavailable_gives_the_levels_reason(monkeypatch):
    kernel_ladder.backends("gelu")
    monkeypatch.setitem(table._unavailable, ("gelu", "triton"), "the moon is full")
    for backend in ("triton", "triton.fused"):
        with pytest.raises(UnavailableError, match=f"gelu: backend '{backend}' is unavailable: the moon is full"):
            resolve("gelu", backend)
    assert kernel_ladder.backends("gelu")["triton.fused"] == "the moon is full"


def test_a_level_without_variants_takes_any_name_but_half_of_one(monkeypatch):
    """What its variants would be called is unknown where its extension was not built."""
    kernel_ladder.backends("gelu")
    for op in kernel_ladder.OPS:
        table.variants(op)
        monkeypatch.setitem(table._variants, (op, "cuda"), {})
    monkeypatch.setitem(table._unavailable, ("gelu", "cuda"), "it was not built")
    with kernel_ladder.use("cuda.any"), pytest.raises(UnavailableError, match="it was not built"):
        resolve("gelu", None)
    with pytest.raises(BackendError, match=r"unknown `backend` 'cuda\.'"):
        resolve("gelu", "cuda.")
    with pytest.raises(BackendError, match=r"unknown `backend` 'cuda\.'"), kernel_ladder.use("cuda."):
        pytest.fail("entered")


def test_a_level_that_cannot_be_imported_is_unavailable_with_the_reason(monkeypatch):
    monkeypatch.setitem(table.LEVELS, "triton", "no_such_package")
    monkeypatch.delenv("KERNEL_LADDER_REQUIRE", raising=False)
    monkeypatch.delitem(table._unavailable, ("gelu", "triton"), raising=False)
    assert "No module named 'no_such_package'" in table.unavailable("gelu", "triton")
    monkeypatch.undo()


def test_registering_a_name_twice_or_a_bad_name(scratch_table):
    steps("once")
    with pytest.raises(ValueError, match=r"gelu has a variant 'torch\.once' already"):
        steps("once")
    for name in ("torch", "torch.", "jax.fused"):
        with pytest.raises(ValueError, match=r"`name` must be 'level\.variant'"):
            table.register("gelu", name, forward=lambda input: (input, ()))


@pytest.mark.parametrize("op", kernel_ladder.OPS)
def test_backends_lists_every_level(op):
    names = kernel_ladder.backends(op)
    assert {name.partition(".")[0] for name in names} == set(table.LEVELS)
    assert names["torch.naive"] is None
    assert names[kernel_ladder.spec(op).baseline] is None


def in_a_fresh_process(code: str, **environment: str) -> subprocess.CompletedProcess:
    return run_python(["-c", code], {**os.environ, "KERNEL_LADDER_REQUIRE": "", **environment})


def test_require_turns_unavailability_into_failure():
    code = "import kernel_ladder; print(kernel_ladder.backends('gelu'))"
    # Hidden GPUs and a switched-off interpreter make the level unavailable anywhere.
    hidden = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0"}
    assert in_a_fresh_process(code, **hidden).returncode == 0
    for levels in ("cuda,triton", "torch, cuda", "torch ,triton,"):
        required = in_a_fresh_process(code, **hidden, KERNEL_LADDER_REQUIRE=levels)
        assert required.returncode != 0
        assert "KERNEL_LADDER_REQUIRE names" in required.stderr
        assert "unavailable" in required.stderr


def test_require_names_levels():
    code = "import kernel_ladder, torch; kernel_ladder.gelu(torch.zeros(2))"
    assert in_a_fresh_process(code, KERNEL_LADDER_REQUIRE=" torch,").returncode == 0
    unknown = in_a_fresh_process(code, KERNEL_LADDER_REQUIRE="torch,kuda")
    assert "KERNEL_LADDER_REQUIRE names 'kuda', which is no level; levels are torch, compile" in unknown.stderr


def test_the_environment_is_read_when_called():
    code = "import kernel_ladder, torch; kernel_ladder.gelu(torch.zeros(2))"
    result = in_a_fresh_process(code, KERNEL_LADDER_BACKEND="torch.nave")
    assert "unknown `backend` 'torch.nave'; did you mean 'torch.naive'" in result.stderr
