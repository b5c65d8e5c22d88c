"""Whole models, patched and not: forward pass, training step and decoding of Hugging Face's models.

    python -m bench patched                                   # every model, every way
    python -m bench patched --model llama --by plain,cuda     # some

A way is who patched the model (nobody, Liger, or this package at a backend), and whether torch.compile compiles it.
Each runs in a process of its own, as Liger replaces functions of whole modules and a peak of memory is a process's.
"""
