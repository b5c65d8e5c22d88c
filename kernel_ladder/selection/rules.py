"""Rules: for some calls other rungs of a level are faster than its last. Files of this package have some.

A rule takes the inputs and options of a call and returns the names of the rungs to try before the others, best first.
A rung that does not support the call is passed over, and a name that is not registered is ignored. Rules depend on
shapes, dtypes, strides and the GPU alone: the same call is always given to the same rung.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable

from kernel_ladder.spec import Inputs, Options

Rule = Callable[[Inputs, Options], tuple[str, ...]]

#: Files of this package that have no rules.
WITHOUT_RULES = frozenset(
    ("choosers", "features", "kinds", "matmul_parts", "measured", "orders", "rules", "small", "tables")
)


def reason_of(rule: Rule) -> str:
    """What a rule prefers, as a reader of the choice sees it: its docstring's first line, without roles of Sphinx."""
    first = (rule.__doc__ or "").strip().partition("\n")[0]
    return f"rule: {re.sub(r':[a-z]+:`~?', '`', first)}"


def _collected() -> dict[tuple[str, str], Rule]:
    """The ``RULES`` of every file beside this one, by operation and level."""
    import kernel_ladder.selection as package

    found: dict[tuple[str, str], Rule] = {}
    for file in pkgutil.iter_modules(package.__path__):
        if file.name in WITHOUT_RULES:
            continue
        rules = importlib.import_module(f"{package.__name__}.{file.name}").RULES
        assert not found.keys() & rules.keys(), f"two rules for {found.keys() & rules.keys()}"
        found.update(rules)
    return found


#: The rule of an operation at a level, or for ``"auto"`` on a GPU, where there is one.
RULES: dict[tuple[str, str], Rule] = _collected()
