"""PyTorch level: the naive formula and the spec of every operation, beside PyTorch's own function."""


def unavailable() -> str | None:
    """PyTorch is always there."""
    return None
