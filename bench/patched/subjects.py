"""The models that are measured: the families that a patch knows, with public models' widths and fewer layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

#: Causal language models generate; the labels of others are of their own kind.
CAUSAL, MASKED, IMAGES = "causal", "masked", "images"


@dataclass(frozen=True)
class Subject:
    """A model by the names of its classes in transformers, its sizes, and the batch that it gets."""

    family: str
    like: str  # the public model whose widths it has
    model: str
    config: str
    sizes: dict[str, Any]
    batch: int
    tokens: int
    tiny: dict[str, Any] = field(default_factory=dict)
    kind: str = CAUSAL

    def make(self, quick: bool, dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
        """The model with random weights, the same in every process; without dropout."""
        import transformers

        torch.manual_seed(0)
        sizes = {**self.sizes, **(self.tiny if quick else {})}
        config = getattr(transformers, self.config)(**sizes, **NO_DROPOUT.get(self.family, {}))
        with device:
            return getattr(transformers, self.model)(config).to(dtype).eval()

    def layers(self, quick: bool) -> int:
        sizes = {**self.sizes, **(self.tiny if quick else {})}
        return int(sizes.get("num_hidden_layers") or sizes["n_layer"])

    def batch_of(self, quick: bool) -> tuple[int, int]:
        """Sequences and their tokens; of a model of images, images and their patches."""
        return (2, min(self.tokens, 16)) if quick else (self.batch, self.tokens)

    def inputs(self, model: Any, batch: int, tokens: int) -> dict[str, torch.Tensor]:
        """Random inputs with labels, the same in every process."""
        generator = torch.Generator().manual_seed(1)
        config, device = model.config, next(model.parameters()).device
        if self.kind == IMAGES:
            size = config.image_size
            pixels = torch.randn(batch, 3, size, size, generator=generator)
            labels = torch.randint(config.num_labels, (batch,), generator=generator)
            return {"pixel_values": pixels.to(device, model.dtype), "labels": labels.to(device)}
        given = torch.randint(3, config.vocab_size, (batch, tokens), generator=generator).to(device)
        return {"input_ids": given, "labels": given, **({"use_cache": False} if self.kind == CAUSAL else {})}


def _sizes(hidden: int, inner: int, layers: int, heads: int, words: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "vocab_size": words, **more,
    }  # fmt: skip


_TINY = _sizes(32, 48, 1, 4, 61)
_TINY_GROUPED = {**_TINY, "num_key_value_heads": 2}
_TINY_GPT2 = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 61, "n_positions": 64}
_TINY_VIT = {**_TINY, "image_size": 8, "patch_size": 4}
NO_DROPOUT = {
    "phi": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attention_dropout": 0.0},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}

SUBJECTS = {
    subject.family: subject
    for subject in (
        Subject(
            "llama", "TinyLlama 1.1B with 8 heads of keys", "LlamaForCausalLM", "LlamaConfig",
            _sizes(2048, 5632, 8, 16, 32000, num_key_value_heads=8, max_position_embeddings=4096), 4, 2048,
            _TINY_GROUPED,
        ),
        Subject(
            "mistral", "Mistral 7B", "MistralForCausalLM", "MistralConfig",
            _sizes(4096, 14336, 4, 32, 32000, num_key_value_heads=8, sliding_window=1024), 2, 4096,
            {**_TINY_GROUPED, "sliding_window": 4},
        ),
        Subject(
            "qwen3", "Qwen 3 0.6B", "Qwen3ForCausalLM", "Qwen3Config",
            _sizes(1024, 3072, 14, 16, 151936, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True), 4, 2048,
            {**_TINY_GROUPED, "head_dim": 16},
        ),
        Subject(
            "gemma", "Gemma 2B", "GemmaForCausalLM", "GemmaConfig",
            _sizes(2048, 16384, 4, 8, 256000, num_key_value_heads=1, head_dim=256), 2, 2048,
            {**_TINY_GROUPED, "head_dim": 16},
        ),
        Subject(
            "phi", "Phi 1.5", "PhiForCausalLM", "PhiConfig",
            _sizes(2048, 8192, 8, 32, 51200, max_position_embeddings=2048), 4, 2048, _TINY,
        ),
        Subject(
            "gpt2", "GPT-2 124M", "GPT2LMHeadModel", "GPT2Config",
            {"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}, 8, 1024, _TINY_GPT2,
        ),
        Subject("bert", "BERT base", "BertForMaskedLM", "BertConfig", _sizes(768, 3072, 12, 12, 30522), 32, 512, _TINY,
                kind=MASKED),
        Subject(
            "vit", "ViT base", "ViTForImageClassification", "ViTConfig",
            {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
            64, 197, _TINY_VIT, kind=IMAGES,
        ),
    )
}  # fmt: skip
