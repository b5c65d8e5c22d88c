"""Rungs from outside: a user's own file, and the entry points of installed packages."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import traceback
import warnings
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

from kernel_ladder import level_packages, table
from kernel_ladder.errors import RungFileError

#: The group of entry points that register rungs when they are loaded: a module, or a function without arguments.
GROUP = "kernel_ladder.variants"


def load_file(path: Path, argument: str = "--with") -> list[table.Variant]:
    """Run a file of rungs, once, and return the variants that it registers.

    `argument` names the file in messages.

    Raises:
        RungFileError: the file does not exist, cannot be run, or registers nothing.
    """
    if not path.is_file():
        what = "is a folder, not a file" if path.is_dir() else "does not exist"
        raise RungFileError(f"argument `{argument}`: {path} {what}")
    with contextlib.suppress(ImportError):  # the table says so of the level; a file may have rungs of others
        # Triton decides when a kernel is decorated whether it is interpreted; its level's package sets that.
        level_packages.load(table.LEVELS["triton"])
    before = set(_registered())
    name = _module_name(path)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise RungFileError(f"argument `{argument}`: {path} is no Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        sys.modules.pop(name, None)
        raise RungFileError(f"argument `{argument}`: {path} cannot be run: {told(error, path)}") from error
    found = [variant for variant in _registered() if variant not in before]
    if not found:
        raise RungFileError(
            f"argument `{argument}`: {path} registers no rung; call kernel_ladder.table.register(op, 'level.name', …)"
        )
    return found


def module_of(path: Path) -> ModuleType:
    """The module that :func:`load_file` has made of a file."""
    return sys.modules[_module_name(path)]


def _module_name(path: Path) -> str:
    return f"kernel_ladder_user_{path.stem}"


def _registered() -> list[table.Variant]:
    """What has been registered so far; nothing is loaded for it."""
    return [variant for climb in table._variants.values() for variant in climb.values()]


def told(error: BaseException, path: Path) -> str:
    """An error in one line, with the line of the file that it comes from."""
    inner: BaseException = error
    while inner.__cause__ is not None:  # Triton's interpreter wraps what a kernel raises
        inner = inner.__cause__
    if isinstance(inner, SyntaxError):
        return f"line {inner.lineno}: SyntaxError: {inner.msg}"
    line = ""
    for each in (error, inner):
        for frame in traceback.extract_tb(each.__traceback__):
            if Path(frame.filename).resolve() == path.resolve():
                line = f"line {frame.lineno}: "
    said = str(inner).strip().replace("\n", " ")
    return f"{line}{type(inner).__name__}" + (f": {said}" if said else "")


def load_entry_points() -> None:
    """Load every entry point of the group. What fails is told in one RuntimeWarning."""
    failed = []
    for point in entry_points(group=GROUP):
        try:
            loaded = point.load()
            if callable(loaded):
                loaded()
        except Exception as error:
            failed.append(f"{point.name} ({point.value}): {type(error).__name__}: {error}")
    if failed:
        warnings.warn(
            f"kernel_ladder: entry points of the group {GROUP!r} could not be loaded: {'; '.join(failed)}",
            RuntimeWarning,
            stacklevel=2,
        )
