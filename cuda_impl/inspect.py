"""What nvcc made of the kernels of a CUDA variant, read from the extension itself: no GPU is needed.

The extension tells the launch's sizes of one instance of each kernel (:func:`kernel_ladder._C.kernels`). On a GPU, the
launches of a call tell them, and which kernels of other operations it runs, as many gradients do. Code is shown of
these instances, and of others that ``kernel`` names.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cuda_impl import climb, extension, unavailable
from kernel_ladder.errors import InspectError
from kernel_ladder.inspection import architecture, cubin
from kernel_ladder.inspection.inspect import (
    ROOT,
    Code,
    Inspection,
    Kernel,
    Request,
    begin,
    keep_named,
    located,
    one_pass,
    real_inputs,
    refusal_here,
    this_gpu,
)
from kernel_ladder.inspection.launches import launched
from kernel_ladder.table import Variant

CODE = ("source", "ptx", "sass")
AHEAD_OF_TIME = True

_DTYPES = {"__nv_bfloat16": "bfloat16", "__half": "float16", "float": "float32"}

#: The passes in which a kernel runs, where its name has no ``_backward``. Gradients of matmul, dropout and rope are
#: such calls themselves. Naive attention computes its weights again; flash attention's backward kernels are named after
#: what they walk over.
_PASSES = {
    "attention_naive_product_kernel": ("forward", "backward"),
    "attention_naive_softmax_kernel": ("forward", "backward"),
    "attention_flash_delta_kernel": ("backward",),
    "attention_flash_query_kernel": ("backward",),
    "attention_flash_key_kernel": ("backward",),
    "linear_cross_entropy_chunked_scale_kernel": ("backward",),
}


#: Variants that run the kernels of another. A sum in two stages runs those of one stage twice; a product cut in equal
#: parts runs that of whole tiles; packed sequences run those of batches.
_KERNELS_OF = {
    ("sum", "two_stage"): ("sum", "coalesced"),
    ("matmul", "stream_k"): ("matmul", "persistent"),
    ("attention_varlen", "flash"): ("attention", "flash"),
    ("attention_varlen", "warp_specialized"): ("attention", "warp_specialized"),
}


#: Normalisations whose kernels are templates of csrc/norm, by the type that is their first argument.
_NORMS = {"layer_norm": "LayerNorm", "rms_norm": "RmsNorm", "add_rms_norm": "AddRmsNorm"}


#: Variants whose backward pass is that of earlier steps.
_BACKWARD_OF: dict[tuple[str, str], tuple[str, ...]] = {
    **{("attention", step): ("wgmma", "warp_specialized") for step in ("pingpong", "persistent")},
    ("attention", "split_kv"): ("flash",),
    ("attention_varlen", "pingpong"): ("warp_specialized", "flash"),
    ("softmax", "multirow"): ("registers",),
    ("bias_gelu", "vectorized"): ("multirow",),
    **{
        (op, step): ("registers",)
        for op in ("layer_norm", "rms_norm", "add_rms_norm", "bias_dropout_add_layer_norm")
        for step in ("smem_pipeline", "cluster", "persistent_cluster")
    },
    ("matmul", "skinny"): ("mma",),
    **{("matmul", step): ("registers",) for step in ("thread_tile", "vectorized", "double_buffered")},
}


#: Kernels whose templates, if they are any, do not name the dtype.
_OF_FLOAT32 = frozenset(
    (
        *(f"matmul_{step}_kernel" for step in ("thread_tile", "vectorized", "double_buffered")),
        "linear_cross_entropy_chunked_add_registers_kernel",
    )
)


@dataclass(frozen=True)
class Instance:
    """One instance of a kernel's template in the binary."""

    name: str  # "gelu_naive_kernel<bfloat16, Exact>"
    resources: cubin.Resources

    @property
    def function(self) -> str:
        return self.name.partition("<")[0]

    @property
    def dtype(self) -> str | None:
        """The dtype of its operands, None where it takes them all."""
        if self.function in _OF_FLOAT32:
            return "float32"
        types = re.findall(r"[\w]+", self.name.partition("<")[2])
        return next((dtype for dtype in ("bfloat16", "float16", "float32") if dtype in types), None)

    @property
    def launch_key(self) -> tuple[str, ...]:
        """What decides how it is launched: its function, and what of tiles' shape and loader is an argument."""
        return _launch_key(self.name)

    @property
    def passes(self) -> tuple[str, ...]:
        if self.function.startswith(("matmul_", "dropout_", "rope_")):
            return ("forward", "backward")
        return _PASSES.get(self.function, ("backward",) if "_backward_" in self.function else ("forward",))


def _launch_key(name: str) -> tuple[str, ...]:
    return (name.partition("<")[0], *re.findall(r"\w*Shape<[^>]*>|\w+Loader(?=<)|(?<=<)\w+Norm(?=,)", name))


def readable(symbol: str) -> str:
    """A kernel's name as the source would have it: ``gelu_naive_kernel<bfloat16, Exact>``, without its arguments."""
    name = cubin.demangle(symbol)
    # The extension names a kernel by a type that has it as its argument.
    name = re.sub(r"^kl::KernelType<&\(?(.*?)\)?>$", r"\1", name)
    name = name.removeprefix("void ").replace("(anonymous namespace)::", "").replace("kl::", "")
    name = re.sub(r"\((\w+)\)(\d+)", r"\1 \2", name)  # a value of an enumeration
    for theirs, ours in _DTYPES.items():
        name = re.sub(rf"\b{theirs}\b", ours, name)
    return re.sub(r"\(.*$", "", name).replace("> >", ">>")


@functools.cache
def _library() -> Path:
    module = extension()
    if module is None or module.__file__ is None:
        raise InspectError(f"the cuda level cannot be looked into: {unavailable()}")
    return Path(module.__file__)


@functools.cache
def instances() -> tuple[Instance, ...]:
    """Every kernel in the extension, for every architecture that it was built for."""
    return tuple(Instance(readable(r.symbol), r) for r in cubin.resources(_library()))


def of_variant(op: str, step: str) -> list[Instance]:
    """The kernels of a variant: ``<op>_<step>…_kernel``, and ``<op>_backward_<step>…_kernel``.

    Those of a normalisation are ``norm_<step>…_kernel<Op, …>``; sums of columns serve each step but the first.
    """
    # Where batches and packed sequences have instances of their own, the name of one tells which.
    others = "Batched" if op == "attention_varlen" else "Packed"
    op, step = _KERNELS_OF.get((op, step), (op, step))
    if op in _NORMS:
        sums = "|_backward_column_sum" if step in ("block", "registers") else ""
        named = re.compile(rf"norm((_backward)?_{step}(_\w+)?{sums})_kernel<{_NORMS[op]}, .*")
        return [i for i in instances() if named.fullmatch(i.name)]
    # Of two names that fit, as "registers" and "registers_tma", the longer is the variant's.
    longer = [name for name in climb(op) if name.startswith(f"{step}_")]
    not_longer = f"(?!{'|'.join(f'{name}_' for name in longer)})" if longer else ""
    named = re.compile(rf"{op}(_backward)?_{not_longer}{step}(_\w+)?_kernel")
    return [i for i in instances() if named.fullmatch(i.function) and others not in re.findall(r"\w+", i.name)]


def sources() -> Path | None:
    """The folder of the kernels' sources: that of the project, or the copy that an installed package carries."""
    copies = (Path(__file__).resolve().parent / "csrc", ROOT / "csrc")
    return next((folder for folder in copies if (folder / "core" / "bindings.cpp").exists()), None)


@functools.cache
def source_of(function: str) -> str | None:
    """Where a kernel is defined, None where the package was installed without its sources."""
    folder = sources()
    for path in sorted(folder.rglob("*.cu*")) if folder is not None else ():
        text = path.read_text()
        found = re.search(rf"__global__[^;{{]*?\b{function}\(", text)
        if found is not None:
            return located(path, text.count("\n", 0, found.end()) + 1)
    return None


def _source_text(location: str) -> str:
    """The definition at a location, from its template line to its closing brace."""
    path, _, line = location.rpartition(":")
    lines = (ROOT / path).read_text().splitlines()
    first = last = int(line) - 1
    while first > 0 and lines[first - 1] and not lines[first - 1].startswith(("}", "//", "#")):
        first -= 1
    while lines[last] != "}":
        last += 1
    return "\n".join(lines[first : last + 1]) + "\n"


def _number(arch: str) -> int:
    return int(re.sub(r"\D", "", arch))


def _architecture(request: Request, built: list[str]) -> str:
    """The architecture in the extension that was asked for, of this machine's GPU, or the newest."""
    numbers = {_number(arch): arch for arch in built}
    if request.arch is not None:
        number = architecture.named(request.arch).number
        if number not in numbers:
            raise InspectError(
                f"the extension was not built for `arch` {request.arch!r}; it has {', '.join(numbers.values())} "
                f"(TORCH_CUDA_ARCH_LIST chooses, when it is installed)"
            )
        return numbers[number]
    return numbers[_that_runs_here(list(numbers)) or max(numbers)]


def _that_runs_here(built: list[int]) -> int | None:
    """The newest that this machine's GPU runs: machine code runs on later minor revisions of its own major one."""
    here = this_gpu() or 0
    return max((n for n in built if n // 10 == here // 10 and n <= here), default=None)


def inspect(request: Request) -> Inspection:
    variant = request.variant
    step = variant.name.partition(".")[2]
    steps = _BACKWARD_OF.get((variant.op, step), (step,)) if request.pass_ == "backward" else (step,)
    of_all = [instance for each in steps for instance in of_variant(variant.op, each)]
    dtypes = sorted({i.dtype for i in of_all if i.dtype is not None})
    if request.dtype_name not in dtypes:
        raise InspectError(
            f"{variant.op}: {variant.name} has no kernel for {request.dtype_name}; it has {', '.join(dtypes)}"
        )
    arch = _architecture(request, sorted({i.resources.arch for i in of_all}))
    mine = [
        i
        for i in of_all
        if i.resources.arch == arch and i.dtype in (request.dtype_name, None) and request.pass_ in i.passes
    ]
    mine = _with_code(mine, of_all, f"{variant.op}: {variant.name}", arch)
    runs_here = _that_runs_here([_number(arch)]) is not None
    if request.case is not None and not runs_here:
        raise InspectError(_ONLY_A_GPU.format(f"of {variant.name}", arch))
    found = begin(request)
    found.arch = arch
    given = request.pass_ == "forward" or variant.backward is not None
    ran = _launches(request, found) if given and runs_here else {}
    mine += [i for i in instances() if i.name in ran and i.resources.arch == arch and i not in mine]
    if request.case is not None:
        mine = [i for i in mine if i.name in ran]
    facts = {readable(fact.type): fact for fact in _facts(request.dtype_name)}
    of_launch = {_launch_key(name): fact for name, fact in facts.items()}
    named = {i.name for i in mine if i.name in (ran or facts)}
    # The instances that are launched by an ordinary call first: theirs is the code to read.
    mine.sort(key=lambda i: (i.name not in named, i.name))
    found.kernels = keep_named(request, [_kernel(i, of_launch.get(i.launch_key), ran.get(i.name)) for i in mine])
    found.source = next((k.source for k in found.kernels if k.source), None)
    kept = {k.name for k in found.kernels}
    for instance in mine:
        if instance.name in kept and (instance.name in named or request.kernel is not None):
            found.code += [code for code in _code(request, instance) if code not in found.code]
    if "source" in request.code and sources() is None:
        found.notes.append("the package was installed without csrc, so the kernels' source is not here to show")
    if "ptx" in request.code and not any(c.language == "ptx" for c in found.code):
        capability = re.sub(r"sm_(\d+)(\d)", r"\1.\2", arch)
        found.notes.append(
            f"the extension holds no PTX for {arch}; install it with TORCH_CUDA_ARCH_LIST='{capability}+PTX' to have it"
        )
    return found


#: Why a shape cannot be inspected where no GPU runs the kernels. Takes the kernels and the architecture.
_ONLY_A_GPU = (
    "`shape`: which kernels {} a call of it launches is known on a GPU that runs them alone, and none that runs {} is "
    "visible; leave `shape` away to see all of a variant's"
)


def judge(request: Request) -> Callable[[Variant], str | None]:
    """See :func:`kernel_ladder.inspection.inspect.select`."""
    arch = _architecture(request, sorted({i.resources.arch for i in instances()}))
    if _that_runs_here([_number(arch)]) is None:
        raise InspectError(_ONLY_A_GPU.format("and which variant of the cuda level", arch) + ", and name one")
    return refusal_here(request)


def _with_code(mine: list[Instance], of_all: list[Instance], what: str, arch: str) -> list[Instance]:
    """Instances without those whose body is empty: compiled for an architecture that has not the instructions.

    Raises:
        InspectError: none is left.
    """
    full = [i for i in mine if not _is_empty(i)]
    if mine and not full:
        names = {i.name for i in mine}
        others = sorted({i.resources.arch for i in of_all if i.name in names and not _is_empty(i)})
        where = f"; it has code for {', '.join(others)}" if others else ""
        raise InspectError(f"{what} has no code for {arch}, where its kernels are compiled to nothing{where}")
    return full


#: Registers of an instance that may be empty: every other kernel uses more.
EMPTY_REGISTERS = 8
#: Instructions that an empty body has.
_EMPTY_BODY = re.compile(r"^(@!?U?P\w+ )?(EXIT|BRA|NOP|RET|MOV R1|LDC R1|BPT)\b")


@functools.cache
def _is_empty(instance: Instance) -> bool:
    """Whether an instance has no body."""
    of = instance.resources
    if of.registers > EMPTY_REGISTERS or of.local:
        return False
    lines = cubin.sass(_library(), of.symbol, of.arch).splitlines()
    return all(_EMPTY_BODY.match(re.sub(r"^/\*[0-9a-f]+\*/\s*", "", line)) for line in lines)


def _facts(dtype: str) -> list[Any]:
    module = extension()
    assert module is not None, "instances() has raised before"
    return module.kernels(dtype)


def _launches(request: Request, found: Inspection) -> dict[str, Kernel]:
    """By name what a call of the variant launches on this machine's GPU; its case goes into what was found."""
    case, inputs = real_inputs(request, torch.device("cuda"))
    shown = begin(request, case)
    found.shape, found.shapes, found.options = shown.shape, shown.shapes, shown.options
    one_pass(request, inputs, case)()
    found.launches = launched(one_pass(request, inputs, case))
    for launch in found.launches:
        launch.name = readable(launch.name)
    return {launch.name: launch for launch in found.launches}


def _kernel(instance: Instance, fact: Any, launch: Kernel | None) -> Kernel:
    resources = instance.resources
    kernel = Kernel(
        instance.name,
        source_of(instance.function),
        registers=resources.registers,
        local=resources.local,
        static_shared=resources.shared,
    )
    if launch is not None:
        kernel.threads, kernel.grid = launch.threads, launch.grid
        kernel.dynamic_shared = max(0, (launch.dynamic_shared or 0) - resources.shared)
    elif fact is not None:
        kernel.threads, kernel.dynamic_shared = fact.threads, fact.dynamic_shared
        if instance.function.startswith("softmax") and fact.dynamic_shared:
            kernel.note = "launched so for rows of 4096"
    kernel.fill_occupancy(architecture.named(resources.arch))
    return kernel


def _code(request: Request, instance: Instance) -> list[Code]:
    symbol, arch = instance.resources.symbol, instance.resources.arch
    found = []
    location = source_of(instance.function)
    if "source" in request.code and location is not None:
        found.append(Code(location, "cuda", _source_text(location)))
    if "ptx" in request.code and (text := cubin.ptx(_library(), symbol, arch)) is not None:
        found.append(Code(instance.name, "ptx", text))
    if "sass" in request.code:
        found.append(Code(instance.name, "sass", cubin.sass(_library(), symbol, arch)))
    return found
