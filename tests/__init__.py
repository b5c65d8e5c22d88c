import os
from pathlib import Path

# Workers share the cores, and a thread that spins while it waits for others keeps those from running. (One thread each
# would do as well, but PyTorch's own kernels add up in other orders then.) Read when torch is imported, which is later.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Inductor else starts as many processes as there are cores, once for every worker, each of which imports torch.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# XLA else times every product in many ways before it compiles it. Read when JAX is imported, which is later.
os.environ.setdefault("XLA_FLAGS", "--xla_gpu_autotune_level=0")
# XLA's programs are kept between runs. Read when JAX is imported, which is later.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).resolve().parents[1] / "build" / "tests" / "xla"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
