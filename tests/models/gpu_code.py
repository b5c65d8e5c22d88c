"""``python -m tests.models.gpu_code [FAMILY ...]``: compile patched models to a GPU's code where there is no GPU.

Inductor writes Triton kernels for CPU tensors, and none of them runs. So faults of its code for a GPU show on a CPU, in
the forward pass and in training. It takes a quarter of a minute a family. Results are not looked at.
"""

from __future__ import annotations

import argparse
import os
import sys
from types import SimpleNamespace

os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"

import torch
import torch._inductor.config
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from kernel_ladder import models
from tests.models import families

#: What Inductor asks of Triton's driver: an H100.
HOPPER = SimpleNamespace(
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
    get_current_device=lambda: 0,
    get_current_stream=lambda device=0: 0,
    get_device_interface=lambda: torch.cuda,
    get_active_torch_device=lambda: torch.device("cpu"),
    is_active=lambda: True,
    utils=SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": 232448, "multiprocessor_count": 132}),
)


def pretend() -> None:
    """Let Inductor write Triton kernels for CPU tensors, which neither compile further nor run."""
    torch._inductor.config.cpu_backend = "triton"
    driver.set_active(HOPPER)
    CachingAutotuner.precompile = lambda self, *args, **options: None
    CachingAutotuner.run = lambda self, *args, **options: None


def compile_family(family: str, backend: str) -> None:
    """Compile a tiny model's forward and backward pass, in bfloat16. Raises what Inductor raises."""
    model, given = families.make(family).to(torch.bfloat16), families.inputs(family)
    given = {name: x.to(torch.bfloat16) if x.is_floating_point() else x for name, x in given.items()}
    models.patch(model, backend=backend, report=False)
    output = torch.compile(model.train())(**given)
    found = next(x for x in output.values() if isinstance(x, torch.Tensor) and x.is_floating_point())
    found.float().sum().backward()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.models.gpu_code", description=__doc__.splitlines()[0])
    parser.add_argument("family", nargs="*", default=list(families.FAMILIES), metavar="FAMILY")
    parser.add_argument("--backend", default="triton", help="a level or a rung (default: triton)")
    args = parser.parse_args(argv)
    pretend()
    failed = 0
    for family in args.family:
        torch._dynamo.reset()
        try:
            compile_family(family, args.backend)
            print(f"{family}: compiled", flush=True)
        except Exception as error:
            failed += 1
            print(f"{family}: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
