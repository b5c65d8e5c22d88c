"""What operations mean at every level: masks, scales, shapes, strides, dropout's random words."""
