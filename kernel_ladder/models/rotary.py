"""Rotary embedding of Hugging Face's attention modules by this package's ``rope``.

Their forward pass calls ``apply_rotary_pos_emb(q, k, cos, sin)``, a function of their file, with cosines and sines that
hold each pair's angle twice. A patched module has that forward pass again, where the name means :func:`rotation`. Other
models of the same file keep theirs.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_compiling

from kernel_ladder import ops
from kernel_ladder.models.kinds import Patched, of_class, subclass
from kernel_ladder.selection.small import left_to_module

#: The function's name in transformers.
FUNCTION = "apply_rotary_pos_emb"
ELSE = "rotates its queries and keys by another function than rope"


class Rotary(Patched):
    """An attention module whose queries and keys ``rope`` rotates; made for each backend by :func:`rotary_class`."""

    OPS, BY = ("rope",), "rope"


@torch.library.custom_op("kernel_ladder::rotary_table", mutates_args=())
def _complex_table(cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``cos + i · sin``, of operands ``(S, R / 2)``.

    An operator of its own, because Inductor copies complex tensors that it lays out itself, and has no code for that on
    a GPU (``KeyError: 'complex64'`` in PyTorch 2.11).
    """
    return torch.complex(cos.float(), sin.float())


@_complex_table.register_fake
def _(cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return torch.empty(cos.shape, dtype=torch.complex64, device=cos.device)


def rotation(original: Callable[..., Any], backend: str) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """A function with the arguments of `original`, which does the calls that ``rope`` does not take.

    ``rope`` takes one table of angles for the whole batch, ``(1, S, R)``, in the dtype of queries and keys. The complex
    table of the last call is kept, since all layers of a forward pass share their cosines.
    """
    last: tuple[Any, Any, Any] = (None, None, None)

    def table_of(cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        nonlocal last
        if not is_compiling():
            known = last  # another thread may replace it
            if known[0] is cos and known[1] is sin:
                return known[2]
        half = cos.shape[-1] // 2
        table = _complex_table(cos[0, :, :half], sin[0, :, :half])
        if not is_compiling():
            last = cos, sin, table
        return table

    def rotate(q: Any, k: Any, cos: Any, sin: Any, *others: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        taken = (
            not others
            and options.get("unsqueeze_dim", 1) == 1
            and not options.keys() - {"unsqueeze_dim"}
            and q.dim() == 4
            and cos.dim() == 3
            and cos.shape[0] == 1
            and cos.shape == sin.shape
            and cos.dtype == sin.dtype == q.dtype == k.dtype != torch.float64  # tables are of complex64
            and not cos.requires_grad
            and cos.shape[-1] % 2 == 0
        )
        if not taken or left_to_module(backend, q, k):
            return original(q, k, cos, sin, *others, **options)
        table = table_of(cos, sin)
        return ops.rope(q, table, backend=backend), ops.rope(k, table, backend=backend)

    return rotate


def _with_global(function: Any, name: str, made: Callable[[Any], Any]) -> Any:
    """A copy of a function for which a global name means ``made(what it means now)``; None where it reads no such name.

    Decorators that hold the function in their closure are copied around the copy.
    """
    wrapped = getattr(function, "__wrapped__", None)
    if not isinstance(function, types.FunctionType):
        return None
    if wrapped is None:
        if name not in function.__code__.co_names or not callable(function.__globals__.get(name)):
            return None
        # Without a module's name, torch.compile looks names up here and not in that module.
        scope = {key: value for key, value in function.__globals__.items() if key != "__name__"}
        scope[name] = made(scope[name])
        closure = function.__closure__
    else:
        inner = _with_global(wrapped, name, made)
        cells = function.__closure__ or ()
        if inner is None or not any(cell.cell_contents is wrapped for cell in cells):
            return None
        scope = function.__globals__
        closure = tuple(types.CellType(inner) if cell.cell_contents is wrapped else cell for cell in cells)
    copy = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__, copy.__doc__, copy.__module__ = function.__kwdefaults__, function.__doc__, function.__module__
    copy.__dict__.update(function.__dict__)
    if wrapped is not None:
        copy.__wrapped__ = inner  # type: ignore[attr-defined]
    return copy


_classes: dict[tuple[type, str], type] = {}


def rotary_class(base: Any, backend: str) -> type:
    """A subclass of an attention module's class, of which :func:`rotation_of` is known, that rotates by ``rope``."""
    if (base, backend) in _classes:
        return _classes[base, backend]
    forward = _with_global(base.forward, FUNCTION, lambda original: rotation(original, backend))
    _classes[base, backend] = subclass(Rotary, base, forward=forward, __reduce_ex__=_reduce)
    return _classes[base, backend]


def _reduce(self: Any, protocol: Any) -> Any:
    """Pickle by original class and backend, since no module holds the class that was made of both."""
    return _remade, (type(self).__bases__[1], self.__dict__["_backend"]), self.__dict__


def _remade(base: type, backend: str) -> Any:
    made: Any = rotary_class(base, backend)
    return made.__new__(made)


def rotation_of(base: Any) -> Callable[..., Any] | None:
    """The function by which the forward pass of an attention module's class rotates, or None."""
    found: list[Callable[..., Any]] = []

    def keep(original: Callable[..., Any]) -> Callable[..., Any]:
        found.append(original)
        return original

    _with_global(base.forward, FUNCTION, keep)
    return found[0] if found else None


def why_not(model: torch.nn.Module, original: Callable[..., Any]) -> str | None:
    """Why ``rope`` cannot rotate as `original` does, or None: both rotate small tensors alike.

    The cosines and sines that the model computes must hold each pair's angle twice.
    """
    embeddings = [each for each in model.modules() if of_class(each, "RotaryEmbedding")]
    if not embeddings or not all(_holds_angles_twice(each) for each in embeddings):
        return "computes cosines that do not hold each pair's angle twice"
    q, k = (torch.linspace(-2, 2, 2 * heads * 3 * 8).sin().view(2, heads, 3, 8) for heads in (4, 2))
    angles = torch.linspace(0, 3, 3 * 4).view(1, 3, 4).repeat(1, 1, 2)
    try:
        expected = original(q, k, angles.cos(), angles.sin())
        found = rotation(original, "torch")(q, k, angles.cos(), angles.sin())
        alike = all(torch.allclose(x, y, rtol=1e-5, atol=1e-6) for x, y in zip(found, expected, strict=True))
    except Exception as error:
        return f"{FUNCTION} could not be tried on small tensors: {type(error).__name__}: {error}"
    return None if alike else ELSE


def _holds_angles_twice(embedding: Any) -> bool:
    """Whether both halves of a rotary embedding's cosines and sines are alike, for each kind of layer that it knows."""
    names = [name for name, _ in embedding.named_buffers() if "original" not in name]
    kinds = [name.removesuffix("inv_freq").rstrip("_") for name in names]
    if not kinds or any(buffer.device.type == "meta" for buffer in embedding.buffers()):
        return False
    device = next(embedding.buffers()).device
    small = torch.zeros(1, 3, 1, device=device), torch.arange(3, device=device)[None]
    try:
        with torch.no_grad():
            tables = [table for kind in kinds for table in embedding(*small, *([kind] if kind else []))]
        return all(torch.equal(*table.chunk(2, -1)) for table in tables)
    except Exception:
        return False
