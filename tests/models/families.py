"""A tiny random model of each Hugging Face family that a patch must know, and inputs for it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers as tf

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 2}
WIDE = {**GROUPED, "head_dim": 16}

FAMILIES: dict[str, Callable[[], torch.nn.Module]] = {
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**GROUPED)),
    "mistral": lambda: tf.MistralForCausalLM(tf.MistralConfig(**GROUPED, sliding_window=4)),
    "qwen2": lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**GROUPED)),
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**WIDE)),
    "gemma": lambda: tf.GemmaForCausalLM(tf.GemmaConfig(**WIDE)),
    "gemma2": lambda: tf.Gemma2ForCausalLM(tf.Gemma2Config(**WIDE)),
    "gemma3": lambda: tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**WIDE, sliding_window=4)),
    "phi": lambda: tf.PhiForCausalLM(tf.PhiConfig(**GROUPED)),
    "phi3": lambda: tf.Phi3ForCausalLM(tf.Phi3Config(**GROUPED)),
    # Two layers, one of them with a window. PyTorch's grouped products of experts take no float64.
    "gpt_oss": lambda: tf.GptOssForCausalLM(
        tf.GptOssConfig(
            **{**WIDE, "num_hidden_layers": 2},
            sliding_window=4,
            num_local_experts=4,
            num_experts_per_tok=2,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            experts_implementation="eager",
        )
    ),
    "gpt2": lambda: tf.GPT2LMHeadModel(
        tf.GPT2Config(vocab_size=61, n_embd=32, n_layer=1, n_head=2, n_positions=32, bos_token_id=1, eos_token_id=2)
    ),
    "bert": lambda: tf.BertForMaskedLM(tf.BertConfig(**SIZES)),
    "vit": lambda: tf.ViTForImageClassification(
        tf.ViTConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
        )
    ),
}

#: Those that generate text.
DECODERS = [name for name in FAMILIES if name not in ("bert", "vit")]


def make(family: str, device: torch.device | str = "cpu") -> torch.nn.Module:
    """A model in evaluation mode, whose norms do not have weights of one, nor its attention sinks of nearly zero."""
    torch.manual_seed(len(family))
    model = FAMILIES[family]().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name.lower() and name.endswith("weight"):
                p.add_(torch.randn_like(p) * 0.2)
            elif name.endswith("sinks"):
                p.add_(torch.randn_like(p))
    return model.to(device)


def inputs(family: str, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """Inputs with labels, so that there is a loss."""
    generator = torch.Generator().manual_seed(1)
    if family == "vit":
        pixels = torch.randn(2, 3, 8, 8, generator=generator)
        return {"pixel_values": pixels.to(device), "labels": torch.tensor([0, 1], device=device)}
    tokens = torch.randint(3, 61, (2, 6), generator=generator).to(device)
    return {"input_ids": tokens, "labels": tokens}
