"""The errors that the table raises. Argument errors are plain ``TypeError``, ``ValueError`` and ``IndexError``."""

import torch


class BackendError(ValueError):
    """The backend that was named does not exist for this operation."""


class UnavailableError(RuntimeError):
    """A level cannot be used on this machine: no GPU, no compiler, or a failed import."""


class UnsupportedError(NotImplementedError):
    """A rung exists and is available, but does not take these inputs."""


class VariableError(ValueError):
    """An environment variable of this package has a value that is not accepted."""


class InspectError(ValueError):
    """The rung or kernel to inspect does not exist, or cannot be inspected on this machine."""


class ExerciseError(ValueError):
    """What was asked of an exercise does not exist, or would overwrite a file."""


class RungFileError(ValueError):
    """A user's file of rungs does not exist, cannot be run, or registers nothing."""


#: Parts of out-of-memory messages: of the CUDA level's operators, of XLA, and of Triton.
_SIGNS_OF_MEMORY = ("could not allocate", "RESOURCE_EXHAUSTED", "Triton Error [CUDA]: out of memory")


def is_for_memory(error: Exception) -> bool:
    """Whether an error means out of memory. PyTorch's stable ABI, Triton and XLA have no type for it."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS_OF_MEMORY)


def raise_for_memory(error: RuntimeError) -> None:
    """Raise PyTorch's OutOfMemoryError if `error` means out of memory, so that callers can catch that type."""
    if is_for_memory(error) and not isinstance(error, torch.OutOfMemoryError):
        raise torch.OutOfMemoryError(str(error)) from error
