"""The dispatch table: operation × backend → variant, with a reason for everything that cannot run."""

from __future__ import annotations

import difflib
import importlib
import os
import threading
import warnings
from collections.abc import Callable
from contextlib import ContextDecorator
from dataclasses import dataclass
from typing import Any

import torch
from torch.compiler import is_compiling

from kernel_ladder import gpu
from kernel_ladder.errors import BackendError, UnavailableError, VariableError
from kernel_ladder.level_packages import load as load_package
from kernel_ladder.semantics import weight_dropout
from kernel_ladder.spec import Inputs, Options, Output, Spec

#: Operations, each a module of this name in every level's package.
OPS: tuple[str, ...] = (
    "gelu",
    "softmax",
    "matmul",
    "attention",
    "attention_varlen",
    "attention_paged",
    "add",
    "sum",
    "layer_norm",
    "rms_norm",
    "dropout",
    "bias_gelu",
    "swiglu",
    "add_rms_norm",
    "bias_dropout_add_layer_norm",
    "linear",
    "rope",
    "cross_entropy",
    "linear_cross_entropy",
    "linear_float8",
)

#: Levels in the order of the climb, each with the package that holds it.
LEVELS: dict[str, str] = {
    "torch": "torch_ref",
    "compile": "compile_impl",
    "xla": "xla_impl",
    "triton": "triton_impl",
    "cuda": "cuda_impl",
}

#: The environment variable that names the backend where neither the call nor :func:`use` does.
ENV_BACKEND = "KERNEL_LADDER_BACKEND"


@dataclass(frozen=True, eq=False)
class Variant:
    """One named implementation of an operation at a level.

    ``forward(*inputs, **options)`` returns ``(output, saved)``.
    ``backward(saved, grad, needs)`` returns one gradient per input, None where ``needs`` is False for it;
    a variant without one is differentiated by PyTorch. Where there are several outputs, `output` and `grad` are tuples.
    ``unsupported(*inputs, **options)`` returns why these inputs cannot be taken, or None.
    ``inference(*inputs, **options)`` returns the output alone, where no gradient is wanted and `forward` would write
    more than it for the backward's sake; None where it would not.
    ``here()`` returns why this machine cannot run it whatever the inputs, though its level is available, or None.
    ``saved_from(inputs, outputs, options)`` returns what `forward` would save, by outputs from elsewhere: those of a
    larger call, of which these inputs are a part. None where the backward computes them again.
    ``last_backward(saved, grad, needs)`` is ``backward`` where the graph is not kept: it may write over what `forward`
    made and saved, and return it. None where that would spare nothing.
    """

    op: str
    name: str
    forward: Callable[..., tuple[Output, tuple[Any, ...]]]
    backward: Callable[..., tuple[torch.Tensor | None, ...]] | None
    unsupported: Callable[..., str | None]
    inference: Callable[..., Output] | None = None
    here: Callable[[], str | None] = lambda: None
    saved_from: Callable[[Inputs, tuple[torch.Tensor, ...], Options], tuple[Any, ...]] | None = None
    last_backward: Callable[..., tuple[torch.Tensor | None, ...]] | None = None

    def output(self, *inputs: torch.Tensor | None, **options: Any) -> Output:
        """The output alone, with nothing kept for a backward."""
        if self.inference is not None:
            return self.inference(*inputs, **options)
        return self.forward(*inputs, **options)[0]

    @property
    def level(self) -> str:
        return self.name.partition(".")[0]

    def __repr__(self) -> str:
        return f"<{self.op} {self.name}>"


specs: dict[str, Spec] = {}  # those loaded; spec() loads the others
_variants: dict[tuple[str, str], dict[str, Variant]] = {}  # (op, level) -> name -> variant, in the order of the climb
_unavailable: dict[tuple[str, str], str | None] = {}  # (op, level) -> reason, once loaded
#: What to do when a variant has been added, or levels are to be asked anew: others keep what they found in this table.
_on_change: list[Callable[[], None]] = []
_loading = threading.RLock()
_asked_entry_points = False  # whether the rungs of installed packages have been loaded
_chosen = threading.local()

# The mapping under os.environ. torch.compile guards what it reads here, as it does the attributes of _chosen, and so
# compiles anew when the choice changes; what it reads through os.environ itself it takes as a constant, for ever.
_environment: dict[Any, Any] = os.environ._data  # type: ignore[attr-defined]
_ENV_KEY = os.environ.encodekey(ENV_BACKEND)  # type: ignore[attr-defined]


def _supports_all(*inputs: torch.Tensor | None, **options: Any) -> str | None:
    return None


def register_spec(spec: Spec) -> Spec:
    """Add an operation's spec. Called once, by ``torch_ref/<op>.py``."""
    specs[spec.name] = spec
    return spec


def register(
    op: str,
    name: str,
    *,
    forward: Callable[..., tuple[Output, tuple[Any, ...]]],
    backward: Callable[..., tuple[torch.Tensor | None, ...]] | None = None,
    unsupported: Callable[..., str | None] = _supports_all,
    inference: Callable[..., Output] | None = None,
    here: Callable[[], str | None] = lambda: None,
    saved_from: Callable[[Inputs, tuple[torch.Tensor, ...], Options], tuple[Any, ...]] | None = None,
    last_backward: Callable[..., tuple[torch.Tensor | None, ...]] | None = None,
    drops_weights: bool = False,
) -> Variant:
    """Add a rung as the last of its ladder: every call, test and sweep finds it by name. :class:`Variant` has details.

    Args:
        op: the operation, one of ``kernel_ladder.OPS``.
        name: ``level.rung``, for example ``"triton.mine"``.
        forward: ``forward(*inputs, **options)`` returns ``(output, saved)``. Inputs and options have passed the
            operation's checks; a tensor that was left out is None.
        backward: ``backward(saved, grad, needs)`` returns one gradient per input, None where `needs` is False. Without
            it PyTorch differentiates `forward`.
        unsupported: returns why these inputs and options cannot be taken, or None.
        inference: returns the output alone; used where no gradient is wanted.
        here: returns why this machine cannot run the rung, or None.
        saved_from: returns what `forward` would save, from the outputs of a larger call.
        last_backward: as `backward`, but free to write over what `forward` made and saved: runs where the graph is
            not kept.
        drops_weights: of attention, whether it takes ``dropout_p`` and ``seed``. A call has them only where weights are
            dropped.

    Returns:
        The rung as the table keeps it.

    Raises:
        BackendError: no such operation.
        ValueError: the name has no level, or the operation has a rung of that name.
    """
    _check_op(op)
    level, _, step = name.partition(".")
    if level not in LEVELS or not step:
        raise ValueError(f"register: `name` must be 'level.variant' with a level of {', '.join(LEVELS)}, got {name!r}")
    variants = _variants.setdefault((op, level), {})
    if name in variants:
        raise ValueError(f"register: {op} has a variant {name!r} already")
    if op == "attention" and not drops_weights:
        unsupported = weight_dropout.refused_by(unsupported)
    variants[name] = Variant(op, name, forward, backward, unsupported, inference, here, saved_from, last_backward)
    _changed()
    return variants[name]


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let torch.compile call `function` while it traces, and take the result as a constant."""
    # What torch.compiler.assume_constant_result does, without its import of the compiler, which takes a second.
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@untraced
def _load_all() -> None:
    for op in OPS:
        for level in LEVELS:
            _load(op, level)


def at_level(op: str, level: str) -> tuple[str | None, dict[str, Variant]]:
    """Why a level is unavailable for an operation, or None, and its variants in the order of the climb."""
    # Importing cannot be traced, and torch.compile does not see a dictionary change that it has read already.
    if is_compiling():
        _load_all()
    elif (op, level) not in _unavailable:
        _load(op, level)
    reason, climb = _unavailable[op, level], _variants.get((op, level), {})
    if reason is None and not climb:
        reason = f"the {level} level has no rung of {op}"
    return reason, climb


@untraced
def known_to(*ops: str) -> list[str]:
    """The names of the variants of these operations."""
    return [v.name for op in ops for v in variants(op)]


def required() -> list[str]:
    """The levels that must be available on this machine, by the environment variable ``KERNEL_LADDER_REQUIRE``.

    Where a GPU is pretended, a level may be absent.
    """
    names = [name.strip() for name in os.environ.get("KERNEL_LADDER_REQUIRE", "").split(",") if name.strip()]
    for name in names:
        if name not in LEVELS:
            raise VariableError(
                f"the environment variable KERNEL_LADDER_REQUIRE names {name!r}, which is no level; "
                f"levels are {', '.join(LEVELS)}, and names stand apart by commas"
            )
    return names


def _load(op: str, level: str) -> None:
    """Import a level's module for an operation, once, and note why it is unavailable if it is.

    What others have registered before stands after the level's own variants.
    """
    if (op, level) in _unavailable:
        return
    with _loading:
        if (op, level) in _unavailable:
            return
        _load_entry_points()
        others = dict(_variants.get((op, level), {}))
        _variants.get((op, level), {}).clear()
        try:
            package = load_package(LEVELS[level])
            reason = package.unavailable()
            importlib.import_module(f"{LEVELS[level]}.{op}")
        except ImportError as error:
            reason = f"the {level} level could not be imported: {error}"
        finally:
            own = _variants.setdefault((op, level), {})
            for name in others.keys() & own.keys():
                warnings.warn(
                    f"{op} has a variant {name!r} of its own; the one registered before is left out",
                    RuntimeWarning,
                    stacklevel=2,
                )
            own.update({name: variant for name, variant in others.items() if name not in own})
        if level in required() and reason is not None and not gpu.pretended():
            raise UnavailableError(
                f"the environment variable KERNEL_LADDER_REQUIRE names {level}, which is unavailable: {reason}"
            )
        _unavailable[op, level] = reason


def _load_entry_points() -> None:
    """Load the rungs that installed packages offer, once: see :mod:`kernel_ladder.user_rungs`."""
    global _asked_entry_points
    if not _asked_entry_points:
        _asked_entry_points = True
        from kernel_ladder import user_rungs

        user_rungs.load_entry_points()


def forget() -> None:
    """Ask anew what is available, and which variants a backend's name stands for."""
    _unavailable.clear()
    _changed()


def on_change(function: Callable[[], None]) -> None:
    """Call `function` whenever the table has changed."""
    _on_change.append(function)


def _changed() -> None:
    for function in _on_change:
        function()


def _check_op(op: str) -> None:
    if op not in OPS:
        near = difflib.get_close_matches(str(op), OPS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise BackendError(f"unknown operation {op!r}; {hint}Operations are {', '.join(OPS)}")


def spec(op: str) -> Spec:
    """The spec of an operation: formula, checks, samples, sweep and cost model.

    Raises:
        BackendError: no such operation.
        UnavailableError: the torch level, which holds the specs, cannot be loaded.
    """
    # torch.compile takes a dictionary as it was when first read, so what fills this one comes before any look at it.
    if is_compiling():
        _check_op(op)
        _load_all()
    elif op not in specs:
        _check_op(op)
        _load(op, "torch")
        if op not in specs:
            raise UnavailableError(f"{op}: {_unavailable[op, 'torch']}")
    return specs[op]


def variants(op: str, level: str | None = None) -> list[Variant]:
    """Every variant of an operation (at one level), in the order of the climb, available or not.

    Raises:
        BackendError: no such operation or level.
    """
    _check_op(op)
    if level is not None and level not in LEVELS:
        raise BackendError(f"{op}: unknown level {level!r}; levels are {', '.join(LEVELS)}")
    levels = list(LEVELS) if level is None else [level]
    for each in levels:
        _load(op, each)
    return [v for each in levels for v in _variants.get((op, each), {}).values()]


def unavailable(op: str, level: str) -> str | None:
    """Why a level cannot be used on this machine for an operation, or None where it can."""
    _check_op(op)
    return at_level(op, level)[0]


def backends(op: str) -> dict[str, str | None]:
    """Every backend of an operation by name, with the reason why it is unavailable, or None.

    >>> kernel_ladder.backends("gelu")
    {'torch.naive': None, 'torch.builtin': None, 'compile.default': None, ...}

    Raises:
        BackendError: no such operation.
    """
    found: dict[str, str | None] = {}
    for level in LEVELS:
        reason = unavailable(op, level)
        found.update({v.name: reason or v.here() for v in variants(op, level)} or {level: reason})
    return found


class use(ContextDecorator):
    """Choose the backend of every call in this thread that names none, inside a ``with`` block.

    Blocks nest. As a decorator it holds for every call of the function. Alone, outside of both, it chooses nothing, and
    a RuntimeWarning says so.

    Args:
        backend: a level (``"triton"``), a variant (``"cuda.flash"``) or ``"auto"``. A name that no operation has is
            refused at once; one that only some have is refused by the others when called.

    Raises:
        TypeError: `backend` is no str.
        BackendError: no operation has it.
    """

    # Read where __init__ was not run, as of the objects that torch.compile makes up while it traces.
    _waits = False

    def __init__(self, backend: str) -> None:
        if not isinstance(backend, str):
            raise TypeError(f"use: argument `backend` must be a str, got {type(backend).__name__}")
        if backend != "auto" and backend not in LEVELS:
            known = known_to(*OPS)
            level = level_of(backend)
            out_of_reach = level is not None and not any(name.startswith(f"{level}.") for name in known)
            if backend not in known and not out_of_reach:
                raise BackendError(unknown_backend("use", backend, known))
        self.backend = backend
        self._entered = False
        self._before: str | None = None
        self._waits = True

    def __enter__(self) -> None:
        if self._entered:
            raise RuntimeError(f"use: this block is entered already; call use({self.backend!r}) anew for each block")
        self._waits, self._entered = False, True
        self._before = getattr(_chosen, "backend", None)
        _chosen.backend = self.backend

    def __exit__(self, *exception: object) -> None:
        _chosen.backend = self._before
        self._entered = False

    def _recreate_cm(self) -> use:  # what ContextDecorator enters around each call of a function
        self._waits = False
        return use(self.backend)

    def __del__(self) -> None:
        if self._waits:
            warnings.warn(
                f"kernel_ladder.use({self.backend!r}) alone chooses nothing; write `with kernel_ladder.use("
                f"{self.backend!r}):` around the calls, or set the environment variable {ENV_BACKEND}",
                RuntimeWarning,
                stacklevel=2,
            )


def level_of(backend: str) -> str | None:
    """The level of a name that is a level's or may be a variant's, else None."""
    level, dot, step = backend.partition(".")
    return level if level in LEVELS and bool(dot) == bool(step) else None


def unknown_backend(caller: str, backend: str, known: list[str], source: str = "") -> str:
    """The message for a backend that does not exist: the nearest names, then all that are `known`."""
    names = [name for name in dict.fromkeys([*LEVELS, "auto", *known]) if name != backend]
    near = difflib.get_close_matches(backend, names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    return f"{caller}: {source}unknown `backend` {backend!r}; {hint}Known are {', '.join(names)}"


@untraced
def _from_environment(value: Any) -> str | None:
    return None if value is None else os.fsdecode(value)


def source_of(backend: str | None) -> str:
    """Where the backend of a call comes from that was given this one, if not from the call: how a message begins."""
    if backend is not None:
        return ""
    if chosen := getattr(_chosen, "backend", None):
        return f"kernel_ladder.use({chosen!r}): "
    value = _from_environment(_environment.get(_ENV_KEY))
    return f"the environment variable {ENV_BACKEND} is {value!r}: " if value else ""


def named(op: str, backend: str) -> list[Variant]:
    """The variants that a level's or a variant's name stands for, most optimised first, available or not.

    Empty for a level that has none on this machine; :func:`unavailable` says why.

    Raises:
        BackendError: no such operation or backend.
    """
    level = level_of(backend)
    climb = [] if level is None else variants(op, level)
    found = [v for v in reversed(climb) if backend in (level, v.name)]
    if level is None or (climb and not found):
        _check_op(op)
        raise BackendError(unknown_backend(op, backend, known_to(op)))
    return found


def asked_for(op: str, backend: str | None) -> str:
    """The backend that a call asks for: its argument, else what :func:`use` or the environment names, else auto."""
    if backend is None:
        backend = getattr(_chosen, "backend", None) or _from_environment(_environment.get(_ENV_KEY)) or "auto"
    if not isinstance(backend, str):
        raise TypeError(f"{op}: argument `backend` must be a str or None, got {type(backend).__name__}")
    return backend
