"""The hardware facts of each visible GPU, from PyTorch and the driver's management library (NVML).

NVML comes with the package nvidia-ml-py. Without it, clocks are those that PyTorch reports, or unknown.
"""

from __future__ import annotations

from typing import Any

import torch

from kernel_ladder.inspection import architecture

#: PyTorch's device properties, by our own names. A property that a release lacks is None.
_PROPERTIES = {
    "multiprocessors": "multi_processor_count",
    "memory": "total_memory",
    "l2": "L2_cache_size",
    "shared_per_sm": "shared_memory_per_multiprocessor",
    "shared_per_block": "shared_memory_per_block_optin",
    "registers_per_sm": "regs_per_multiprocessor",
    "threads_per_sm": "max_threads_per_multi_processor",
    "bus_bits": "memory_bus_width",
}


def gpus() -> list[dict[str, Any]]:
    """Every visible GPU. Memory in bytes, maximum clocks in MHz, memory bus in bits; None if unknown."""
    if not torch.cuda.is_available():
        return []
    return [_gpu(index) for index in range(torch.cuda.device_count())]


def _gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    found: dict[str, Any] = {
        "index": index,
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
    }
    found |= {name: getattr(properties, theirs, None) for name, theirs in _PROPERTIES.items()}
    kilohertz = {"sm_clock_mhz": "clock_rate", "memory_clock_mhz": "memory_clock_rate"}
    for name, theirs in kilohertz.items():
        rate = getattr(properties, theirs, None)
        found[name] = rate // 1000 if rate else None
    found |= {name: value for name, value in _managed(str(properties.uuid)).items() if value is not None}
    found["enables"] = architecture.features(10 * properties.major + properties.minor)
    return found


def _managed(uuid: str) -> dict[str, int | None]:
    """NVML's facts about a GPU; empty if NVML is not available."""
    try:
        import pynvml
    except ImportError:
        return {}
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return {}
    questions = {
        "sm_clock_mhz": lambda gpu: pynvml.nvmlDeviceGetMaxClockInfo(gpu, pynvml.NVML_CLOCK_SM),
        "memory_clock_mhz": lambda gpu: pynvml.nvmlDeviceGetMaxClockInfo(gpu, pynvml.NVML_CLOCK_MEM),
        "bus_bits": lambda gpu: pynvml.nvmlDeviceGetMemoryBusWidth(gpu),
        "power_limit_w": lambda gpu: pynvml.nvmlDeviceGetEnforcedPowerLimit(gpu) // 1000,
    }
    found: dict[str, int | None] = {}
    try:
        # The UUID does not depend on CUDA_VISIBLE_DEVICES, as the index does.
        gpu = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")
        for name, ask in questions.items():
            try:
                found[name] = ask(gpu)
            except (pynvml.NVMLError, AttributeError):  # the GPU or the library does not support the query
                found[name] = None
    except pynvml.NVMLError:
        return {}
    finally:
        pynvml.nvmlShutdown()
    return found


def in_words(gpu: dict[str, Any]) -> list[tuple[str, str]]:
    """A GPU's facts as (title, text), without unknown ones."""

    def joined(*parts: tuple[str, Any]) -> str:
        return ", ".join(text.format(value) for text, value in parts if value)

    def of(name: str, unit: int) -> float | None:
        return gpu[name] / unit if gpu[name] else None

    memory = joined(
        ("{:.1f} GiB", of("memory", 2**30)),
        ("{} MHz", gpu["memory_clock_mhz"]),
        ("{} bits wide", gpu["bus_bits"]),
        ("{:.0f} MiB L2", of("l2", 2**20)),
    )
    sms = joined(("{}", gpu["multiprocessors"]), ("up to {} MHz", gpu["sm_clock_mhz"]))
    each = joined(
        ("{:.0f} KiB shared memory", of("shared_per_sm", 1024)),
        ("{:.0f} KiB of it for one block", of("shared_per_block", 1024)),
        ("{} registers", gpu["registers_per_sm"]),
        ("{} threads", gpu["threads_per_sm"]),
    )
    lines = [("memory", memory), ("SMs", sms), ("each SM", each), ("enables", ", ".join(gpu["enables"]))]
    if gpu.get("power_limit_w"):
        lines.insert(2, ("power", f"limited to {gpu['power_limit_w']} W"))
    return [(title, text) for title, text in lines if text]
