import os

# Workers share the cores, and a thread that spins while it waits for others keeps those from running. (One thread each
# would do as well, but PyTorch's own kernels add up in other orders then.) Read when torch is imported, which is later.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Inductor else starts as many processes as there are cores, once for every worker, each of which imports torch.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
