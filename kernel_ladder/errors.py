"""The errors that the table raises. Argument errors are plain ``TypeError``, ``ValueError`` and ``IndexError``."""


class BackendError(ValueError):
    """The backend that was named does not exist for this operation."""


class UnavailableError(RuntimeError):
    """A level cannot be used on this machine at all: no GPU, no compiler, a failed import."""


class UnsupportedError(NotImplementedError):
    """A variant exists and is available, but does not take these inputs."""


class InspectError(ValueError):
    """What was asked to be looked into does not exist, or cannot be looked into on this machine."""
