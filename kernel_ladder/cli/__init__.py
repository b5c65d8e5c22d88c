"""The commands of ``python -m kernel_ladder``."""
