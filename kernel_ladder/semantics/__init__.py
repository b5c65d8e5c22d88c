"""The meaning of operations that all levels share: masks, scales, shapes, strides, dropout's random words."""
