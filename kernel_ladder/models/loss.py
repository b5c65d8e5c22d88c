"""The loss of Hugging Face's causal language models by ``linear_cross_entropy``, without logits in memory.

Their forward pass is: hidden states, a linear head, logits, ``loss_function(logits, labels)``. In training with labels
a patched model gives the hidden states and the head's weight to ``linear_cross_entropy`` instead, and its output has no
logits. Every other call runs the model's own forward pass. If that has labels, ``cross_entropy`` reads the logits as
they are: transformers' own loss copies them to float32 first.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from kernel_ladder import ops
from kernel_ladder.models.kinds import Patched, is_linear, subclass

#: Arguments of the model's loss. Its labels are those of the next token, shifted by the loss itself.
LOSS = ("num_items_in_batch", "ignore_index", "shift_labels")
#: Arguments of a forward pass that no layer gets. Given as anything but these or None, they ask for logits.
NEUTRAL = {"logits_to_keep": 0, "return_dict": True}
ELSE = "between hidden states and loss lies more than one product"


class CausalLoss(Patched):
    """A causal language model whose loss in training needs no logits; made by :func:`loss_class`."""

    OPS = ("linear_cross_entropy", "cross_entropy")
    BY = "linear_cross_entropy in training with labels, where logits are None; else cross_entropy"


def _loss(self: Any, hidden: torch.Tensor, labels: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """The loss of hidden states that the head has not seen."""
    weight = self.get_output_embeddings().weight
    run = functools.partial(ops.linear_cross_entropy, hidden.flatten(0, -2), weight)
    return _reduced(run, self._backend, hidden, labels, **options)


def _loss_of_logits(
    self: Any, logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **options: Any
) -> torch.Tensor:
    """What a model's forward pass calls as ``loss_function``."""
    run = functools.partial(ops.cross_entropy, logits.reshape(-1, vocab_size))
    return _reduced(run, self._backend, logits, labels, **{name: options[name] for name in LOSS if name in options})


def _reduced(
    run: Any,
    backend: str | None,
    predictions: torch.Tensor,
    labels: torch.Tensor,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
) -> torch.Tensor:
    """The mean over all labels that count, or their sum over ``num_items_in_batch``, in float32."""
    shifted = F.pad(labels, (0, 1), value=ignore_index)[..., 1:] if shift_labels is None else shift_labels
    loss = run(
        shifted.flatten().to(predictions.device), ignore_index=ignore_index,
        reduction="mean" if num_items_in_batch is None else "sum", wide_loss=True, backend=backend,
    )  # fmt: skip
    if num_items_in_batch is None:
        return loss
    items = num_items_in_batch
    return loss / (items.to(loss.device) if isinstance(items, torch.Tensor) else items)


def _asks_for_logits(value: Any, neutral: int) -> bool:
    return value is not None and (isinstance(value, torch.Tensor) or value != neutral)


_classes: dict[type, type] = {}


def loss_class(base: Any) -> type:
    """The subclass of a model's class that computes its loss by ``linear_cross_entropy``."""
    if base not in _classes:
        own = property(_loss_function, base.loss_function.fset)
        _classes[base] = subclass(CausalLoss, base, forward=_forward_of(base), loss_function=own, __reduce_ex__=_reduce)
    return _classes[base]


def _loss_function(self: Any) -> Any:
    """The loss of logits, or one that the user has set since the model was patched."""
    return self.__dict__.get("_loss_function") or functools.partial(_loss_of_logits, self)


def _forward_of(base: Any) -> Any:
    names = [name for name in inspect.signature(base.forward).parameters if name != "self"]

    @functools.wraps(base.forward)  # transformers reads the names of a forward pass's arguments
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions, CausalLMOutputWithPast

        given = dict(zip(names, args, strict=False)) | kwargs
        taken = (
            self.training
            and given.get("labels") is not None
            and self.config.return_dict
            and not any(_asks_for_logits(given.get(name), neutral) for name, neutral in NEUTRAL.items())
            and type(self.get_output_embeddings().weight) is torch.nn.Parameter  # no shard of a distributed one
        )
        if not taken:
            return base.forward(self, *args, **kwargs)
        labels, options = given.pop("labels"), {name: given.pop(name) for name in LOSS if name in given}
        outputs = self.base_model(**{name: x for name, x in given.items() if name not in NEUTRAL})
        loss = _loss(self, outputs.last_hidden_state, labels, options)
        kind = CausalLMOutputWithCrossAttentions if "cross_attentions" in outputs else CausalLMOutputWithPast
        return kind(loss=loss, **{name: x for name, x in outputs.items() if name != "last_hidden_state"})

    return forward


def _reduce(self: Any, protocol: Any) -> Any:
    """Pickle by original class, since no module holds the class that was made of it."""
    return _remade, (type(self).__bases__[1],), self.__dict__


def _remade(base: type) -> Any:
    made: Any = loss_class(base)
    return made.__new__(made)


def why_not(model: Any) -> str | None:
    """Why a model's loss cannot be replaced, or None. Empty for a model that is no causal language model."""
    try:
        from transformers.loss.loss_utils import ForCausalLMLoss
        from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions as Outputs
    except ImportError:
        return ""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is None or not hasattr(model, "loss_function"):
        return ""
    if model.loss_function is not ForCausalLMLoss:
        return "is computed by a function of the user's" if "_loss_function" in model.__dict__ else ""
    if not is_linear(head) or not isinstance(head, torch.nn.Linear) or head.bias is not None:
        return "the head is more than one product without bias"
    if "forward" in model.__dict__:
        return "the forward pass was set by other code"
    if model.base_model is model:
        return "no module of the model holds all of it but the head"
    return None if _is_one_product(model, head, Outputs) else ELSE


def _is_one_product(model: Any, head: torch.nn.Linear, outputs: Any) -> bool:
    """Whether the loss gets what the head returns, and the head gets the hidden states.

    The model's forward pass runs with stand-ins for both and for the layers. So nothing is computed, and what it does
    to large logits shows as well.
    """
    hidden = torch.arange(2.0 * head.in_features).view(1, 2, -1)
    logits, loss = torch.zeros(1, 2, head.out_features), torch.zeros(())
    tokens = torch.zeros(1, 2, dtype=torch.int64)
    seen: dict[str, Any] = {}

    def layers(*args: Any, **kwargs: Any) -> Any:
        return outputs(last_hidden_state=hidden)

    def product(x: torch.Tensor) -> torch.Tensor:
        seen["hidden"] = x
        return logits

    def loss_function(logits: Any, labels: Any, vocab_size: int, **options: Any) -> torch.Tensor:
        seen.update(logits=logits, labels=labels, classes=vocab_size)
        return loss

    training = model.training
    with (
        mock.patch.dict(model.base_model.__dict__, {"forward": layers}),
        mock.patch.dict(head.__dict__, {"forward": product}),
        mock.patch.dict(model.__dict__, {"_loss_function": loss_function}),
    ):
        try:
            model.training = True
            found = model(input_ids=tokens, labels=tokens)
        except Exception:
            return False
        finally:
            model.training = training
    return (
        seen.keys() >= {"hidden", "logits"}
        and torch.equal(seen["hidden"], hidden)
        and seen["logits"] is logits
        and seen["labels"] is tokens
        and seen["classes"] == head.out_features
        and found.loss is loss
    )
