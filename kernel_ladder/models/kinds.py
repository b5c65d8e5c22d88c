"""The modules that a patch can replace: how each kind is recognised, and the forward pass that it gets.

A class recognises a module by its parts, and by its numbers: both forward passes run on the same small input, and must
agree. A module that computes something else, whatever its name, is left.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from kernel_ladder import ops
from kernel_ladder.models import dropping
from kernel_ladder.nn.arguments import check_mask
from kernel_ladder.nn.attention import MultiheadAttention
from kernel_ladder.nn.norms import beside
from kernel_ladder.selection.small import left_to_module
from kernel_ladder.selection.unaligned import never_needed


class Patched:
    """A replaced module: its class is a subclass of the original and of one of the kinds below."""

    OPS: ClassVar[tuple[str, ...]] = ()
    #: What the report says.
    BY: ClassVar[str] = ""
    #: What the report says of a module with these parts that computes something else.
    ELSE: ClassVar[str] = "computes something else"
    #: Whether the numbers of the two forward passes are compared.
    PROBED: ClassVar[bool] = True
    #: Whether they are compared on 16 bits beside float32 weights as well.
    MIXED: ClassVar[bool] = False

    _backend: str | None

    @classmethod
    def takes(cls, module: Any) -> bool:
        """Whether a module has the parts of this kind."""
        raise NotImplementedError

    @classmethod
    def by(cls, module: Any, backend: str) -> str:
        """What the report says of a module."""
        return cls.BY

    @classmethod
    def stays(cls, module: Any, backend: str) -> str | None:
        """Why a module with the parts of this kind is left with a backend, or None."""
        return None

    @staticmethod
    def probe(module: Any) -> tuple[Any, ...]:
        """The shape of a small input, and a tensor with its dtype and device, or None for any."""
        return (3, 16), None


def subclass(kind: type[Patched], base: type, **methods: Any) -> type:
    """A subclass of a module's class whose forward pass is that of `kind`, or of `methods`, with the name of `base`."""
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (kind, base), {**names, **methods})


def of_class(module: Any, *endings: str) -> bool:
    return type(module).__name__.endswith(endings)


def is_linear(module: Any) -> bool:
    """Whether a module is a linear layer and no more: of no subclass, without hooks that another call would miss."""
    if type(module) is not torch.nn.Linear and not is_conv1d(module):
        return False
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


def is_conv1d(module: Any) -> bool:
    """GPT-2's linear layer, whose weight is transposed."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and getattr(module, "weight", None) is not None


def apply_linear(layer: Any, x: torch.Tensor, activation: str | None, backend: str | None) -> torch.Tensor:
    weight = layer.weight.t() if is_conv1d(layer) else layer.weight
    return ops.linear(x, weight, layer.bias, activation, backend=backend)


def in_features(layer: Any) -> int:
    return layer.weight.shape[0 if is_conv1d(layer) else 1]


class LayerNorm(Patched):
    OPS, BY, PROBED = ("layer_norm",), "layer_norm", False

    @classmethod
    def takes(cls, module: Any) -> bool:
        return type(module) is torch.nn.LayerNorm

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        if left_to_module(self._backend, input, self.weight, self.bias):
            return super().forward(input)  # type: ignore[misc]
        return ops.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps, backend=self._backend)


class TorchRMSNorm(Patched):
    OPS, BY, PROBED = ("rms_norm",), "rms_norm", False

    @classmethod
    def takes(cls, module: Any) -> bool:
        return type(module) is torch.nn.RMSNorm

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if left_to_module(self._backend, x, self.weight):
            return super().forward(x)  # type: ignore[misc]
        weight = beside(x, self.weight)
        return ops.rms_norm(x, self.normalized_shape, weight, self.eps, backend=self._backend)


class RMSNorm(Patched):
    """Llama's: the weight multiplies the rounded row, so a wider weight gives a wider result."""

    OPS, BY, MIXED = ("rms_norm",), "rms_norm", True

    @classmethod
    def takes(cls, module: Any) -> bool:
        weight = getattr(module, "weight", None)
        return of_class(module, "RMSNorm") and isinstance(weight, torch.Tensor) and _eps_of(module) is not None

    @staticmethod
    def probe(module: Any) -> tuple[Any, ...]:
        return (3, *module.weight.shape), module.weight

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        x, w = hidden_states, self.weight
        y = ops.rms_norm(x, tuple(w.shape), beside(x, w), _eps_of(self), backend=self._backend)
        return y if y.dtype == w.dtype else y.to(torch.promote_types(y.dtype, w.dtype))


class RoundedRMSNorm(RMSNorm):
    """gpt-oss's: the product with the weight is rounded, so the result has the input's dtype."""

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        x, w = hidden_states, self.weight
        return ops.rms_norm(x, tuple(w.shape), beside(x, w), _eps_of(self), backend=self._backend)


class T5LayerNorm(RMSNorm):
    """T5's norm, which subtracts no mean: a 16-bit weight gives the result its dtype, a float32 weight float32."""

    @classmethod
    def takes(cls, module: Any) -> bool:
        named = of_class(module, "LayerNorm") and not isinstance(module, torch.nn.LayerNorm)
        weight = getattr(module, "weight", None)
        return (
            named and isinstance(weight, torch.Tensor) and not hasattr(module, "bias") and _eps_of(module) is not None
        )

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        x, w = hidden_states, self.weight
        dtype = w.dtype if torch.finfo(w.dtype).bits == 16 else torch.promote_types(x.dtype, w.dtype)
        if x.dtype != w.dtype:  # the model keeps some products in float32
            wide = torch.promote_types(torch.promote_types(x.dtype, w.dtype), torch.float32)
            x, w = x.to(wide), w.to(wide)
        return ops.rms_norm(x, tuple(w.shape), w, _eps_of(self), backend=self._backend).to(dtype)


class UnitOffsetRMSNorm(RMSNorm):
    """Gemma's: the factor is 1 + weight, in float32, and the result has the input's dtype."""

    BY = "rms_norm with 1 + weight"

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        w = 1.0 + self.weight.float()
        return ops.rms_norm(x, tuple(w.shape), beside(x, w), _eps_of(self), backend=self._backend)


def _eps_of(module: Any) -> float | None:
    for name in ("variance_epsilon", "eps"):
        if isinstance(value := getattr(module, name, None), (int, float)):
            return float(value)
    return None


class Gelu(Patched):
    """An activation that computes the exact GELU."""

    OPS, BY = ("gelu",), "gelu"
    FORM: ClassVar[str] = "none"

    @classmethod
    def takes(cls, module: Any) -> bool:
        name = type(module).__name__
        return ("GELU" in name or "Gelu" in name) and not any(True for _ in module.parameters())

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        return ops.gelu(input, approximate=self.FORM, backend=self._backend)


class GeluTanh(Gelu):
    BY, FORM = "gelu, approximate='tanh'", "tanh"


class Block(Patched):
    """A block of products, recognised by the names of its class and of these."""

    ENDING: ClassVar[str] = "MLP"
    #: The products' names, the first of which takes the block's input; alternatives.
    NAMES: ClassVar[tuple[tuple[str, ...], ...]] = ()

    @classmethod
    def takes(cls, module: Any) -> bool:
        parts = cls.products(module)
        return of_class(module, cls.ENDING) and bool(parts) and all(is_linear(part) for part in parts)

    @classmethod
    def products(cls, module: Any) -> list[Any]:
        """The products, or an empty list."""
        named = [names for names in cls.NAMES if all(hasattr(module, name) for name in names)]
        return [getattr(module, name) for name in named[0]] if named else []

    @classmethod
    def probe(cls, module: Any) -> tuple[Any, ...]:
        first = cls.products(module)[0]
        return (3, in_features(first)), first.weight


class GatedMLP(Block):
    """Llama's feed-forward block."""

    OPS, BY = ("linear", "swiglu"), "linear and swiglu"
    ELSE = "gates by another function than SiLU; only its parts are replaced"
    NAMES: ClassVar[tuple[tuple[str, ...], ...]] = (("gate_proj", "up_proj", "down_proj"),)

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if left_to_module(self._backend, x, self.down_proj.weight):
            return super(Patched, self).forward(x)  # type: ignore[misc]
        return self.down_proj(ops.swiglu(self.gate_proj(x), self.up_proj(x), backend=self._backend))


class JoinedGatedMLP(GatedMLP):
    """Phi-3's feed-forward block, whose gate and up projections are one product."""

    NAMES = (("gate_up_proj", "down_proj"),)

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        if left_to_module(self._backend, hidden_states, self.down_proj.weight):
            return super(Patched, self).forward(hidden_states)  # type: ignore[misc]
        gate, up = self.gate_up_proj(hidden_states).chunk(2, dim=-1)
        return self.down_proj(ops.swiglu(gate, up, backend=self._backend))


class GeluMLP(Block):
    """A product with GELU in its epilogue, and a second product: Phi's, ViT's and GPT-2's feed-forward block."""

    OPS, BY = ("linear",), "linear with gelu in the epilogue"
    ELSE = "has another activation than GELU; only its parts are replaced"
    ACTIVATION: ClassVar[str] = "gelu"
    NAMES: ClassVar[tuple[tuple[str, ...], ...]] = (("fc1", "fc2"), ("c_fc", "c_proj"))

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        first, second = self.products(self)
        output = second(apply_linear(first, hidden_states, self.ACTIVATION, self._backend))
        dropout = getattr(self, "dropout", None)
        return output if dropout is None else dropout(output)


class GeluTanhMLP(GeluMLP):
    BY, ACTIVATION = "linear with gelu_tanh in the epilogue", "gelu_tanh"


class GeluIntermediate(GeluMLP):
    """BERT's first product and its GELU."""

    ENDING, NAMES = "Intermediate", (("dense",),)

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        return apply_linear(self.dense, hidden_states, self.ACTIVATION, self._backend)


class GeluTanhIntermediate(GeluIntermediate):
    BY, ACTIVATION = "linear with gelu_tanh in the epilogue", "gelu_tanh"


class Linear(Patched):
    OPS, BY, PROBED = ("linear",), "linear", False
    PYTORCHS: ClassVar[str] = "'auto' takes PyTorch's product where 8 divides both features"

    @classmethod
    def takes(cls, module: Any) -> bool:
        return type(module) is torch.nn.Linear

    @classmethod
    def stays(cls, module: Any, backend: str) -> str | None:
        return cls.PYTORCHS if backend == "auto" and never_needed(*module.weight.shape) else None

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        return ops.linear(input, self.weight, self.bias, backend=self._backend)


class Conv1D(Linear):
    PROBED = True

    @classmethod
    def takes(cls, module: Any) -> bool:
        return is_conv1d(module)

    @staticmethod
    def probe(module: Any) -> tuple[Any, ...]:
        return (3, in_features(module)), module.weight

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return apply_linear(self, x, None, self._backend)


class Attention(Patched):
    """PyTorch's own does the calls that return weights."""

    OPS, BY, PROBED = ("linear", "attention"), "linear and attention, unless weights are returned", False

    @classmethod
    def takes(cls, module: Any) -> bool:
        plain = type(module) is torch.nn.MultiheadAttention
        return plain and module.bias_k is None and module.bias_v is None and not module.add_zero_attn

    @classmethod
    def by(cls, module: Any, backend: str) -> str:
        return f"{cls.BY}; in training {dropping.by(module.dropout, backend)}" if module.dropout else cls.BY

    _project = MultiheadAttention._project

    def _attend(self: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, is_causal: bool) -> Any:
        if not self.training or not self.dropout:
            return MultiheadAttention._attend(self, q, k, v, mask, is_causal)
        return dropping.attention(
            q, k, v, mask, self.dropout, is_causal=is_causal, scale=None, enable_gqa=False, backend=self._backend
        )

    def forward(
        self: Any, query: Any, key: Any, value: Any, key_padding_mask: Any = None, need_weights: bool = True,
        attn_mask: Any = None, average_attn_weights: bool = True, is_causal: bool = False,
    ) -> Any:  # fmt: skip
        if need_weights:
            for name, mask in (("attn_mask", attn_mask), ("key_padding_mask", key_padding_mask)):
                if mask is not None:
                    check_mask("MultiheadAttention", name, mask)
            return super().forward(  # type: ignore[misc]
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        return MultiheadAttention.forward(
            self, query, key, value, key_padding_mask, False, attn_mask, average_attn_weights, is_causal
        )


class CrossEntropyLoss(Patched):
    """PyTorch's own does the calls with probabilities of classes in place of labels."""

    OPS, BY, PROBED = ("cross_entropy",), "cross_entropy of labels", False

    @classmethod
    def takes(cls, module: Any) -> bool:
        return type(module) is torch.nn.CrossEntropyLoss and module.weight is None

    def forward(self: Any, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if target.dtype != torch.int64:
            return super().forward(input, target)  # type: ignore[misc]
        return ops.cross_entropy(
            input, target, ignore_index=self.ignore_index, reduction=self.reduction,
            label_smoothing=self.label_smoothing, backend=self._backend,
        )  # fmt: skip


#: The kinds in the order in which a module is tried: blocks before their parts.
KINDS: tuple[type[Patched], ...] = (
    GatedMLP, JoinedGatedMLP, GeluMLP, GeluTanhMLP, GeluIntermediate, GeluTanhIntermediate, Attention, LayerNorm,
    TorchRMSNorm, RMSNorm, RoundedRMSNorm, UnitOffsetRMSNorm, T5LayerNorm, Gelu, GeluTanh, Linear, Conv1D,
    CrossEntropyLoss,
)  # fmt: skip
