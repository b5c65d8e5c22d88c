"""Kernels of layer_norm, rms_norm and add_rms_norm: one family, told apart by compile-time flags."""
