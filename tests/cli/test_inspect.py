"""``python -m kernel_ladder inspect``: what it says of every variant is true, and what it cannot say has a reason."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import cuda_impl
import kernel_ladder
from compile_impl.inspect import _bytes_by_kernel
from kernel_ladder import table
from kernel_ladder.errors import InspectError
from kernel_ladder.inspection import architecture, cubin
from kernel_ladder.inspection.inspect import NO_KERNEL, Inspection, Request, inspect
from kernel_ladder.spec import PASSES
from kernel_ladder.testing.cases import case_named

from ..conftest import DEVICE, every_variant, needs_extension, needs_gpu, variant_id, without_gradient
from ..sampling import MODES_OF_DEFAULT
from ..triton.test_aot import spilt_by_old_triton

ROOT = Path(__file__).resolve().parents[2]

needs_cuobjdump = pytest.mark.skipif(cubin.cuobjdump() is None, reason="no cuobjdump was found")


#: Rungs that take no other dtype.
FLOAT32_ALONE = {
    ("linear", "cuda.registers"),
    *(("matmul", f"cuda.{name}") for name in ("thread_tile", "vectorized", "double_buffered", "registers_tma")),
}


@pytest.fixture(autouse=True)
def leave_memory_to_others():
    """Calls are inspected at real sizes, whose memory PyTorch keeps otherwise."""
    yield
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()


@functools.cache
def looked_into(
    op: str, backend: str, pass_: str = "forward", *code: str, arch: str | None = None, shape: str | None = None,
    kernel: str | None = None) -> Inspection:  # fmt: skip
    (variant,) = (v for v in table.variants(op) if v.name == backend)
    dtype = torch.float32 if (op, backend) in FLOAT32_ALONE else torch.bfloat16
    case = shape and case_named(kernel_ladder.spec(op), shape)
    return inspect(Request(variant, case, dtype, pass_, arch, frozenset(code), kernel))


#: What the triton level shows.
OF_TRITON = ("source", "ttgir", "ptx", "sass")


def at_level(level: str) -> list:
    return [
        pytest.param(v, p, id=f"{variant_id(v)}-{p}")
        for v in every_variant(level)
        for p in PASSES[: 1 if without_gradient(v) else None]
    ]


def exists(location: str | None) -> bool:
    """Whether ``file:line`` names a line that is there."""
    path, _, line = (location or ":0").rpartition(":")
    return 0 < int(line) <= len((ROOT / path).read_text().splitlines())


def without_kernels(found: Inspection) -> bool:
    """Whether a pass has none, and says so: its gradients are views, made by other operations, or not given."""
    if NO_KERNEL not in found.notes:
        return False
    assert not found.kernels
    assert found.pass_ == "backward"
    given_elsewhere = (found.op, found.backend) == ("attention", "triton.naive")
    given_elsewhere |= found.backend == "triton.persistent_cluster"
    assert found.op in ("add", "sum", "linear") or given_elsewhere
    return True


# ---- each level ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("variant", "pass_"), at_level("torch"))
def test_torch_shows_the_formula_and_its_operators(variant, pass_):
    small = {"attention": "B2 H4 S128 D64 full", "attention_varlen": "T256 H4 D64 causal"}
    # A call is made where there is a GPU, and of a case of the sweep the formula's scores take tens of GiB.
    shape = small.get(variant.op) if DEVICE.type == "cuda" else None
    found = looked_into(variant.op, variant.name, pass_, "source", shape=shape)
    assert exists(found.source)
    assert [c.language for c in found.code] == ["python"]
    assert all("aten." in operator for operator in found.operators)
    not_shown = any("operators are not shown" in note for note in found.notes)
    assert bool(found.operators) != (not_shown or without_kernels(found))
    if DEVICE.type == "cuda":
        views_alone = all(re.match(r"aten\.(expand|unsqueeze)\b", operator) for operator in found.operators)
        assert bool(found.launches) != views_alone


def test_the_operators_are_those_of_the_formula():
    forward = looked_into("softmax", "torch.naive").operators
    assert [o.split(" ")[0] for o in forward] == [
        "aten._to_copy.default",
        "aten.amax.default",
        "aten.sub.Tensor",
        "aten.exp.default",
        "aten.sum.dim_IntList",
        "aten.div.Tensor",
        "aten._to_copy.default",
    ]
    assert "aten._softmax_backward_data.default" in " ".join(
        looked_into("softmax", "torch.builtin", "backward").operators
    )


def compiled() -> list:
    """Without a GPU compiling takes seconds a pass: every fourth has it then, of each pass."""
    every = [
        p
        for p in at_level("compile")
        if not (p.values[0].op == "attention_varlen" and p.values[0].name in MODES_OF_DEFAULT)
    ]
    return every if DEVICE.type == "cuda" else [each for i, each in enumerate(every) if i // 2 % 4 == i % 2]


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(("variant", "pass_"), compiled())
def test_compile_shows_its_kernels(variant, pass_, gpu_memory):
    if variant.op == "attention_varlen" and DEVICE.type == "cuda":  # its formula has all scores, several times
        gpu_memory(48 * 2**30)
    try:
        found = looked_into(variant.op, variant.name, pass_, "source")
    except InspectError as error:
        pytest.skip(str(error))
    assert found.kernel_count is not None
    assert found.library_count is not None
    assert found.kernel_count + found.library_count >= 1 or found.launches or without_kernels(found)
    assert found.compile_s is not None
    assert found.compile_s > 0
    *kernels, calls = found.code
    assert [k.name for k in found.kernels if k.note and "called" in k.note] == [code.title for code in kernels]
    for code in kernels:
        assert code.title in calls.text
        assert code.language == ("python" if DEVICE.type == "cuda" else "cpp")
    if DEVICE.type == "cuda":
        assert len(found.launches) >= found.kernel_count


def test_compile_fuses_the_formula_of_gelu_into_one_kernel():
    found = looked_into("gelu", "compile.default")
    assert found.kernel_count == 1
    # It reads and writes each element once, which is the least.
    bytes_by_inductor = re.compile(r"bytes by Inductor's count: (\S+); the least is \1$")
    (size,) = (match[1] for note in found.notes if (match := bytes_by_inductor.match(note)))
    assert found.kernels[0].note.endswith(f", {size} bytes")
    assert len(looked_into("gelu", "torch.naive").operators) > 1


def test_bytes_are_of_the_kernel_that_writes_the_buffer():
    """In Inductor's module a kernel is called with its buffers, one of a library with its result or assigned to it."""
    body = """
    buf0 = empty_strided_cuda((64, 64), (64, 1), torch.float32)
    triton_poi_fused_0.run(arg0_1, buf0, 4096, stream=stream0)
    extern_kernels.mm(buf0, arg1_1, out=buf1)
    buf2 = buf1; del buf1  # reuse
    triton_poi_fused_1.run(buf2, 4096, stream=stream0)
    triton_poi_fused_0.run(arg2_1, buf3, 4096, stream=stream0)
    buf4 = torch.ops.aten.sort.default(buf3)
    """

    def node(*buffers: str) -> SimpleNamespace:
        return SimpleNamespace(get_buffer_names=lambda: buffers)

    written = [(("buf0",), 8), (("buf1",), 16), (("inside", "buf2"), 32), (("buf3",), 64), (("buf4",), 128)]
    nodes = [(node(*buffers), size) for buffers, size in written]
    assert _bytes_by_kernel(nodes, body, ["triton_poi_fused_0", "triton_poi_fused_1"]) == {
        "triton_poi_fused_0": 8 + 64,
        "mm": 16,
        "triton_poi_fused_1": 32,
        "sort.default": 128,
    }


#: Operations whose kernels are those of others, which take tens of seconds; test_aot.py compiles their own.
OF_OTHERS = ("linear_cross_entropy",)
#: Operations whose kernels have no code for Ampere.
HOPPER_ALONE = ("linear_float8",)


def ahead_of_time() -> list:
    """Every pass for Hopper; for Ampere one of each operation, since a process for each takes seconds."""
    first = {v.op: v for v in reversed(every_variant("triton")) if v.op not in OF_OTHERS}
    passes = [p for p in at_level("triton") if p.values[0].op not in OF_OTHERS]
    return [pytest.param(*p.values, "sm_90", id=f"sm_90-{p.id}") for p in passes] + [
        pytest.param(v, "forward", "sm_80", id=f"sm_80-{variant_id(v)}")
        for v in reversed(first.values())
        if v.op not in HOPPER_ALONE
    ]


@pytest.mark.sampled
@needs_cuobjdump
@pytest.mark.parametrize(("variant", "pass_", "arch"), ahead_of_time())
def test_triton_compiles_ahead_of_time(variant, pass_, arch):
    found = looked_into(variant.op, variant.name, pass_, *OF_TRITON, arch=arch)
    assert found.arch == arch
    if without_kernels(found):
        return
    assert found.kernels
    for kernel in found.kernels:
        assert exists(kernel.source)
        assert kernel.registers is not None
        assert 0 < kernel.registers <= 255
        assert kernel.local <= spilt_by_old_triton(kernel.name) or arch == "sm_80", "tuned for Hopper"
        assert kernel.blocks_per_sm is not None
        assert kernel.blocks_per_sm >= 1
        assert kernel.grid is not None
    by_kind = {kind: [c for c in found.code if c.language == kind] for kind in ("python", "ttgir", "ptx", "sass")}
    assert {c.title for c in by_kind["ptx"]} == {k.name for k in found.kernels}
    for code in by_kind["ptx"]:
        assert f".target {arch}" in code.text
        assert f".entry {code.title}(" in code.text
    assert all("EXIT" in code.text for code in by_kind["sass"])
    assert by_kind["ttgir"]
    assert by_kind["python"]


def test_float8_has_no_code_for_ampere():
    for rung in ("triton.tiled", "triton.persistent"):
        with pytest.raises(InspectError, match=r"has no code for sm_80: float8 sums .* need compute capability 9\.x"):
            looked_into("linear_float8", rung, "forward", arch="sm_80")


@needs_cuobjdump
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_kernels_use_pdl_where_the_architecture_has_it(arch):
    """Whatever GPU is here, or none."""
    found = looked_into("rms_norm", "triton.fused", "forward", "ptx", arch=arch)
    (ptx,) = (code.text for code in found.code if code.language == "ptx")
    assert ("griddepcontrol" in ptx) == (arch == "sm_90")


#: Calls of persistent kernels, and the kernel that each launches first.
PERSISTENT = [
    ("layer_norm", "triton.persistent_cluster", "4096x65536", "forward", "sm_90", "_norm_persistent_cluster_kernel"),
    ("layer_norm", "triton.cluster", "4096x65536", "forward", "sm_90", "_norm_cluster_kernel"),
    ("layer_norm", "triton.cluster", "4096x65536", "backward", "sm_90", "_norm_cluster_backward_kernel"),
    ("rms_norm", "triton.cluster", "8192x16384", "backward", "sm_90", "_norm_cluster_backward_kernel"),
    ("rms_norm", "triton.fused", "16384x1024", "backward", "sm_90", "_norm_fused_backward_kernel"),
    ("rms_norm", "triton.fused", "16384x1024", "backward", "sm_80", "_norm_fused_backward_kernel"),
    ("rms_norm", "triton.online", "16384x1024", "backward", "sm_90", "_norm_online_row_means_kernel"),
    (
        *("bias_dropout_add_layer_norm", "triton.persistent_cluster", "4096x65536", "forward", "sm_90"),
        "_persistent_cluster_kernel",
    ),
]


@needs_cuobjdump
@pytest.mark.parametrize(("op", "backend", "shape", "pass_", "arch", "kernel"), PERSISTENT)
def test_a_rung_launches_its_own_kernels(op, backend, shape, pass_, arch, kernel):
    found = looked_into(op, backend, pass_, arch=arch, shape=shape)
    assert found.kernels[0].name == kernel
    assert [k.name for k in found.kernels].count(kernel) == 1


@needs_cuobjdump
def test_triton_uses_the_tensor_cores_of_each_architecture():
    for arch, instruction in (("sm_90", "HGMMA"), ("sm_80", "HMMA")):
        (sass,) = (
            c
            for c in looked_into("matmul", "triton.tiled", "forward", *OF_TRITON, arch=arch).code
            if c.language == "sass"
        )
        assert instruction in sass.text


@needs_cuobjdump
def test_triton_compiles_what_a_shape_and_dtype_launch():
    variant = table.named("softmax", "triton.fused")[0]
    spec = table.spec("softmax")
    for text, block, programs in (("8x1000", 1024, 4), ("8x5000", 8192, 8)):  # of two rows, of one
        request = Request(variant, case_named(spec, text), torch.float32, arch="sm_90")
        (kernel,) = inspect(request).kernels
        assert f"BLOCK={block}," in (kernel.note or "")
        assert kernel.grid == [programs]


@needs_cuobjdump
def test_triton_compiles_what_a_layout_launches():
    variant, spec = table.named("gelu", "triton.fused")[0], table.spec("gelu")
    names = [
        inspect(Request(variant, case_named(spec, text), arch="sm_90")).kernels for text in ("7x67", "none-sliced")
    ]
    assert [k.name for kernels in names for k in kernels] == ["_gelu_kernel", "_gelu_strided_kernel"]


@pytest.mark.sampled(device="cpu")
@needs_extension
@needs_cuobjdump
@pytest.mark.parametrize(("variant", "pass_"), at_level("cuda"))
def test_cuda_reads_the_extension(variant, pass_):
    found = looked_into(variant.op, variant.name, pass_, "source", "sass")
    if without_kernels(found):
        return
    assert found.kernels
    launched = {k.name for k in found.launches}  # on a GPU: with those of other operations
    norms = {"layer_norm": "LayerNorm", "rms_norm": "RmsNorm", "add_rms_norm": "AddRmsNorm"}
    own = "norm_" if variant.op in norms else f"{variant.op}_"
    if variant.op in norms:  # bias_dropout_add_layer_norm's backward pass launches LayerNorm's kernels too
        assert all(f"<{norms[variant.op]}, " in k.name for k in found.kernels if k.name.startswith("norm_"))
    for kernel in found.kernels:
        assert exists(kernel.source)
        theirs = ("attention_flash_", "attention_backward_warp_specialized_")
        of_attention = variant.op == "attention_varlen" and kernel.name.startswith(theirs)
        assert kernel.name.startswith(own) or of_attention or kernel.name in launched
        assert kernel.registers is not None
        assert 0 < kernel.registers <= 255
        assert kernel.local is not None
        assert kernel.blocks_per_sm is not None, "every launch's size is known"
        assert kernel.blocks_per_sm >= 1
    assert {c.language for c in found.code} == {"cuda", "sass"}
    for code in found.code:
        assert code.language != "cuda" or ("__global__" in code.text and code.text.endswith("}\n"))
        # ptxas 12.8 and 13.0 split such an address where registers are short, and the GPU refuses the instruction.
        assert not re.search(r"LDGSTS\S* \[R\d+\+UR", code.text)


INSTRUCTIONS = [
    ("gelu", "cuda.naive", r"LDG\.E\.U16"),
    ("gelu", "cuda.vectorized", r"LDG\.E\.128"),
    ("softmax", "cuda.online", r"MUFU\.EX2"),
    ("add", "cuda.vectorized", r"LDG\.E\.128"),
    ("sum", "cuda.block", r"SHFL\.BFLY"),
    ("sum", "cuda.two_stage", r"LDG\.E\.128"),
    ("matmul", "cuda.tiled", r"\bLDS\b"),
    ("matmul", "cuda.thread_tile", r"\bFFMA\b"),
    ("matmul", "cuda.vectorized", r"LDG\.E\.128"),
    ("matmul", "cuda.double_buffered", r"LDG\.E\.128"),
    ("matmul", "cuda.registers", r"\bFFMA\b"),
    ("matmul", "cuda.registers_tma", r"UTMALDG\.3D"),
    ("matmul", "cuda.mma", r"HMMA\.16816\.F32\.BF16"),
    ("matmul", "cuda.wgmma", r"HGMMA\.64x128x16\.F32\.BF16"),
    ("matmul", "cuda.wgmma", r"UTMALDG\.3D"),
    ("matmul", "cuda.warp_specialized", r"USETMAXREG"),
    ("matmul", "cuda.warp_specialized", r"HGMMA\.64x256x16\.F32\.BF16"),
    ("matmul", "cuda.cluster", r"UTMALDG\.3D\.MULTICAST"),
    ("matmul", "cuda.persistent", r"STSM\.16"),
    ("matmul", "cuda.persistent", r"UTMASTG\.3D"),
    ("matmul", "cuda.stream_k", r"LDG\.E\.STRONG\.GPU|LD\.E\.STRONG\.GPU"),
    ("matmul", "cuda.split_k", r"UCGABAR_WAIT"),
    ("attention", "cuda.flash", r"HMMA\.16816\.F32\.BF16"),
    ("attention", "cuda.wgmma", r"HGMMA\.64x64x16\.F32\.BF16"),
    ("attention", "cuda.wgmma", r"UTMALDG\.4D"),
    ("attention", "cuda.warp_specialized", r"USETMAXREG"),
    ("attention", "cuda.pingpong", r"HGMMA\.64x128x16\.F32\.BF16"),
    ("attention", "cuda.persistent", r"STG\.E\.128"),
    ("attention", "cuda.split_kv", r"LDGSTS\.E"),
    ("attention_varlen", "cuda.pingpong", r"HGMMA\.64x128x16\.F32\.BF16"),
    ("dropout", "cuda.vectorized", r"IMAD\.WIDE\.U32"),
    ("bias_gelu", "cuda.vectorized", r"LDG\.E\.128"),
    ("swiglu", "cuda.vectorized", r"LDG\.E\.128"),
    ("matmul", "cuda.skinny", r"LDG\.E\.128"),
    ("linear", "cuda.registers", r"\bFFMA\b"),
    ("linear", "cuda.mma", r"HMMA\.16816\.F32\.BF16"),
    ("linear", "cuda.persistent", r"HGMMA\.64x256x16\.F32\.BF16"),
    ("linear", "cuda.persistent", r"UTMASTG\.3D"),
    ("linear_cross_entropy", "cuda.chunked", r"UTMAREDG\.3D\.ADD"),
]


@needs_extension
@needs_cuobjdump
@pytest.mark.parametrize(("op", "backend", "instruction"), INSTRUCTIONS)
def test_the_idea_of_a_variant_is_in_its_instructions(op, backend, instruction):
    kernel = "chunked_add" if op == "linear_cross_entropy" else None  # which a call without gradients does not launch
    code = looked_into(op, backend, "forward", "source", "sass", kernel=kernel).code
    assert any(c.language == "sass" and re.search(instruction, c.text) for c in code)
    if instruction == r"LDG\.E\.128":
        naive = looked_into(op, "cuda.naive", "forward", "source", "sass").code[-1].text
        assert not re.search(instruction, naive)


@needs_extension
@needs_cuobjdump
def test_every_kernel_of_the_extension_belongs_to_one_variant():
    from cuda_impl.inspect import _KERNELS_OF, instances, of_variant, source_of

    def kernel(instance) -> str:
        """Its function; of a normalisation's template with the operation, which is the first argument."""
        return re.sub(r"(?<=Norm),.*|<(?!\w+Norm,).*", "", instance.name)

    owners: dict[str, set[str]] = {kernel(i): set() for i in instances()}
    for variant in every_variant("cuda"):
        step = variant.name.partition(".")[2]
        if (variant.op, step) in _KERNELS_OF:
            assert of_variant(variant.op, step), "it runs those of another"
            continue
        for instance in of_variant(variant.op, step):
            owners[kernel(instance)].add(f"{variant.op} {variant.name}")
    # The second stage of the weights' gradients serves two rungs.
    shared = {f"norm_backward_column_sum_kernel<{of}": 2 for of in ("LayerNorm", "RmsNorm", "AddRmsNorm")}
    assert {name: len(of) for name, of in owners.items()} == {**dict.fromkeys(owners, 1), **shared}
    assert all(source_of(name.partition("<")[0]) for name in owners)


@needs_extension
@needs_cuobjdump
def test_what_the_extension_names_is_in_the_binary():
    from cuda_impl.inspect import instances, readable

    names = {i.name for i in instances()}
    for dtype in ("bfloat16", "float16", "float32"):
        facts = cuda_impl.extension().kernels(dtype)
        assert {readable(fact.type) for fact in facts} <= names
    with pytest.raises(ValueError, match="must be float32, float16 or bfloat16, got int8"):
        cuda_impl.extension().kernels("int8")


# ---- on a GPU ------------------------------------------------------------------------------------------------------


@needs_gpu
@needs_extension
@needs_cuobjdump
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_registers_and_occupancy_are_the_drivers(dtype):
    from cuda_impl.inspect import _that_runs_here, instances, readable
    from kernel_ladder.inspection.inspect import this_gpu

    numbers = {int(re.sub(r"\D", "", i.resources.arch)): i.resources.arch for i in instances()}
    arch = numbers[_that_runs_here(list(numbers))]
    mine = {i.name: i.resources for i in instances() if i.resources.arch == arch}
    for fact in cuda_impl.extension().kernels(dtype):
        read = mine[readable(fact.type)]
        assert (read.registers, read.shared) == (fact.registers, fact.static_shared), fact.name
        limits = architecture.ARCHITECTURES[this_gpu()]
        computed = architecture.occupancy(limits, fact.threads, read.registers, read.shared + fact.dynamic_shared)
        assert computed.blocks == fact.blocks_per_sm, fact.name


@needs_gpu
@pytest.mark.parametrize(("variant", "pass_"), at_level("cuda"))
def test_a_call_launches_what_is_shown(variant, pass_):
    from cuda_impl.inspect import instances

    found = looked_into(variant.op, variant.name, pass_)
    if without_kernels(found):
        return
    assert found.shape is not None
    ours = {i.name for i in instances()}
    launched = [k.name for k in found.launches if k.name in ours]
    assert launched
    assert set(launched) <= {k.name for k in found.kernels}
    assert found.kernels[0].name in launched, "those that are launched come first"
    assert all(k.grid for k in found.launches)


@needs_gpu
@pytest.mark.parametrize(
    ("backend", "tuned"), [("triton.tiled", "_matmul_kernel"), ("triton.persistent", "_matmul_persistent_kernel")]
)
def test_the_autotuners_choice_and_its_losers(backend, tuned, tmp_path):
    asked = ("inspect", "matmul", "--backend", backend, "--shape", "1024x1024x1024", "--json")
    answers = []
    for _ in range(2):  # timed, then read from disk
        run = subprocess.run(
            [sys.executable, "-m", "kernel_ladder", *asked],
            env={**os.environ, "KERNEL_LADDER_AUTOTUNE": "1", "TRITON_CACHE_DIR": str(tmp_path)},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        answers.append(json.loads(run.stdout))
    (choice,) = answers[0]["choices"]
    assert choice["kernel"] == tuned
    assert len(choice["timed"]) > 1
    assert choice["timed"][0]["config"] == choice["config"]
    times = [timed["us"] for timed in choice["timed"] if timed["us"] is not None]
    assert times == sorted(times)
    assert times[0] > 0
    assert answers[1]["choices"] == answers[0]["choices"]
    # What is compiled is what was chosen.
    chosen = dict(re.findall(r"(\w+): (\w+)", choice["config"]))
    (kernel,) = answers[0]["kernels"]
    for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_warps", "num_stages"):
        assert f"{name}={chosen[name]}" in kernel["note"]
