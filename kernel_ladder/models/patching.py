"""Replace modules of a model by this package's calls, and put them back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from kernel_ladder import table
from kernel_ladder.errors import BackendError, UnavailableError
from kernel_ladder.models import attention, dropping, kept, loss, masks, rotary
from kernel_ladder.models.kinds import KINDS, Patched, of_class, subclass
from kernel_ladder.models.report import Entry, Report
from kernel_ladder.nn.backend import check_backend
from kernel_ladder.ops.calls import is_sharded

#: The attribute of a patched model that holds what :func:`unpatch` restores.
UNDO = "_kernel_ladder_undo"
#: Why a module is left whose forward pass is an attribute of its own.
OWN_FORWARD = "has a forward pass of its own, set by other code"
#: Why a module is left that has parameters, a notable name, and none of the kinds.
UNKNOWN = "a class that is not known here"
#: Parts of class names: the report lists such modules even if they are left as they are.
NOTABLE = ("Norm", "MLP", "Intermediate", "Attention", "GELU", "Linear", "Conv1D", "GELUTanh", "GELUActivation")

#: Attributes of Hugging Face's attention modules that hold the probability to drop a weight, or a module with it.
DROPOUTS = ("attention_dropout", "attn_dropout", "dropout")


def patch(model: torch.nn.Module, backend: str = "auto", report: bool = True, *, keep_logits: bool = False) -> Report:
    """Let a model's norms, products, feed-forward blocks, activations, attention and loss run this package's kernels.

    Modules keep their parameters, names and hooks; only their forward pass changes. A model that is patched already is
    unpatched first. Attention of Hugging Face's models is set through their AttentionInterface.

    Args:
        model: a model of Hugging Face's transformers, or any that is made of ``torch.nn``; with its weights.
        backend: a level, a rung's name or ``"auto"``, for every module. A rung's name replaces the modules whose
            operations have it.
        report: whether to print what was replaced and what was not.
        keep_logits: whether a causal language model in training returns logits beside its loss. False computes the loss
            of given labels without them, and ``outputs.logits`` is None there.

    Returns:
        The :class:`Report`: every module replaced or left, with the reason.

    Raises:
        TypeError: `model` is no module. BackendError, UnavailableError: no such backend, or not on this machine.
        ValueError: nothing in the model can be replaced, or parameters are DTensors.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"patch: argument `model` must be a torch.nn.Module, got {type(model).__name__}")
    if (sharded := next((name for name, p in model.named_parameters() if is_sharded(p)), None)) is not None:
        raise ValueError(
            f"patch: parameter `{sharded}` of argument `model` is a DTensor; patch the model first, then call "
            "fully_shard() or parallelize_module()"
        )
    if backend in (*table.LEVELS, "auto"):
        check_backend(tuple(op for kind in KINDS for op in kind.OPS), backend)
    elif not any(_without_backend(kind.OPS, backend) is None for kind in KINDS):
        check_backend(("linear",), backend)
    if hasattr(model, UNDO):
        unpatch(model)
    found = Report(type(model).__name__, backend)
    undo: dict[str, Any] = {"modules": [], "attention": None, "hook": None}
    if not keep_logits:
        _patch_loss(model, backend, found, undo)
    for name, module in model.named_modules():
        _patch_module(name, module, backend, found, undo)
    _patch_attention(model, backend, found, undo)
    _report_kept(model, found)
    if not found.replaced:
        reasons = (
            "; ".join(dict.fromkeys(f"{e.kind}: {e.why}" for e in found.left)) or "it has no module of a known kind"
        )
        raise ValueError(f"patch: nothing in {found.model} can be replaced: {reasons}")
    object.__setattr__(model, UNDO, undo)
    if report:
        print(found)
    return found


def unpatch(model: torch.nn.Module) -> None:
    """Undo :func:`patch`. Parameters keep the values that they have now.

    Raises:
        ValueError: `model` is not patched.
    """
    undo = getattr(model, UNDO, None)
    if undo is None:
        raise ValueError(f"unpatch: argument `model`, a {type(model).__name__}, is not patched")
    for module, attributes in undo["modules"]:
        if isinstance(module, Patched):
            module.__class__ = _unpatched(type(module))
            del module.__dict__["_backend"]
        for key, value in attributes.items():
            if value is None:
                module.__dict__.pop(key, None)
            else:
                module.__dict__[key] = value
    if undo["attention"] is not None:
        model.set_attn_implementation(undo["attention"])  # type: ignore[operator]
    if undo["hook"] is not None:
        undo["hook"].remove()
    object.__delattr__(model, UNDO)


def _unpatched(cls: Any) -> type:
    """The class that was patched. One that other code made of it since, such as FSDP2's, is made of the original."""
    if not issubclass(cls.__bases__[0], torch.nn.Module) and issubclass(cls.__bases__[0], Patched):
        return cls.__bases__[1]
    bases = tuple([_unpatched(base) if issubclass(base, Patched) else base for base in cls.__bases__])
    kept = {name: value for name, value in cls.__dict__.items() if name not in ("__dict__", "__weakref__")}
    return type(cls)(cls.__name__, bases, kept)


# ---- the loss of Hugging Face's models ------------------------------------------------------------------------------


def _patch_loss(model: Any, backend: str, found: Report, undo: dict[str, Any]) -> None:
    reason = loss.why_not(model)
    if reason == "":
        return
    kind = type(model).__name__
    if reason is None:
        try:
            reason = _without_backend(loss.CausalLoss.OPS, backend)
        except UnavailableError as error:  # a level that runs here and has no rung of this operation
            reason = str(error)
    if reason is None:
        _become(model, loss.loss_class(type(model)), backend, undo)
        found.replaced.append(Entry("", kind, loss.CausalLoss.BY))
    else:
        found.left.append(Entry("", kind, f"loss: {reason}"))


# ---- modules -------------------------------------------------------------------------------------------------------


_classes: dict[tuple[type[Patched], type], type] = {}


def _class_of(kind: type[Patched], base: type) -> type:
    """The one subclass of `base` whose forward pass is that of `kind`."""
    if (kind, base) not in _classes:
        _classes[kind, base] = subclass(kind, base, __reduce_ex__=_reduce)
    return _classes[kind, base]


def _reduce(self: Any, protocol: Any) -> Any:
    """Pickle by kind and original class, since no module holds the class that was made of both."""
    kind, base = type(self).__bases__
    return _remade, (kind, base), self.__dict__


def _remade(kind: type[Patched], base: type) -> Any:
    made: Any = _class_of(kind, base)
    return made.__new__(made)


def _patch_module(name: str, module: torch.nn.Module, backend: str, found: Report, undo: dict[str, Any]) -> None:
    shown = type(module).__name__
    kinds = [kind for kind in KINDS if kind.takes(module)]
    if isinstance(module, torch.nn.TransformerEncoderLayer) and module.activation_relu_or_gelu:
        # PyTorch's fast path for inference would bypass the layer's modules.
        undo["modules"].append((module, {"activation_relu_or_gelu": module.activation_relu_or_gelu}))
        module.activation_relu_or_gelu = 0
    if isinstance(module, torch.nn.TransformerEncoder) and getattr(module, "use_nested_tensor", False):
        # It would give its layers nested tensors, which only that fast path takes.
        undo["modules"].append((module, {"use_nested_tensor": module.use_nested_tensor}))
        module.use_nested_tensor = False
    if not kinds:
        has_weights = any(True for _ in module.parameters(recurse=False))
        if of_class(module, *NOTABLE) and has_weights and kept.why(module, None) is None:
            found.left.append(Entry(name, shown, UNKNOWN))
        return
    reason = ""
    if "forward" in module.__dict__:
        kinds, reason = [], OWN_FORWARD
    for kind in kinds:
        if (why := _without_backend(kind.OPS, backend) or kind.stays(module, backend)) is not None:
            reason = why
        elif not kind.PROBED or (why := _differs(kind, module)) is None:
            _become(module, _class_of(kind, type(module)), backend, undo)
            found.replaced.append(Entry(name, shown, kind.by(module, backend)))
            return
        else:
            reason = why
    found.left.append(Entry(name, shown, reason))


def _become(module: Any, cls: type, backend: str, undo: dict[str, Any]) -> None:
    module.__class__ = cls
    module.__dict__["_backend"] = backend
    undo["modules"].append((module, {}))


def _without_backend(ops: tuple[str, ...], backend: str) -> str | None:
    """Why operations have no such backend here, or None. Levels are checked before."""
    try:
        check_backend(ops, backend)
    except BackendError as error:
        return str(error)
    return None


def _differs(kind: type[Patched], module: Any) -> str | None:
    """Why a kind's forward pass is not the module's, or None: both on a small input.

    First in the module's dtype, whose result must have the same dtype. A tolerance of 16 bits cannot tell functions as
    near as SiLU and GELU, so such modules are compared in float32 as well. A norm's kind also says which dtype the
    result has of 16 bits beside float32 weights, unless the module takes none.
    """
    shape, like = kind.probe(module)
    device, dtype = ("cpu", torch.float32) if like is None else (like.device, like.dtype)
    if torch.device(device).type == "meta":
        return "has no weights yet (meta device), so its numbers cannot be compared"
    x = torch.linspace(-2, 2, 3 * shape[-1]).sin().view(shape).mul(2).to(device, dtype)
    modes = [(m, m.training) for m in module.modules()]
    try:
        module.eval()
        why = _compare(kind, module, x)
        if why is None and torch.finfo(dtype).eps > torch.finfo(torch.float32).eps:
            with _in_float32(module):
                why = _compare(kind, module, x.float())
        if why is None and kind.MIXED:
            with _in_float32(module):
                why = _compare(kind, module, x.bfloat16()) if _takes(module, x.bfloat16()) else None
    except Exception as error:
        why = f"could not be tried on a small input: {type(error).__name__}: {error}"
    finally:
        for part, mode in modes:
            part.training = mode
    return why


@torch.no_grad()
def _takes(module: Any, x: torch.Tensor) -> bool:
    """Whether a module's own forward pass takes an input."""
    try:
        type(module).forward(module, x)
    except Exception:
        return False
    return True


def _compare(kind: type[Patched], module: Any, x: torch.Tensor) -> str | None:
    """Why the two forward passes differ on `x`, or None."""
    cls = type(module)
    try:
        with torch.no_grad():
            expected = cls.forward(module, x)
            module.__class__, module.__dict__["_backend"] = _class_of(kind, cls), "torch"
            found = module.forward(x)
    finally:
        module.__class__ = cls
        module.__dict__.pop("_backend", None)
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return kind.ELSE
    scale = expected.double().abs().max().item()
    if scale == 0:
        return "returns zeros on a small input, so its numbers cannot be compared"
    eps = max(torch.finfo(dtype).eps for dtype in (x.dtype, found.dtype))
    close = (found.double() - expected.double()).abs().max().item() <= 16 * eps * scale
    return None if close else kind.ELSE


@contextlib.contextmanager
def _in_float32(module: torch.nn.Module) -> Iterator[None]:
    """Parameters and buffers of 16 bits have float32 for a while. The tensors that hold them stay."""
    held = [(t, t.data) for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()]
    try:
        for tensor, data in held:
            tensor.data = data.float()
        yield
    finally:
        for tensor, data in held:
            tensor.data = data


# ---- what is left without a trial ----------------------------------------------------------------------------------


def _report_kept(model: torch.nn.Module, found: Report) -> None:
    """Add modules whose kind has kernels here, but that stay as they are."""
    modules = dict(model.named_modules())
    known = {entry.name for entry in found.left} | {entry.name for entry in found.replaced}
    for name, module in modules.items():
        parent, _, part = name.rpartition(".")
        dropped_by_attention = part in DROPOUTS and attention.BACKEND in modules[parent].__dict__
        if name in known or dropped_by_attention:
            continue
        if (why := kept.why(module, modules[parent] if name else None)) is not None:
            found.left.append(Entry(name, type(module).__name__, why))


# ---- attention of Hugging Face's models -----------------------------------------------------------------------------


def _patch_attention(model: Any, backend: str, found: Report, undo: dict[str, Any]) -> None:
    config = getattr(model, "config", None)
    if not hasattr(model, "set_attn_implementation") or config is None:
        return
    modules = [(name, m) for name, m in model.named_modules() if of_class(m, "Attention") and hasattr(m, "scaling")]
    reason = attention.unsupported(config) or _without_backend(("attention",), backend)
    before = config._attn_implementation
    if reason is None and modules:
        model.set_attn_implementation(attention.register_attention())
        if config._attn_implementation != attention.NAME:
            reason = "transformers lets this model's attention not be set"
    attentions = {name for name, _ in modules}  # those with parameters of their own, as gpt-oss's sinks, are known here
    found.left[:] = [e for e in found.left if e.name not in attentions or e.why != UNKNOWN]
    rotates = {cls: _why_no_rope(model, cls, backend) for cls in dict.fromkeys(type(m) for _, m in modules)}
    for name, module in modules:
        kind = type(module).__name__
        rotated = _patch_rotation(name, module, rotates[type(module)], backend, found, undo)
        if reason is None:
            by = _by(module, backend)
            module.__dict__[attention.BACKEND] = backend
            undo["modules"].append((module, {attention.BACKEND: None}))
            found.replaced.append(Entry(name, kind, f"{by}; rope" if rotated else by))
            continue
        found.left.append(Entry(name, kind, reason))
        if rotated:
            found.replaced.append(Entry(name, kind, "rope"))
    if reason is None and modules:
        undo["attention"] = before
        if all(getattr(m, "is_causal", False) for _, m in modules) and masks.takes_padding(model.base_model):
            undo["hook"] = model.base_model.register_forward_pre_hook(masks.without_padding, with_kwargs=True)


def _why_no_rope(model: torch.nn.Module, cls: type, backend: str) -> str | None:
    """Why rope does not rotate in attention modules of a class, or None. Empty if nothing there is rotated."""
    original = rotary.rotation_of(cls)
    if original is None:
        return ""
    return _without_backend(("rope",), backend) or rotary.why_not(model, original)


def _patch_rotation(
    name: str, module: Any, reason: str | None, backend: str, found: Report, undo: dict[str, Any]
) -> bool:
    """Whether rope rotates the module's queries and keys from now on. `reason`: what :func:`_why_no_rope` says."""
    if reason != "" and "forward" in module.__dict__:
        reason = OWN_FORWARD
    if reason is None:
        _become(module, rotary.rotary_class(type(module), backend), backend, undo)
    elif reason:
        found.left.append(Entry(name, type(module).__name__, f"rotary embedding: {reason}"))
    return reason is None


def _by(module: Any, backend: str) -> str:
    """What the report says of an attention module that is replaced."""
    for name in DROPOUTS:
        p = getattr(module, name, 0.0)
        p = getattr(p, "p", p)
        if isinstance(p, float) and p > 0:
            return f"attention; in training {dropping.by(p, backend)}"
    return "attention"
