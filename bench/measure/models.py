"""The calls of public models: layer sizes as their configuration files state them, and the calls that follow from them.

A model that other sizes repeat is left out. DeepSeek's latent attention has no standard calls: its later models stand
here with their feed-forward layers alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kernel_ladder.semantics.masks import LOWER_RIGHT
from kernel_ladder.spec import PASSES, Case

#: Rows of a call: one token, few, a short prompt, lengths that no tile divides, a long prompt, a batch.
TOKENS = (1, 7, 64, 300, 777, 2048, 4096, 12345)
#: Calls of fewer tokens are decoding or short prompts: forward only.
TRAINING_TOKENS = 300
#: Cached keys of a call with at most DECODE_TOKENS queries.
CACHE = 4096
DECODE_TOKENS = 7

#: The largest output, in elements: a head computes scores of few tokens at a time.
MOST_OUTPUTS = 1 << 30

DECODER, GPT, ENCODER = "decoder", "gpt", "encoder"


class Model(NamedTuple):
    """Sizes of a model. `kind`: a decoder with RMS norm and SwiGLU, one as GPT-2, or an encoder that sees all tokens.

    `heads` is 0 where only the feed-forward layer is meant; `vocab` counts classes in an image model.
    """

    name: str
    kind: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int


#                     kind     hidden  inter.  heads  kv  dim   vocab
MODELS = (
    Model("GPT-2", GPT, 768, 3072, 12, 12, 64, 50257),
    Model("GPT-2 XL", GPT, 1600, 6400, 25, 25, 64, 50257),
    Model("BERT base", ENCODER, 768, 3072, 12, 12, 64, 30522),
    Model("BERT large", ENCODER, 1024, 4096, 16, 16, 64, 30522),
    Model("ViT-L/16", ENCODER, 1024, 4096, 16, 16, 64, 1000),
    Model("ViT-H/14", ENCODER, 1280, 5120, 16, 16, 80, 1000),
    Model("Whisper tiny", ENCODER, 384, 1536, 6, 6, 64, 51865),
    Model("Whisper large v3", ENCODER, 1280, 5120, 20, 20, 64, 51866),
    Model("Llama 2 7B", DECODER, 4096, 11008, 32, 32, 128, 32000),
    Model("Llama 2 13B", DECODER, 5120, 13824, 40, 40, 128, 32000),
    Model("Llama 2 70B", DECODER, 8192, 28672, 64, 8, 128, 32000),
    Model("Llama 3 8B", DECODER, 4096, 14336, 32, 8, 128, 128256),
    Model("Llama 3 70B", DECODER, 8192, 28672, 64, 8, 128, 128256),
    Model("Mistral 7B", DECODER, 4096, 14336, 32, 8, 128, 32000),
    Model("Falcon 7B", GPT, 4544, 18176, 71, 1, 64, 65024),
    Model("Qwen 2.5 0.5B", DECODER, 896, 4864, 14, 2, 64, 151936),
    Model("Qwen 2.5 1.5B", DECODER, 1536, 8960, 12, 2, 128, 151936),
    Model("Qwen 2.5 3B", DECODER, 2048, 11008, 16, 2, 128, 151936),
    Model("Qwen 2.5 7B", DECODER, 3584, 18944, 28, 4, 128, 152064),
    Model("Qwen 2.5 14B", DECODER, 5120, 13824, 40, 8, 128, 152064),
    Model("Qwen 2.5 32B", DECODER, 5120, 27648, 40, 8, 128, 152064),
    Model("Qwen 2.5 72B", DECODER, 8192, 29568, 64, 8, 128, 152064),
    Model("Gemma 2B", DECODER, 2048, 16384, 8, 1, 256, 256000),
    Model("Gemma 7B", DECODER, 3072, 24576, 16, 16, 256, 256000),
    Model("Gemma 2 9B", DECODER, 3584, 14336, 16, 8, 256, 256000),
    Model("DeepSeek 7B", DECODER, 4096, 11008, 32, 32, 128, 102400),
    Model("DeepSeek 67B", DECODER, 8192, 22016, 64, 8, 128, 102400),
    Model("DeepSeek V3 expert", DECODER, 7168, 2048, 0, 0, 0, 129280),
)
#: Models and tokens of the short sweep.
QUICK_MODELS = ("GPT-2", "Llama 3 8B", "Qwen 2.5 7B")
QUICK_TOKENS = (1, 777, 4096)
#: Models whose attention is measured with a boolean mask too: that of padded keys, or one of each query and key, as a
#: batch of padded prompts has.
PADDED_KEYS, PADDED_PROMPTS = ("BERT base",), ("GPT-2", "Llama 3 8B")


class Layer(NamedTuple):
    """A linear layer: `name`, outputs, inputs, activation; it has a bias or not."""

    name: str
    n: int
    k: int
    activation: str | None
    bias: bool


class Call(NamedTuple):
    """A call of an operation, and who makes it."""

    op: str
    case: Case
    name: str


def layers(model: Model) -> Iterator[Layer]:
    """The linear layers of a model's block, and its head."""
    bias = model.kind != DECODER
    if model.heads:
        inner = model.heads * model.head_dim
        yield Layer("query", inner, model.hidden, None, bias)
        yield Layer("query, key and value", inner + 2 * model.kv_heads * model.head_dim, model.hidden, None, bias)
        yield Layer("attention output", model.hidden, inner, None, bias)
    if model.kind == DECODER:
        yield Layer("gate and up", 2 * model.intermediate, model.hidden, None, False)
    else:
        yield Layer("up", model.intermediate, model.hidden, "gelu", True)
    yield Layer("down", model.hidden, model.intermediate, None, bias)
    yield Layer("head", model.vocab, model.hidden, None, False)


def _passes(tokens: int) -> tuple[str, ...]:
    return PASSES if tokens >= TRAINING_TOKENS else ("forward",)


def _products(model: Model, tokens: int, quick: bool) -> Iterator[Call]:
    for name, n, k, activation, bias in layers(model):
        if tokens * n > MOST_OUTPUTS:
            continue
        ident = f"{tokens}x{n}x{k}"
        said = f"{activation or 'none'}{'' if bias else ' no bias'}"
        shapes = ((tokens, k), (n, k), (n,) if bias else None)
        options = {"activation": activation}
        linear = Case(f"{ident} {said}", shapes, options, quick=quick, passes=_passes(tokens), climb=False)
        yield Call("linear", linear, name)
        # A layer's weight has a row for each output: the product's second operand lies along K.
        layout = ("contiguous", "transposed")
        product = Case(
            f"{ident} NT", ((tokens, k), (k, n)), layout=layout, quick=quick, passes=("forward",), climb=False
        )
        yield Call("matmul", product, name)


def _attention(model: Model, tokens: int, quick: bool) -> Iterator[Call]:
    if not model.heads:
        return
    grouped = model.kv_heads != model.heads
    heads = f"H{model.heads}/{model.kv_heads}" if grouped else f"H{model.heads}"
    decodes = model.kind != ENCODER and tokens <= DECODE_TOKENS
    keys = CACHE if decodes else tokens
    causal = LOWER_RIGHT if decodes else model.kind != ENCODER
    form = f"Q{tokens} S{keys}" if decodes else f"S{tokens}"
    what = "decode" if decodes else "causal" if causal else "full"
    q, kv = (1, model.heads, tokens, model.head_dim), (1, model.kv_heads, keys, model.head_dim)
    options = {"is_causal": causal, "scale": None, "enable_gqa": grouped}
    passes = _passes(tokens) if model.head_dim <= 128 else ("forward",)
    ident = f"B1 {heads} {form} D{model.head_dim} {what}"
    yield Call("attention", Case(ident, (q, kv, kv), options, quick=quick, passes=passes, climb=False), "attention")
    if tokens >= TRAINING_TOKENS and model.name in (*PADDED_KEYS, *PADDED_PROMPTS):
        mask = (1, 1, 1 if model.name in PADDED_KEYS else tokens, tokens)
        ident = f"B1 {heads} S{tokens} D{model.head_dim} mask {mask[2]}x{mask[3]}"
        given = {"kinds": {3: "boolean"}, "quick": tokens in QUICK_TOKENS, "passes": passes, "climb": False}
        yield Call("attention", Case(ident, (q, kv, kv, mask), {**options, "is_causal": False}, **given), "attention")


def _rows(model: Model, tokens: int, quick: bool) -> Iterator[Call]:
    def case(length: int, shapes: tuple[tuple[int, ...], ...], options: dict, suffix: str = "") -> Case:
        ident = f"{tokens}x{length}{suffix}"
        return Case(ident, shapes, options, quick=quick, passes=_passes(tokens), climb=False)

    hidden, inner, vocab = model.hidden, model.intermediate, model.vocab
    x, h = (tokens, hidden), (tokens, inner)
    if model.kind == DECODER:
        yield Call("rms_norm", case(hidden, (x, (hidden,)), {"normalized_shape": (hidden,), "eps": None}), "norm")
        yield Call("add_rms_norm", case(hidden, (x, x, (hidden,)), {"eps": None}), "norm")
        yield Call("swiglu", case(inner, (h, h), {}), "activation")
    else:
        norm = {"normalized_shape": (hidden,), "eps": 1e-5}
        yield Call("layer_norm", case(hidden, (x, (hidden,), (hidden,)), norm), "norm")
        vector = (hidden,)
        chain = {"p": 0.1, "seed": 42, "eps": 1e-5}
        yield Call(
            "bias_dropout_add_layer_norm", case(hidden, (x, vector, x, vector, vector), chain), "end of a sublayer"
        )
        yield Call("bias_gelu", case(inner, (h, (inner,)), {"approximate": "none"}, " none"), "activation")
    yield Call("add", case(hidden, (x, x), {}), "residual")
    if tokens * vocab <= MOST_OUTPUTS:
        yield Call("softmax", case(vocab, ((tokens, vocab),), {"dim": -1}), "head")


def calls() -> Iterator[Call]:
    """Every call of every model at every number of tokens, repeated ones too."""
    for model in MODELS:
        for tokens in TOKENS:
            quick = model.name in QUICK_MODELS and tokens in QUICK_TOKENS
            for make in (_products, _attention, _rows):
                for op, case, name in make(model, tokens, quick):
                    yield Call(op, case, f"{model.name} {name}")
