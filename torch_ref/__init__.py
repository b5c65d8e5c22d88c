"""The torch level: each operation's naive formula, its spec, and PyTorch's own function."""


def unavailable() -> str | None:
    """PyTorch is always available."""
    return None
