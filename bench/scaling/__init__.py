"""How operations on several GPUs scale: ``torchrun --nproc-per-node N -m bench.scaling``."""
