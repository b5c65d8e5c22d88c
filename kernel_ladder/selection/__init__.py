"""Selection: which rung ``backend="cuda"``, ``"triton"`` or ``"auto"`` stands for, for these inputs on this GPU.

A rung's own name means that rung and nothing else. A level's name means its rungs from the last to the first;
``"auto"`` means the rungs that :mod:`kernel_ladder.selection.orders` lists. The first that supports the call is taken.
Where another order is faster, a measurement, a table of measured choices or a rule names the rungs to try first. See
:mod:`kernel_ladder.selection.measured`, ``tables`` and ``rules``. Host code of kernels chooses nothing. :func:`explain`
tells why rungs were passed over, :func:`why` why one was taken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch.autograd import forward_ad
from torch.compiler import is_compiling

from kernel_ladder import gpu, table
from kernel_ladder.errors import BackendError, UnavailableError, UnsupportedError
from kernel_ladder.selection import measured, tables
from kernel_ladder.selection.orders import ORDERS
from kernel_ladder.selection.rules import RULES, Rule, reason_of
from kernel_ladder.spec import Inputs, Options
from kernel_ladder.table import LEVELS, Variant, asked_for, source_of
from kernel_ladder.transforms import is_wrapped, transforms_active

if TYPE_CHECKING:
    from kernel_ladder.selection.choosers import Chooser


class Preferred(NamedTuple):
    """A rule, the rungs among which it chooses, and the chooser that applies it, or None."""

    rule: Rule
    rungs: dict[str, Variant]
    chooser: Chooser | None = None


#: Levels among which "auto" chooses by tables and measurements. The compile level must trace a call first.
MEASURED_LEVELS = ("torch", "triton", "cuda")

#: Candidates of calls met before, by operation, backend and device type.
_known: dict[tuple[str, str, bool], tuple[Variant | Preferred, ...]] = {}
table.on_change(_known.clear)


def resolve(op: str, backend: str | None, inputs: Inputs, options: Options) -> Variant:
    """The rung that `backend` names for these inputs.

    Args:
        op: an operation's name.
        backend: a rung's name, a level's name or ``"auto"``; None is what :func:`kernel_ladder.use` chose, else the
            environment's ``KERNEL_LADDER_BACKEND``, else ``"auto"``.
        inputs: the call's tensors, None for one that is absent.
        options: the call's keyword arguments.

    Raises:
        BackendError: no such backend. UnavailableError: not on this machine. UnsupportedError: not for these inputs.
    """
    return choose(op, backend, inputs, options, is_compiling())


def choose(
    op: str, backend: str | None, inputs: Inputs, options: Options, compiling: bool, source: str | None = None
) -> Variant:
    """:func:`resolve`, for a caller who knows already whether torch.compile is tracing.

    `source` is how messages begin, where the caller knows it too (:func:`kernel_ladder.table.source_of`).
    """
    given = backend
    if type(backend) is not str:  # the common case needs no call
        backend = asked_for(op, backend)
    call = (op, backend, inputs[0].is_cuda)
    candidates = None if compiling else _known.get(call)
    if candidates is None:
        candidates = _candidates(*call, source_of(given) if source is None else source, not compiling)
        if not compiling:
            _known[call] = candidates
    followed = transforms_active() or forward_ad._current_level >= 0
    for candidate in candidates:
        if isinstance(candidate, Preferred):
            for name in candidate.rule(inputs, options):
                preferred = candidate.rungs.get(name)
                if (
                    preferred is not None
                    and not (followed and _not_followed(preferred, inputs, compiling))
                    and preferred.unsupported(*inputs, **options) is None
                ):
                    return preferred
            continue
        if followed and _not_followed(candidate, inputs, compiling):
            continue
        if candidate.unsupported(*inputs, **options) is None:
            return candidate
    why = _refusal(backend, candidates, inputs, options, followed, compiling)
    raise UnsupportedError(f"{op}: {source_of(given) if source is None else source}{why}")


def check(op: str, backend: str | None) -> None:
    """Raise as every call with this backend would, whatever its inputs.

    Raises:
        TypeError: `backend` is neither a str nor None. BackendError: no such backend. UnavailableError: not here.
    """
    _candidates(op, asked_for(op, backend), False, source_of(backend), tabled=False)


def explain(op: str, backend: str | None, inputs: Inputs, options: Options) -> list[tuple[str, str | None]]:
    """The rungs in the order in which this call tries them, up to the one taken, each with why it was passed over.

    The reason of the rung taken is None. Where none is taken every rung has a reason.
    """
    backend = asked_for(op, backend)
    followed = transforms_active() or forward_ad._current_level >= 0
    tried: list[tuple[str, str | None]] = []
    for rung in _in_order(_candidates(op, backend, inputs[0].is_cuda, ""), inputs, options):
        reason = (_not_followed(rung, inputs, False) if followed else None) or rung.unsupported(*inputs, **options)
        tried.append((rung.name, reason))
        if reason is None:
            break
    return tried


def preferred_first(rungs: list[Variant], inputs: Inputs, options: Options) -> list[Variant]:
    """The rungs of one level in the order in which a call by the level's name tries them; `rungs`, last to first."""
    first = inputs[0]
    return _in_order(_with_rules(rungs[0].op, tuple(rungs), first is not None and first.is_cuda), inputs, options)


def why(op: str, backend: str | None, inputs: Inputs, options: Options) -> str:
    """Why a call takes its rung: a measurement, a table, a rule, or the order of the ladder.

    A rung that is asked for by its own name is "named". The reason is that of the order in which rungs are tried:
    :func:`explain` tells which of them refuse the call.
    """
    backend = asked_for(op, backend)
    if backend not in ("auto", *LEVELS):
        return "named"
    taken = explain(op, backend, inputs, options)[-1][0]
    for candidate in _candidates(op, backend, inputs[0].is_cuda, ""):
        if not isinstance(candidate, Preferred):
            if candidate.name == taken:
                break
            continue
        if candidate.chooser is not None:
            names, reason = candidate.chooser.choice(inputs, options)
        else:
            names = candidate.rule(inputs, options)
            reason = reason_of(candidate.rule)
        if taken in names:
            return reason
    return f"order: the {'first' if backend == 'auto' else 'last rung'} that takes the call"


def _in_order(candidates: tuple[Variant | Preferred, ...], inputs: Inputs, options: Options) -> list[Variant]:
    """The rungs in the order in which :func:`choose` tries them, each once."""
    order: dict[Variant, None] = {}
    for candidate in candidates:
        if isinstance(candidate, Preferred):
            names = candidate.rule(inputs, options)
            order.update((candidate.rungs[name], None) for name in names if name in candidate.rungs)
        else:
            order[candidate] = None
    return list(order)


def _not_followed(variant: Variant, inputs: Inputs, compiling: bool) -> str | None:
    """Why a rung is not for these inputs inside a transform that must see PyTorch's operators, or None."""
    # Where torch.compile traces the caller, the compile level is the formula.
    if variant.backward is None and (variant.level == "torch" or (compiling and variant.level == "compile")):
        return None
    given = [x for x in inputs if x is not None]
    if transforms_active():
        # Inside a transform, tensors from outside look plain, except to autograd and to torch.compile.
        if compiling or variant.level == "compile" or any(x.requires_grad or is_wrapped(x) for x in given):
            return "torch.func (vmap, grad, jvp and so on) follows PyTorch's own operators alone; use backend='torch'"
    elif compiling or any(forward_ad.unpack_dual(x).tangent is not None for x in given):
        return "forward-mode differentiation follows PyTorch's own operators alone; use backend='torch'"
    return None


def _candidates(
    op: str, backend: str, on_gpu: bool, source: str, tabled: bool = True
) -> tuple[Variant | Preferred, ...]:
    """What a backend's name may stand for, in the order to try; there is at least one rung.

    `tabled`: tables and measurements count, not rules alone. torch.compile can't trace them.
    """
    if tabled and not on_gpu and backend in ("auto", *LEVELS) and measured.enabled():
        measured.warn_of_cpu()
    if backend == "auto":
        first = ORDERS[op] if on_gpu else ()
        # Rungs that the order leaves out come last: they alone take some inputs.
        named = {name.partition(".")[0] for name in first}
        names = [
            *first,
            table.spec(op).baseline,
            "torch.naive",
            *(each for each in ("triton", "cuda") if each in named),
        ]
        rungs = dict.fromkeys(v for name in names for v in _available(op, name))
        return _with_rules(op, tuple(rungs), on_gpu and tabled, auto=on_gpu)
    level = table.level_of(backend)
    if level is None:
        raise BackendError(table.unknown_backend(op, backend, table.known_to(op), source))
    reason, climb = table.at_level(op, level)
    if backend != level and climb and backend not in climb:
        raise BackendError(table.unknown_backend(op, backend, table.known_to(op), source))
    if reason is not None:
        raise UnavailableError(f"{op}: {source}backend {backend!r} is unavailable: {reason}")
    rungs_of_level = tuple(_available(op, backend))
    return _with_rules(op, rungs_of_level, on_gpu and tabled) if backend == level else rungs_of_level


#: Operations whose rules take microseconds of arithmetic on sizes and strides.
REMEMBERED = frozenset(("attention", "linear", "matmul"))


def _with_rules(
    op: str, rungs: tuple[Variant, ...], tabled: bool, auto: bool = False
) -> tuple[Variant | Preferred, ...]:
    """`rungs`, before the first of each level what names others of the level, if anything does.

    `auto`: these are what ``"auto"`` stands for on a GPU, where a rule may prefer a rung of any level. Choosers take
    the place of rules where there are tables or measurements, and where to remember a choice costs less.
    """
    remembered = tabled and op in REMEMBERED and not tables.are_off()
    auto_tabled = auto and tabled and _has_table(op, "auto")
    levels = dict.fromkeys(rung.level for rung in rungs)
    if auto_tabled:  # a table may name levels that the order leaves out
        levels |= dict.fromkeys(level for level in MEASURED_LEVELS if table.at_level(op, level)[0] is None)
    choices: dict[str, tuple[Rule, list[Variant]]] = {}
    first: dict[str, Preferred] = {}
    for level in levels:
        climb, rule = table.at_level(op, level)[1], RULES.get((op, level))
        last_first = [*reversed(climb.values())]
        if (tabled and _has_table(op, level)) or (remembered and rule is not None):
            from kernel_ladder.selection.choosers import Chooser  # importing the package stays quick

            chooser = Chooser(op, level, last_first, rule)
            first[level] = Preferred(chooser.rule_of_names, climb, chooser)
        elif rule is not None:
            first[level] = Preferred(rule, climb)
        choices[level] = first[level].rule if level in first else _no_names, last_first
    found: list[Variant | Preferred] = []
    rule = RULES.get((op, "auto")) if auto else None
    every = {v.name: v for _, ladder in choices.values() for v in ladder}
    if auto_tabled or (remembered and rule is not None):
        from kernel_ladder.selection.choosers import Chooser

        chooser = Chooser(op, "auto", rungs, rule, dict(choices))
        found.append(Preferred(chooser.rule_of_names, every, chooser))
    elif rule is not None:
        found.append(Preferred(rule, every))
    for rung in rungs:
        if (preferred := first.pop(rung.level, None)) is not None:
            found.append(preferred)
        found.append(rung)
    return tuple(found)


def _no_names(inputs: Inputs, options: Options) -> tuple[str, ...]:
    return ()


def _has_table(op: str, backend: str) -> bool:
    """Whether a visible GPU has a table for what a backend's name chooses, or choices are measured."""
    if tables.are_off():
        return False
    if measured.enabled():
        return True
    found = (tables.of_device(i) for i in range(gpu.count()))
    return any(each is not None and each.has(op, backend) for each in found)


def _available(op: str, backend: str) -> list[Variant]:
    level = backend.partition(".")[0]
    reason, climb = table.at_level(op, level)
    if reason is not None:
        return []
    if backend == level:
        return [*reversed(climb.values())]
    return [climb[backend]] if backend in climb else []


def _refusal(
    backend: str,
    candidates: tuple[Variant | Preferred, ...],
    inputs: Inputs,
    options: Options,
    followed: bool,
    compiling: bool,
) -> str:
    # A function of its own: a comprehension there would slow the loop that chooses.
    reasons = [
        (v.name, (_not_followed(v, inputs, compiling) if followed else None) or v.unsupported(*inputs, **options))
        for v in candidates
        if not isinstance(v, Preferred)
    ]
    if backend in LEVELS:
        every = "; ".join(f"{name}: {why}" for name, why in reasons)
        return f"no variant at level {backend!r} supports this call: {every}"
    name, why = next((reason for reason in reasons if reason[0] == "torch.naive"), reasons[-1])
    return f"{name} does not support this call: {why}"
