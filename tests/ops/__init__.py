"""Every operation against its formula in float64."""
