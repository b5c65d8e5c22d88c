"""``pip install -e .``, plain and with build isolation on, in each state of the machine that it may find.

Every install goes into a fresh environment that sees this one's packages, save the project itself, so that torch is
"installed already" without installing it again.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
import venv
from pathlib import Path

import pytest

from ..__main__ import available_cores

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
NVCC = shutil.which("nvcc") or (
    os.environ.get("CUDA_HOME") and shutil.which("nvcc", path=os.environ["CUDA_HOME"] + "/bin")
)
HIDDEN = (
    "pip",
    "setuptools",
    "wheel",
    "ninja",
    "pybind11",
    "kernel_ladder",
    "__editable__",
    "_distutils_hack",
    "distutils",
)


def sources(folder: Path) -> Path:
    """A copy of what is built, without what was built."""
    skip = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
    for name in (
        "_build",
        "csrc",
        "kernel_ladder",
        "torch_ref",
        "compile_impl",
        "xla_impl",
        "triton_impl",
        "cuda_impl",
    ):
        shutil.copytree(ROOT / name, folder / name, ignore=skip)
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, folder / name)
    return folder


def packages_of(python: Path) -> Path:
    """Where an environment has its packages."""
    query = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(subprocess.run([python, "-c", query], capture_output=True, text=True, check=True).stdout.strip())


@pytest.fixture(scope="session")
def new_pip(tmp_path_factory) -> Path:
    """Packages of a new environment: the pip that comes with Python, which takes seconds to unpack."""
    folder = tmp_path_factory.mktemp("pip")
    venv.create(folder, with_pip=True)
    return packages_of(folder / "bin" / "python")


def environment(folder: Path, new_pip: Path, *, with_packages: bool) -> Path:
    """A new environment's Python; with packages, it sees this environment's through a ``.pth`` file.

    What comes with it lies in `new_pip`, to which no install writes: the project alone is new.
    """
    venv.create(folder / "env", with_pip=False)
    python = folder / "env" / "bin" / "python"
    site = packages_of(python)
    for package in new_pip.iterdir():
        (site / package.name).symlink_to(package)
    if with_packages:
        visible = folder / "visible"
        visible.mkdir()
        for package in Path(sysconfig.get_path("purelib")).iterdir():
            if not package.name.startswith(HIDDEN):
                (visible / package.name).symlink_to(package)
        Path(site, "visible.pth").write_text(f"{visible}\n")
    return python


def clean_environment(**variables: str) -> dict[str, str]:
    dropped = ("CUDA_HOME", "CUDA_PATH", "KERNEL_LADDER_CUDA", "PYTHONPATH", "TORCH_CUDA_ARCH_LIST", "VIRTUAL_ENV")
    dropped += ("COMPILER_PATH",)  # the tests' own linker
    return {**{k: v for k, v in os.environ.items() if k not in dropped}, **variables}


def path_without_nvcc() -> str:
    return os.pathsep.join(p for p in os.environ["PATH"].split(os.pathsep) if not Path(p, "nvcc").exists())


def install(python: Path, folder: Path, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [python, "-m", "pip", "install", "-v", "-e", "."],
        cwd=folder,
        env=clean_environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def run(python: Path, code: str, folder: Path) -> str:
    """Run code in the new environment, from a folder that holds no project."""
    result = subprocess.run(
        [python, "-c", code], cwd=folder, env=clean_environment(), capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


LIST_CUDA = """
import kernel_ladder, torch_ref, compile_impl, xla_impl, triton_impl, cuda_impl
print({name: reason for name, reason in kernel_ladder.backends("gelu").items() if name.startswith("cuda")})
"""


@functools.cache
def no_index() -> str | None:
    """Why pip cannot fetch what a build asks for, or None."""
    asked = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", tempfile.mkdtemp(), "setuptools>=77"]
    result = subprocess.run(asked, env=clean_environment(), capture_output=True, text=True, check=False)
    return None if result.returncode == 0 else "pip reaches no package index, from which a build takes setuptools"


@pytest.fixture
def index() -> None:
    if (reason := no_index()) is not None:
        pytest.skip(reason)


@pytest.fixture
def place(tmp_path, index, new_pip) -> tuple[Path, Path]:
    """An environment that has torch, and a copy of the sources."""
    return environment(tmp_path, new_pip, with_packages=True), sources(tmp_path / "src")


@pytest.mark.skipif(not NVCC, reason="no nvcc: nothing to build the extension with")
@pytest.mark.skipif(
    available_cores() < 4, reason="a second build takes minutes on few cores; `make test` installed by the same command"
)
def test_torch_installed_and_nvcc_found(place, tmp_path):
    import torch

    python, folder = place
    # One architecture and little optimisation, to be quick: what is proven here is the way there, not each kernel.
    # (With none at all there is so much more code that assembling it takes longer than was saved.)
    quick = {"TORCH_CUDA_ARCH_LIST": "8.0", "NVCC_APPEND_FLAGS": "-Xcicc -O1 -Xptxas -O0"}
    cuda_home = {"CUDA_HOME": os.environ["CUDA_HOME"]} if "CUDA_HOME" in os.environ else {}
    result = install(python, folder, **quick, **cuda_home)
    assert result.returncode == 0, result.stdout[-4000:]
    assert f"torch {torch.__version__} in {tmp_path / 'visible' / 'torch'}" in result.stdout
    for word in ("Collecting torch", "Downloading torch"):
        assert word not in result.stdout, "the build must use the torch that is there"
    assert list((folder / "kernel_ladder").glob("_C.*.so")), "an editable install builds in place"
    found = run(python, LIST_CUDA, tmp_path)
    assert "cuda.naive" in found
    assert "was not built" not in found
    # What is imported is the source tree, so an edit is seen at once.
    assert run(python, "import torch_ref; print(torch_ref.__file__)", tmp_path) == str(folder / "torch_ref/__init__.py")


def test_no_nvcc(place, tmp_path):
    python, folder = place
    result = install(python, folder, PATH=path_without_nvcc())
    assert result.returncode == 0, result.stdout[-4000:]
    assert "kernel_ladder: no nvcc found: installing without the cuda level" in result.stdout
    assert "Collecting torch" not in result.stdout
    assert "kernel_ladder._C was not built" in run(python, LIST_CUDA, tmp_path)
    assert "tests" not in run(python, "import kernel_ladder, sys; print(*sys.modules)", tmp_path).split()

    required = install(python, folder, PATH=path_without_nvcc(), KERNEL_LADDER_CUDA="1")
    assert required.returncode != 0
    assert "kernel_ladder: KERNEL_LADDER_CUDA=1 but no nvcc was found" in required.stdout
    assert "Traceback" not in required.stdout.partition("kernel_ladder: KERNEL_LADDER_CUDA=1")[0]


def test_cuda_switched_off(place, tmp_path):
    python, folder = place
    result = install(python, folder, KERNEL_LADDER_CUDA="0")
    assert result.returncode == 0, result.stdout[-4000:]
    assert "kernel_ladder: KERNEL_LADDER_CUDA=0: installing without the cuda level" in result.stdout
    assert "kernel_ladder._C was not built" in run(python, LIST_CUDA, tmp_path)

    wrong = install(python, folder, KERNEL_LADDER_CUDA="yes")
    assert wrong.returncode != 0
    assert "kernel_ladder: KERNEL_LADDER_CUDA must be 0 or 1, got 'yes'" in wrong.stdout


@pytest.mark.skipif(not NVCC, reason="no nvcc: torch is no build requirement")
def test_torch_is_a_build_requirement_where_there_is_none(tmp_path, index, new_pip):
    python, folder = environment(tmp_path, new_pip, with_packages=False), sources(tmp_path / "src")
    # A constraint that no torch meets shows what the build asks for, without a download of gigabytes.
    (tmp_path / "constraints").write_text("torch==0\n")
    constraint = str(tmp_path / "constraints")
    cuda_home = {"CUDA_HOME": os.environ["CUDA_HOME"]} if "CUDA_HOME" in os.environ else {}
    result = install(python, folder, PIP_CONSTRAINT=constraint, PIP_BUILD_CONSTRAINT=constraint, **cuda_home)
    assert result.returncode != 0
    assert "torch>=2.11" in result.stdout
    backend_dependencies = result.stdout.partition("backend dependencies")[2]
    assert "torch==0" in backend_dependencies, result.stdout[-4000:]


#: TORCH_CUDA_ARCH_LIST, the visible GPUs, and what is compiled for.
@pytest.mark.parametrize(
    ("requested", "capabilities", "expected", "said"),
    [
        (None, [], "8.0;9.0a", ""),
        (None, [(9, 0), (9, 0), (8, 6)], "8.6;9.0a", ""),
        (None, [(12, 0), (10, 0)], "10.0;12.0", ""),
        (None, [(7, 5), (8, 9)], "8.9", "GPUs of 7.5 are left out"),
        (None, [(7, 5), (7, 0)], None, "GPUs of 7.0, 7.5 are left out"),
        ("8.0+PTX", [(7, 5)], "8.0+PTX", ""),
        ("8.0 9.0", [], "8.0;9.0", ""),
        ("8.0;9.0;9.0a", [], "8.0;9.0a", "9.0 is left out"),
    ],
)
def test_what_is_compiled_for(requested, capabilities, expected, said, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "_build"))
    import architectures

    assert architectures.wanted(requested, capabilities) == expected
    printed = capsys.readouterr().err
    assert said in printed
    assert printed.count("\n") == bool(said), "one sentence"


def test_what_nvcc_embeds(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "_build"))
    import architectures
    from torch.utils import cpp_extension

    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0+PTX;9.0a")
    flags = cpp_extension._get_cuda_arch_flags()
    assert architectures.codes(flags) == ["compute_80", "sm_80", "sm_90a"]
    several = ["-gencode=arch=compute_90,code=[compute_90,sm_90]", "-gencode", "arch=compute_80,code=sm_86"]
    assert architectures.codes(several) == ["compute_90", "sm_86", "sm_90"]


@pytest.mark.skipif(not NVCC, reason="no nvcc: the cuda level is left out in any case")
def test_a_machine_of_old_gpus_alone_installs_without_the_cuda_level(place, tmp_path):
    python, folder = place
    setup = folder / "setup.py"
    pretended = "def visible_capabilities() -> list[tuple[int, int]]:\n    return [(7, 5)]\n\n\ndef files("
    setup.write_text(setup.read_text().replace("def files(", pretended))
    cuda_home = {"CUDA_HOME": os.environ["CUDA_HOME"]} if "CUDA_HOME" in os.environ else {}
    result = install(python, folder, **cuda_home)
    assert result.returncode == 0, result.stdout[-4000:]
    assert "needs compute capability 8.0 or later: GPUs of 7.5 are left out" in result.stdout
    assert "kernel_ladder: no visible GPU is left: installing without the cuda level" in result.stdout
    assert "kernel_ladder._C was not built" in run(python, LIST_CUDA, tmp_path)

    required = install(python, folder, KERNEL_LADDER_CUDA="1", **cuda_home)
    assert required.returncode != 0
    assert "kernel_ladder: KERNEL_LADDER_CUDA=1 but no visible GPU can run the cuda level" in required.stdout


#: Kernels that read by once(), on which the compiler crashed for Blackwell, of as little code as there is. `make
#: architectures` compiles everything.
SAMPLE = [("swiglu.cu", "10.0a"), ("swiglu.cu", "12.0"), ("add_rms_norm.cu", "12.0")]


@pytest.mark.skipif(not NVCC, reason="no nvcc: nothing is compiled")
@pytest.mark.parametrize(("name", "architecture"), SAMPLE)
def test_a_file_compiles_for_blackwell(name, architecture, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "_build"))
    import architectures

    (found,) = architectures.check([f"csrc/{name}"], [architecture], 1)
    assert not found.errors
    assert found.kernels > 0
    assert "1 of 1 compiled" in capsys.readouterr().out


@pytest.mark.skipif(not NVCC, reason="no nvcc: nothing is compiled")
def test_a_file_that_does_not_compile_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "_build"))
    import architectures

    (tmp_path / "wrong.cu").write_text("#error of the test\n")
    monkeypatch.setattr(architectures, "ROOT", tmp_path)
    (found,) = architectures.check(["wrong.cu"], ["12.0"], 1)
    assert "of the test" in found.errors
    printed = capsys.readouterr().out
    assert "FAILED" in printed
    assert "0 of 1 compiled" in printed


def test_a_toolkit_that_cannot_compile_says_so(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "_build"))
    from environment import check_toolkit

    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(
        "#!/bin/sh\necho 'x.h(1): error: unsupported GNU version! gcc versions later than 13' >&2\nexit 1\n"
    )
    nvcc.chmod(0o755)
    with pytest.raises(SystemExit, match=r"(?s)unsupported GNU version.*set CC and CXX.*KERNEL_LADDER_CUDA=0"):
        check_toolkit(tmp_path)


def test_every_file_is_compiled_once_and_its_group_again_when_it_changes(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "_build"))
    import together

    csrc = tmp_path / "csrc"
    shutil.copytree(ROOT / "csrc", csrc)
    listed = [tmp_path / path for path in together.sources(tmp_path)]
    groups = [path for path in listed if not path.is_relative_to(csrc)]
    included = [csrc / line.split('"')[1] for group in groups for line in group.read_text().splitlines()]
    compiled = included + [path for path in listed if path not in groups]
    assert sorted(compiled) == sorted(path for path in csrc.rglob("*") if path.suffix in (".cu", ".cpp"))

    def renewed() -> set[str]:
        before = {group: group.stat().st_mtime_ns for group in groups}
        together.sources(tmp_path)
        return {group.stem for group in groups if group.stat().st_mtime_ns != before[group]}

    assert not renewed()
    later = time.time() + 1000
    os.utime(csrc / "gelu.cu", (later, later))
    assert renewed() == {"elementwise"}


def test_the_source_distribution_carries_what_the_build_needs(tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    folder = sources(tmp_path / "src")
    subprocess.run([sys.executable, "setup.py", "-q", "sdist"], cwd=folder, env=clean_environment(), check=True)

    (archive,) = (folder / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    wanted = {str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*") if p.is_file()}
    wanted |= {str(p.relative_to(ROOT)) for p in (ROOT / "_build").glob("*.py")}
    assert wanted | {"setup.py", "torch_ref/gelu.py"} <= names
