"""Find the levels' packages beside this one, even if ``sys.path`` holds other modules of the same names."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).resolve().parent.parent

#: Packages that import another level's.
_NEEDS = {"compile_impl": "torch_ref"}


def load(name: str) -> ModuleType:
    """The package of a level, imported from the folder that holds ``kernel_ladder``.

    Raises:
        ImportError: a module of that name was imported from elsewhere, or the package itself raises it.
    """
    if name in _NEEDS:
        load(_NEEDS[name])
    found = sys.modules.get(name)
    if found is None:
        return _import(name)
    places = [found.__file__] if getattr(found, "__file__", None) else list(getattr(found, "__path__", []))
    if not any(Path(place).resolve().is_relative_to(FOLDER / name) for place in places if place):
        where = ", ".join(map(str, places)) or "elsewhere"
        raise ImportError(
            f"a module {name!r} has been imported from {where}, "
            f"in the way of kernel_ladder's own in {FOLDER}; rename it"
        )
    return found


def _import(name: str) -> ModuleType:
    spec = PathFinder.find_spec(name, [str(FOLDER)])
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"No module named {name!r} beside kernel_ladder in {FOLDER}", name=name)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return sys.modules[name]
