"""Build ``kernel_ladder._C`` from ``csrc`` where nvcc is found; install the Python levels everywhere."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "_build"))

import architectures  # noqa: E402
import together  # noqa: E402
from environment import check_toolkit, cuda_home, say, show_installed_torch, stop  # noqa: E402

LEVELS = ["torch_ref", "compile_impl", "xla_impl", "triton_impl", "cuda_impl"]
PACKAGES = find_packages(
    str(ROOT), include=[f"{name}{rest}" for name in ("kernel_ladder", *LEVELS) for rest in ("", ".*")]
)

#: Minutes of one core that the sources take for one architecture, on a cloud machine's virtual core.
CORE_MINUTES = 8
#: The file that takes longest, which is what many cores wait for, in minutes.
LONGEST_MINUTES = 2

#: Commands that compile; any other (metadata, sdist) needs neither torch nor nvcc.
BUILDS = {"build", "build_ext", "bdist_wheel", "editable_wheel", "install", "develop"}


def visible_capabilities() -> list[tuple[int, int]]:
    """The compute capability of every visible GPU."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.cuda.get_device_capability(i) for i in range(count)]


def files(*suffixes: str) -> list[str]:
    return sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*") if p.suffix in suffixes)


def extension(home: Path) -> dict:
    """Arguments for ``setup`` that build the extension; none where no visible GPU can run it."""
    check_toolkit(home)
    show_installed_torch()
    os.environ["CUDA_HOME"] = str(home)
    import pybind11
    import torch
    from setuptools import Extension
    from torch.utils import cpp_extension

    wanted = architectures.wanted(os.environ.get("TORCH_CUDA_ARCH_LIST"), visible_capabilities())
    if wanted is None:
        if os.environ.get("KERNEL_LADDER_CUDA") == "1":
            stop("KERNEL_LADDER_CUDA=1 but no visible GPU can run the cuda level; TORCH_CUDA_ARCH_LIST names others")
        say("no visible GPU is left: installing without the cuda level")
        return {}
    os.environ["TORCH_CUDA_ARCH_LIST"] = wanted
    os.environ.setdefault("MAX_JOBS", str(len(os.sched_getaffinity(0))))
    cpp_extension.CUDA_HOME = str(home)  # a CPU-only torch does not look for it
    # torch refuses an nvcc of another CUDA major than its own. Here none of torch's CUDA libraries is compiled against:
    # the runtime is linked statically and torch is reached through its stable ABI, so the driver alone must be new
    # enough for this nvcc. Whether nvcc and the host compiler go together is tried out by check_toolkit.
    cpp_extension._check_cuda_version = lambda *_: None
    libraries_home = next(d for d in ("lib64", "lib", "targets/x86_64-linux/lib") if (home / d).exists())
    # pip has pybind11 in a folder of another name each time, and ninja compiles again what has other arguments.
    pybind_headers = ROOT / "build" / "pybind11"
    pybind_headers.parent.mkdir(exist_ok=True)
    pybind_headers.unlink(missing_ok=True)
    pybind_headers.symlink_to(pybind11.get_include())
    module = Extension(
        "kernel_ladder._C",
        sources=together.sources(ROOT),
        depends=files(".cu", ".cuh", ".h"),
        include_dirs=[
            str(ROOT / "csrc"),
            str(pybind_headers),
            *cpp_extension.include_paths(),
            f"{home}/include",
        ],
        define_macros=[
            ("TORCH_TARGET_VERSION", architectures.TORCH_TARGET_VERSION),
            # What the kernels are compiled to, for bindings.cpp to tell.
            ("KL_ARCHITECTURES", ",".join(architectures.codes(cpp_extension._get_cuda_arch_flags()))),
        ],
        library_dirs=[*cpp_extension.library_paths(), str(home / libraries_home)],
        # The CUDA runtime is linked statically, so that the module imports on a machine without one.
        libraries=["c10", "torch_cpu", "cudart_static", "dl", "rt", "pthread"],
        # libtorch.so brings libtorch_cuda along, whose stream the kernels launch on; no symbol of its own asks for it.
        extra_link_args=["-Wl,--no-as-needed", "-ltorch"],
        extra_compile_args={
            # -g0: Python's own flags ask for debug information, which would be half of the time these files take.
            "cxx": ["-O3", "-g0", "-std=c++17", "-Wall", "-fvisibility=hidden"],
            "nvcc": architectures.NVCC_FLAGS,
        },
        language="c++",
    )

    class InOrder(cpp_extension.BuildExtension):
        """Compiles the sources in their order, the longest first. setuptools sorts them by name."""

        def build_extension(self, ext):
            compile_sorted, place = self.compiler.compile, {path: i for i, path in enumerate(ext.sources)}
            self.compiler.compile = lambda sources, **rest: compile_sorted(sorted(sources, key=place.get), **rest)
            super().build_extension(ext)

        def run(self):
            if self.inplace:  # kept, where pip's own folder is not: the next installation compiles what has changed
                self.build_temp = str(ROOT / "build" / f"objects-{sys.implementation.cache_tag}-{torch.__version__}")
            super().run()
            if self.inplace:  # for cuda_impl/not_built.py to tell an extension older than its table of operators
                operators = hashlib.sha256((ROOT / "csrc/core/bindings.cpp").read_bytes()).hexdigest()
                record = ROOT / f"{self.get_ext_filename(module.name)}.operators"
                record.write_text(f"{operators}\n", encoding="utf-8")

    # A torch without CUDA has ninja build without regard to headers. Objects older than a header would be linked with
    # newer ones, and disagree with them about the structures that they pass to each other.
    newest = max((ROOT / p).stat().st_mtime for p in files(".cuh", ".h"))
    for stale in (p for p in (ROOT / "build").rglob("*.o") if p.stat().st_mtime < newest):
        stale.unlink()
    where = Path(torch.__file__).parent
    say(f"building for {os.environ['TORCH_CUDA_ARCH_LIST']} with {home}/bin/nvcc, torch {torch.__version__} in {where}")
    count = len(os.environ["TORCH_CUDA_ARCH_LIST"].replace(" ", ";").strip(";").split(";"))
    jobs = int(os.environ["MAX_JOBS"])
    minutes = max(LONGEST_MINUTES, round(CORE_MINUTES * count / jobs))
    say(
        f"compiling {len(module.sources)} files for {count} architecture{'s' * (count > 1)}, {jobs} at "
        f"a time: about {minutes} minutes where none was compiled before, half of that on fast cores"
    )
    return {
        "ext_modules": [module],
        "cmdclass": {"build_ext": InOrder.with_options(no_python_abi_suffix=False)},
    }


home = cuda_home() if BUILDS & set(sys.argv[1:]) else None
arguments = extension(home) if home else {}
if {"bdist_wheel", "install"} & set(sys.argv[1:]):
    # `inspect --source` shows the kernels from an installed package too. An editable one has csrc beside it.
    PACKAGES.append("cuda_impl.csrc")
    arguments["package_dir"] = {"cuda_impl.csrc": "csrc"}
package_data = {"kernel_ladder": ["_not_built.txt", "selection/tables/*.json"], "cuda_impl.csrc": ["**/*"]}
setup(packages=PACKAGES, package_data=package_data, **arguments)
