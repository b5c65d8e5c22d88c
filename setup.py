"""Build ``kernel_ladder._C`` from ``csrc`` where nvcc is found; install the Python levels everywhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent

#: Without TORCH_CUDA_ARCH_LIST and without a GPU: Ampere for mma.sync and cp.async, Hopper with wgmma and TMA.
DEFAULT_ARCHITECTURES = "8.0;9.0a"
#: The stable ABI of torch 2.11, the oldest release that the extension runs with.
TORCH_TARGET_VERSION = "0x020b000000000000ULL"

PACKAGES = ["kernel_ladder", "torch_ref", "compile_impl", "triton_impl", "cuda_impl"]


def say(message: str) -> None:
    print(f"kernel_ladder: {message}", file=sys.stderr)


def find_cuda_home() -> Path | None:
    """The toolkit: CUDA_HOME, else CUDA_PATH, else where the nvcc on the PATH says that it lives."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if home := os.environ.get(name):
            return Path(home) if (Path(home) / "bin" / "nvcc").exists() else None
    if not (nvcc := shutil.which("nvcc")):
        return None
    # A wrapper or link can stand on the PATH; a dry run names the real place in its line "#$ _HERE_=…/bin".
    dry_run = subprocess.run([nvcc, "--dryrun", "x.cu"], capture_output=True, text=True, check=False).stderr
    for line in dry_run.splitlines():
        if line.startswith("#$ _HERE_="):
            return Path(line.partition("=")[2]).resolve().parent
    return Path(nvcc).resolve().parent.parent


def visible_architecture() -> str | None:
    import torch

    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    return f"{major}.{minor}{'a' if major == 9 else ''}"  # wgmma and setmaxnreg need the 'a'


def extension(cuda_home: Path) -> dict:
    """Arguments for ``setup`` that build the extension."""
    os.environ["CUDA_HOME"] = str(cuda_home)
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", visible_architecture() or DEFAULT_ARCHITECTURES)
    os.environ.setdefault("MAX_JOBS", str(os.cpu_count() or 1))
    import pybind11
    from setuptools import Extension
    from torch.utils import cpp_extension

    cpp_extension.CUDA_HOME = str(cuda_home)  # a CPU-only torch does not look for it
    include_dirs = [str(ROOT / "csrc"), pybind11.get_include(), *cpp_extension.include_paths(), f"{cuda_home}/include"]
    libraries_home = next(d for d in ("lib64", "lib", "targets/x86_64-linux/lib") if (cuda_home / d).exists())
    defines = [("TORCH_TARGET_VERSION", TORCH_TARGET_VERSION)]
    module = Extension(
        "kernel_ladder._C",
        sources=sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*") if p.suffix in (".cu", ".cpp")),
        depends=sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*") if p.suffix in (".cuh", ".h")),
        include_dirs=include_dirs,
        define_macros=defines,
        library_dirs=[*cpp_extension.library_paths(), str(cuda_home / libraries_home)],
        # The CUDA runtime is linked statically, so that the module imports on a machine without one.
        libraries=["c10", "torch_cpu", "cudart_static", "dl", "rt", "pthread"],
        # libtorch.so brings libtorch_cuda along, whose stream the kernels launch on; no symbol of its own asks for it.
        extra_link_args=["-Wl,--no-as-needed", "-ltorch"],
        extra_compile_args={
            "cxx": ["-O3", "-std=c++17", "-Wall", "-fvisibility=hidden"],
            "nvcc": ["-O3", "-std=c++17", "-lineinfo", "--threads=1", "-Xcompiler=-Wall"],
        },
        language="c++",
    )
    say(f"building for {os.environ['TORCH_CUDA_ARCH_LIST']} with {cuda_home}/bin/nvcc")
    return {
        "ext_modules": [module],
        "cmdclass": {"build_ext": cpp_extension.BuildExtension.with_options(no_python_abi_suffix=False)},
    }


def cuda_arguments() -> dict:
    """KERNEL_LADDER_CUDA: unset builds where it can, 1 must build, 0 does not."""
    wanted = os.environ.get("KERNEL_LADDER_CUDA", "")
    if wanted not in ("", "0", "1"):
        sys.exit(f"kernel_ladder: KERNEL_LADDER_CUDA must be 0 or 1, got {wanted!r}")
    if wanted == "0":
        say("KERNEL_LADDER_CUDA=0: installing without the cuda level")
        return {}
    home = find_cuda_home()
    if home is None:
        if wanted == "1":
            sys.exit("kernel_ladder: KERNEL_LADDER_CUDA=1 but no nvcc was found; put it on the PATH or set CUDA_HOME")
        say("no nvcc found: installing without the cuda level (set CUDA_HOME and install again to add it)")
        return {}
    return extension(home)


setup(packages=PACKAGES, **cuda_arguments())
