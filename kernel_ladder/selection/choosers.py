"""What puts rungs before the order of a ladder on a GPU: a measurement, a table of measured choices, or a rule.

A chooser stands for a backend's name. It remembers its choice by the kind of the call
(:mod:`kernel_ladder.selection.kinds`) and its GPU, so that a repeated call costs one look-up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from kernel_ladder import gpu
from kernel_ladder.selection import measured, tables
from kernel_ladder.selection.features import FEATURES
from kernel_ladder.selection.kinds import KINDS, Kind, of_any
from kernel_ladder.selection.rules import Rule, reason_of
from kernel_ladder.spec import Inputs, Options
from kernel_ladder.table import Variant
from kernel_ladder.tracing import wants_gradient

#: Choices that a chooser remembers.
MAX_KNOWN = 4096
_grad_enabled = torch.is_grad_enabled  # a module's global, because every call reads it
_deterministic = torch.are_deterministic_algorithms_enabled


class Choice(NamedTuple):
    """The names of the rungs to try first, and why."""

    names: tuple[str, ...]
    reason: str


class Chooser:
    """Chooses among the rungs that a backend's name stands for.

    Args:
        op, backend: the operation and the name, a level's or ``"auto"``.
        order: the rungs in the order in which they are tried after what is chosen.
        rule: names rungs to try before those, or None.
        levels: for ``"auto"``, the chooser of each level and its rungs from the last to the first.
    """

    def __init__(
        self,
        op: str,
        backend: str,
        order: Sequence[Variant],
        rule: Rule | None,
        levels: dict[str, tuple[Rule, Sequence[Variant]]] | None = None,
    ) -> None:
        self.op, self.backend, self.order, self.rule, self.levels = op, backend, order, rule, levels
        self._rungs = {v.name: v for v in order}
        self._features = FEATURES.get(op)
        self._measures = measured.enabled()
        self._kind = KINDS.get(op, of_any)
        self._several = gpu.count() > 1
        self._names: dict[Kind, tuple[str, ...]] = {}
        self._reasons: dict[Kind, str] = {}
        #: The rule that this chooser applies: the names to try first.
        self.rule_of_names: Rule = self._repeated()

    def _repeated(self) -> Rule:
        """The function that every call runs: a look-up, in a closure because an attribute takes time."""
        known, kind_of, first, grad_enabled = self._names, self._kind, self._first, _grad_enabled
        several, measures = self._several, self._measures

        def names(inputs: Inputs, options: Options) -> tuple[str, ...]:
            gradient = False
            if grad_enabled():
                for x in inputs:
                    if x is not None and x.requires_grad:
                        gradient = True
                        break
            kind = kind_of(inputs, options, gradient)
            if several:
                kind = (*kind, inputs[0].get_device())  # type: ignore[union-attr]
            if measures:  # rungs that refuse deterministic calls are not timed
                kind = (*kind, _deterministic())
            try:
                return known[kind]
            except KeyError:
                return first(kind, inputs, options).names
            except TypeError:  # symbols of torch.compile have no hash
                return self._choice(inputs, options, None).names

        return names

    def choice(self, inputs: Inputs, options: Options) -> Choice:
        """The names to try first, with the reason."""
        kind = self._kind(inputs, options, wants_gradient(*inputs))
        if self._several:
            kind = (*kind, inputs[0].get_device())  # type: ignore[union-attr]
        if self._measures:
            kind = (*kind, _deterministic())
        if kind in self._names:
            return Choice(self._names[kind], self._reasons[kind])
        return self._first(kind, inputs, options)

    def _first(self, kind: Kind, inputs: Inputs, options: Options) -> Choice:
        """The choice of a kind of call that was not met before."""
        found = self._choice(inputs, options, kind)
        if self._measures and not found.reason.startswith("measured") and not measured.can_time(inputs):
            return found  # a later call may be timed
        if len(self._names) >= MAX_KNOWN:
            self._names.clear()
            self._reasons.clear()
        self._names[kind], self._reasons[kind] = found
        return found

    def _choice(self, inputs: Inputs, options: Options, kind: Kind | None) -> Choice:
        rule = () if self.rule is None else self.rule(inputs, options)
        if self._measures and kind is not None and not self._is_for_rules(inputs, options):
            found = measured.choice(
                self.op, self.backend, kind, lambda: self._contenders(rule, inputs, options), inputs, options
            )
            if found is not None:
                return Choice(self._expanded(found.name, inputs, options), found.reason)
        from_table = self._tabled(rule, inputs, options)
        if from_table is not None:
            return from_table
        if rule:
            assert self.rule is not None
            return Choice(rule, reason_of(self.rule))
        return Choice((), "order")

    def _is_for_rules(self, inputs: Inputs, options: Options) -> bool:
        """Whether rules alone choose: a time that repeats does not tell what the call takes."""
        return self._features is not None and not self._features(inputs, options).category

    def _tabled(self, rule: tuple[str, ...], inputs: Inputs, options: Options) -> Choice | None:
        """The choice of the GPU's table, or None where the rule's stays."""
        x = inputs[0]
        assert x is not None
        if self._features is None or (table := tables.of_device(x.get_device())) is None:
            return None
        pass_ = tables.TRAINING if wants_gradient(*inputs) else tables.FORWARD
        entries = table.entries.get((self.op, self.backend, pass_))
        if entries is None or not (features := self._features(inputs, options)).category:
            return None
        usual = next(self._supported(rule, inputs, options), None)
        if usual is None:
            return None
        name = usual.name if self.levels is None else usual.level
        entry = tables.better_than(name, entries, features)
        if entry is None or entry.better is None:
            return None
        reason = f"table {table.name}: {entry.gain:.2f}x the rule's choice at {entry.call}, {pass_}"
        return Choice(self._expanded(entry.better, inputs, options), reason)

    def _expanded(self, name: str, inputs: Inputs, options: Options) -> tuple[str, ...]:
        """A rung's name alone; for a level's name the level's own choice, then all of its rungs."""
        if self.levels is None or name not in self.levels:
            return (name,)
        choose, rungs = self.levels[name]
        return (*choose(inputs, options), *(v.name for v in rungs))

    def _supported(self, first: Sequence[str], inputs: Inputs, options: Options) -> Iterator[Variant]:
        """The rungs that take the call, in the order without table and measurement."""
        order = dict.fromkeys([*(self._rungs[name] for name in first if name in self._rungs), *self.order])
        seen = set()
        for rung in order if self.levels is None else self._by_levels(order, inputs, options):
            if rung not in seen and rung.unsupported(*inputs, **options) is None:
                yield rung
            seen.add(rung)

    def _by_levels(self, order: Iterable[Variant], inputs: Inputs, options: Options) -> Iterator[Variant]:
        """The order of ``"auto"``: before the first rung of each level what the level's chooser names.

        A chooser is asked when its level's turn comes: most calls go to the first.
        """
        assert self.levels is not None
        seen: set[str] = set()
        for rung in order:
            if rung.level in self.levels and rung.level not in seen:
                seen.add(rung.level)
                choose, rungs = self.levels[rung.level]
                by_name = {v.name: v for v in rungs}
                yield from (by_name[name] for name in choose(inputs, options) if name in by_name)
            yield rung

    def _contenders(self, rule: tuple[str, ...], inputs: Inputs, options: Options) -> list[Variant]:
        """The rungs to time: the first in order, and the last ones of each ladder that take the call."""
        taken = list(self._supported(rule, inputs, options))
        found = dict.fromkeys(taken[:1])
        for level in dict.fromkeys(v.level for v in taken):
            last = [v for v in self.order if v.level == level and v in taken]
            found.update(dict.fromkeys(last[: measured.CONTENDERS]))
        return list(found)
