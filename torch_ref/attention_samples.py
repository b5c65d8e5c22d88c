"""The calls of attention that are tested, refused and swept."""

import math
from collections.abc import Callable

import numpy as np
import torch

from kernel_ladder.semantics.masks import LOWER_RIGHT
from kernel_ladder.spec import Case, ErrorCase
from torch_ref.attention_builtin import lower_right


def _shapes(batch: tuple[int, ...], heads: int, heads_kv: int, s_q: int, s_k: int, d: int, d_v: int | None = None):
    return (*batch, heads, s_q, d), (*batch, heads_kv, s_k, d), (*batch, heads_kv, s_k, d if d_v is None else d_v)


def cases() -> list[Case]:
    def case(name: str, *shape: int, causal: bool | str = False, d_v: int | None = None, batch=None, **more) -> Case:
        b, h, h_kv, s_q, s_k, d = shape
        options = {"is_causal": causal, "scale": more.pop("scale", None), "enable_gqa": h != h_kv}
        options |= {"window_size": more.pop("window")} if "window" in more else {}
        options |= {"return_lse": True} if more.pop("lse", False) else {}
        shapes = _shapes((b,) if batch is None else batch, h, h_kv, s_q, s_k, d, d_v)
        if (mask := more.pop("mask", None)) is not None:
            shapes = (*shapes, mask)
        suffix = {False: "", True: "-causal", LOWER_RIGHT: "-lower-right"}[causal]
        return Case(name + suffix, shapes, options, **more)

    booleans, hidden_rows = {3: "boolean"}, {3: "hidden_rows"}

    return [
        # Sizes of one and zero.
        case("one", 1, 1, 1, 1, 1, 1),
        case("one-query", 2, 2, 2, 1, 37, 8),
        # One key is seen, so the gradients of query and key are zero. With one column of value, a fused backward
        # cancels to exactly zero, too.
        case("one-query", 1, 2, 2, 1, 37, 8, d_v=1, causal=True),
        case("one-key", 1, 2, 2, 19, 1, 8, d_v=1),
        case("one-key", 1, 2, 2, 19, 1, 8, d_v=1, causal=True),
        case("empty-batch", 0, 2, 2, 3, 3, 8),
        case("no-heads", 2, 0, 0, 3, 3, 8),
        case("no-queries", 1, 2, 2, 0, 3, 8),
        case("no-keys", 1, 2, 2, 3, 0, 8),
        # Lengths: a tile, one more, one less, primes, more queries than keys, and fewer.
        case("tile-1", 1, 1, 1, 63, 127, 40),
        case("tile-1", 1, 1, 1, 127, 127, 64, causal=True),
        case("tile", 1, 1, 1, 128, 128, 64),
        case("tile", 1, 1, 1, 128, 128, 64, causal=True),
        case("tile+1", 1, 1, 1, 65, 129, 64),
        case("tile+1", 1, 1, 1, 129, 129, 64, causal=True),
        case("prime", 1, 2, 2, 101, 83, 17, causal=True),
        case("prime", 1, 2, 2, 83, 101, 17, causal=True),
        case("odd", 1, 2, 2, 23, 33, 17, d_v=33, layout="bshd"),
        case("long-keys", 1, 1, 1, 5, 301, 16),
        case("long-queries", 1, 1, 1, 301, 5, 16, causal=True),
        # Head dimensions; those of value differ from those of query and key.
        case("d8", 2, 2, 2, 33, 33, 8, causal=True),
        case("d80", 1, 1, 1, 33, 65, 80),
        case("d96", 1, 1, 1, 65, 65, 96, causal=True),
        case("d128", 1, 1, 1, 65, 65, 128, causal=True),
        case("d256", 1, 1, 1, 65, 65, 256, causal=True),
        case("d256", 1, 1, 1, 33, 65, 256),
        case("d24-dv40", 1, 2, 2, 33, 47, 24, d_v=40),
        case("d64-dv8", 1, 2, 2, 33, 47, 64, d_v=8, causal=True),
        case("d40-dv8", 1, 2, 2, 33, 47, 40, d_v=8),
        # Heads, batches and the scale.
        case("gqa", 2, 6, 2, 35, 35, 16, causal=True),
        case("mqa", 1, 4, 1, 35, 67, 16),
        case("3d", 0, 3, 3, 17, 18, 8, batch=()),
        case("3d-gqa", 0, 4, 2, 17, 17, 8, batch=(), causal=True),
        case("5d", 0, 2, 1, 9, 17, 8, batch=(2, 3), causal=True),
        case("scale", 1, 2, 2, 33, 33, 8, scale=0.5, causal=True),
        case("scale-integer", 1, 2, 2, 65, 65, 8, scale=1),
        # Memory: (B, S, H, D) seen as (B, H, S, D), other orders, broken alignment, zero strides.
        case("bshd", 2, 4, 2, 35, 35, 64, layout="bshd", causal=True),
        case("transposed", 2, 2, 2, 35, 33, 16, layout="transposed"),
        case("strided", 1, 2, 2, 35, 33, 16, layout="strided", causal=True),
        case("sliced", 1, 2, 2, 35, 33, 64, layout="sliced"),
        case("expanded", 3, 2, 2, 33, 33, 16, layout="expanded", causal=True),
        # Values.
        case("large", 1, 2, 2, 97, 97, 8, d_v=2, values="large", scale=2**-12),
        case("nan", 1, 2, 2, 9, 17, 8, values="nan"),
        # Causal, aligned to the lower right. Fewer queries than keys, as in decoding with a cache, and more, so that
        # the first queries see no key.
        case("decode", 2, 4, 2, 1, 67, 16, causal=LOWER_RIGHT),
        case("decode-long", 1, 2, 1, 3, 1100, 16, causal=LOWER_RIGHT),
        case("decode-window", 1, 2, 2, 2, 700, 8, window=(600, 0), lse=True),
        case("fewer", 1, 2, 2, 5, 133, 16, causal=LOWER_RIGHT),
        case("fewer-tile", 1, 1, 1, 65, 130, 64, causal=LOWER_RIGHT),
        case("more", 1, 2, 1, 133, 35, 16, causal=LOWER_RIGHT),
        # Sliding windows: one-sided, two-sided, the diagonal alone, wider than a tile, queries that see no key.
        case("window", 1, 2, 2, 67, 67, 8, window=(9, 0), causal=True),
        case("window-both", 1, 2, 2, 67, 67, 8, window=(5, 3)),
        case("window-none", 1, 1, 1, 33, 33, 8, window=(0, 0)),
        case("window-small", 1, 1, 1, 7, 5, 4, window=(2, 1)),
        case("window-left", 1, 1, 1, 35, 67, 8, window=(4, -1)),
        case("window-right", 1, 1, 1, 67, 35, 8, window=(-1, 4)),
        case("window-tile", 1, 1, 1, 260, 260, 40, window=(70, 0), causal=LOWER_RIGHT),
        case("window-gqa", 1, 4, 2, 40, 203, 16, window=(64, 20)),
        case("window-and-causal", 1, 1, 1, 37, 60, 8, window=(30, 2), causal=True),
        # Masks: boolean and additive, every broadcast shape, other memory orders, hidden rows.
        case("mask", 1, 2, 2, 35, 67, 8, mask=(35, 67), kinds=booleans),
        case("mask-keys", 2, 2, 2, 33, 35, 8, mask=(2, 1, 1, 35), kinds=booleans),
        case("mask-hidden-rows", 2, 4, 2, 35, 33, 16, mask=(4, 35, 33), kinds=hidden_rows),
        case("mask-tile", 1, 1, 1, 130, 131, 64, mask=(1, 1, 130, 131), kinds=booleans),
        case("mask", 1, 2, 2, 65, 65, 8, mask=(65, 1), kinds=booleans, causal=True),
        case("mask-window", 1, 1, 1, 40, 70, 8, mask=(40, 70), kinds=hidden_rows, window=(20, 4)),
        case("mask-additive", 1, 2, 2, 17, 19, 8, mask=(1, 2, 17, 19)),
        case("mask-additive-head", 2, 2, 1, 9, 11, 8, mask=(2, 1, 11)),
        case("mask-additive-strided", 1, 2, 2, 17, 18, 8, mask=(1, 17, 18), layout="strided", causal=LOWER_RIGHT),
        case("mask-additive-transposed", 2, 1, 1, 13, 11, 8, mask=(1, 1, 13, 11), layout="transposed"),
        case("mask-additive-small", 1, 1, 1, 5, 6, 4, mask=(5, 6)),
        case("mask-no-keys", 1, 1, 1, 3, 0, 8, mask=(3, 0), kinds=booleans),
        # The log-sum-exp beside the output.
        case("lse", 2, 2, 2, 33, 67, 8, lse=True),
        case("lse", 1, 4, 2, 65, 65, 64, lse=True, causal=True, layout="bshd"),
        case("lse-hidden", 1, 2, 2, 37, 21, 16, lse=True, causal=LOWER_RIGHT),
        case("lse-mask", 1, 2, 2, 37, 21, 16, lse=True, mask=(37, 21), kinds=hidden_rows),
        case("lse-no-keys", 1, 2, 2, 3, 0, 8, lse=True),
        case("lse-3d", 0, 2, 2, 17, 18, 8, lse=True, batch=(), window=(3, 3)),
        # A scale that float32 cannot represent.
        case("scale-tiny", 1, 2, 2, 35, 37, 8, scale=1e-46),
        case("scale-tiny", 1, 2, 2, 35, 37, 8, scale=1e-46, causal=LOWER_RIGHT),
        # Masks of fewer than two dimensions.
        case("mask-vector", 2, 2, 2, 17, 19, 8, mask=(19,), kinds=booleans),
        case("mask-additive-vector", 1, 2, 2, 17, 19, 8, mask=(19,)),
        # Its gradient is that of the log-sum-exp alone, a sum of zeros without: then the formula's error would be luck.
        case("mask-additive-number", 1, 2, 2, 9, 11, 8, mask=(), lse=True),
    ]


def _bad(
    q: tuple[int, ...] = (2, 4, 5, 8),
    k: tuple[int, ...] = (2, 4, 5, 8),
    v: tuple[int, ...] | None = None,
    dtype: torch.dtype = torch.float32,
    **options: object,
) -> Callable[[], tuple[tuple[torch.Tensor, ...], dict]]:
    shapes = (q, k, k if v is None else v)
    return lambda: (tuple(torch.zeros(shape, dtype=dtype) for shape in shapes), dict(options))


def _mixed_dtypes() -> tuple:
    x = torch.zeros(1, 1, 2, 8)
    return (x, x.half(), x), {}


def _mixed_devices() -> tuple:
    x = torch.zeros(1, 1, 2, 8)
    return (x, x, x.to("meta")), {}


def _not_a_tensor() -> tuple:
    x = torch.zeros(1, 1, 2, 8)
    return (x, None, x), {}


ERRORS = [
    ErrorCase("not-a-tensor", _not_a_tensor, TypeError, r"`key` must be a torch\.Tensor, got NoneType"),
    ErrorCase("integer", _bad(dtype=torch.int32), TypeError, r"`query` has dtype int32; accepted are float16"),
    ErrorCase("complex", _bad(dtype=torch.complex64), TypeError, r"`query` has dtype complex64"),
    ErrorCase("dtypes", _mixed_dtypes, TypeError, r"`key` must have the same dtype, got float32 and float16"),
    ErrorCase("devices", _mixed_devices, ValueError, r"`value` must be on the same device, got cpu and meta"),
    ErrorCase("vector", _bad((8,), (5, 8)), ValueError, r"`query` must have at least 2 dimensions .* got \(8,\)"),
    ErrorCase("vector-key", _bad(k=(8,)), ValueError, r"`key` must have at least 2 dimensions .* got \(8,\)"),
    ErrorCase(
        "batch",
        _bad(k=(3, 4, 5, 8)),
        ValueError,
        r"`key` must have batch dimensions that broadcast .* of `query` \(2, 4, 5, 8\), got \(3, 4, 5, 8\)",
    ),
    ErrorCase(
        "value-batch",
        _bad((1, 4, 5, 8), (2, 4, 5, 8), (3, 4, 5, 8)),
        ValueError,
        r"`value` must have batch dimensions that broadcast .* of `key` \(2, 4, 5, 8\), got \(3, 4, 5, 8\)",
    ),
    ErrorCase("length", _bad(v=(2, 4, 6, 8)), ValueError, r"`value` must have .* \(H, S\) = \(4, 5\), got \(4, 6\)"),
    ErrorCase("length-1", _bad(v=(2, 4, 1, 8)), ValueError, r"`value` must have .* \(H, S\) = \(4, 5\), got \(4, 1\)"),
    ErrorCase("value-heads", _bad(v=(2, 3, 5, 8)), ValueError, r"`value` must have .* \(4, 5\), got \(3, 5\)"),
    ErrorCase("head-dim", _bad(k=(2, 4, 5, 16)), ValueError, r"`key` must have the head dimension .* 8, got 16"),
    ErrorCase("head-dim-0", _bad((2, 4, 5, 0), (2, 4, 5, 0)), ValueError, r"`query` has head dimension 0; accepted"),
    ErrorCase("head-dim-257", _bad(v=(2, 4, 5, 257)), ValueError, r"`value` has .* 257; accepted are 1 to 256"),
    ErrorCase("heads", _bad(k=(2, 2, 5, 8)), ValueError, r"`key` must have the 4 heads .*, or 1, unless .* got 2"),
    ErrorCase(
        "group", _bad(k=(2, 3, 5, 8), enable_gqa=True), ValueError, r"`key` must have .* divides query's 4, got 3"
    ),
    ErrorCase("is-causal", _bad(is_causal=1), TypeError, r"`is_causal` must be a bool or 'lower_right', got int"),
    ErrorCase(
        "is-causal-name", _bad(is_causal="left"), ValueError, r"`is_causal` must be a bool or 'lower_right', got"
    ),
    ErrorCase(
        "is-causal-array", _bad(is_causal=np.ones(2)), TypeError, r"`is_causal` must be a bool or .*, got ndarray"
    ),
    ErrorCase("return-lse", _bad(return_lse=1), TypeError, r"`return_lse` must be a bool, got int"),
    ErrorCase("dropout", _bad(dropout_p=1, seed=0), ValueError, r"`dropout_p` must be at least 0 and .* got 1\.0"),
    ErrorCase("dropout-type", _bad(dropout_p=None), TypeError, r"`dropout_p` must be a number, got NoneType"),
    ErrorCase("dropout-seed", _bad(dropout_p=0.1), TypeError, r"`seed` must be an int, got NoneType; every call draws"),
    ErrorCase("seed", _bad(dropout_p=0.1, seed=-1), ValueError, r"`seed` must be from 0 to 2\^63 - 1, got -1"),
    ErrorCase("window-type", _bad(window_size=3), TypeError, r"`window_size` must be two ints .* or None, got 3"),
    ErrorCase(
        "window-array",
        _bad(window_size=np.array([3, 0])),
        TypeError,
        r"`window_size` must be two ints .* or None, got array\(\[3, 0\]\)",
    ),
    ErrorCase(
        "window-arrays",
        _bad(window_size=(np.zeros(2), 0)),
        TypeError,
        r"`window_size` must be two ints .* or None, got \(array\(\[0\., 0\.\]\), 0\)",
    ),
    ErrorCase(
        "window-three", _bad(window_size=(1, 2, 3)), TypeError, r"`window_size` must be two ints .* got \(1, 2, 3\)"
    ),
    ErrorCase(
        "window-low", _bad(window_size=(-2, 0)), ValueError, r"`window_size` must hold numbers from -1, .* \(-2, 0\)"
    ),
    ErrorCase(
        "mask-type",
        _bad(attn_mask=1),
        TypeError,
        r"`attn_mask` must be a torch\.Tensor, a causal bias .* or None, got int",
    ),
    ErrorCase(
        "mask-integer",
        _bad(attn_mask=torch.ones(5, 5).int()),
        TypeError,
        r"`attn_mask` has dtype int32; accepted are bool and the dtype of `query`, float32",
    ),
    ErrorCase(
        "mask-dtype",
        _bad(attn_mask=torch.ones(5, 5).half()),
        TypeError,
        r"`query` and `attn_mask` must have the same dtype, got float32 and float16; a bool one goes with any",
    ),
    ErrorCase(
        "mask-device",
        _bad(attn_mask=torch.ones(5, 5, dtype=torch.bool, device="meta")),
        ValueError,
        r"`query` and `attn_mask` must be on the same device, got cpu and meta",
    ),
    ErrorCase(
        "mask-shape",
        _bad(attn_mask=torch.ones(4, 5, dtype=torch.bool)),
        ValueError,
        r"`attn_mask` must broadcast to the shape \(2, 4, 5, 5\) of the scores, got \(4, 5\)",
    ),
    ErrorCase(
        "bias-lengths",
        lambda: _bad(attn_mask=lower_right(5, 6))(),
        ValueError,
        r"`attn_mask` is a causal bias for lengths \(5, 6\), got \(5, 5\)",
    ),
    ErrorCase(
        "bias-causal",
        lambda: _bad(attn_mask=lower_right(5, 5), is_causal=True)(),
        ValueError,
        r"`is_causal` must be False where `attn_mask` is a causal bias",
    ),
    ErrorCase("enable-gqa", _bad(enable_gqa=None), TypeError, r"`enable_gqa` must be a bool, got NoneType"),
    ErrorCase("scale-type", _bad(scale="1"), TypeError, r"`scale` must be a positive number or None, got str"),
    ErrorCase("scale-bool", _bad(scale=True), TypeError, r"`scale` must be a positive number or None, got bool"),
    ErrorCase("scale-beyond", _bad(scale=10**309), ValueError, r"`scale` must be positive and finite, got 1000000"),
    ErrorCase("scale-zero", _bad(scale=0.0), ValueError, r"`scale` must be positive and finite, got 0\.0"),
    ErrorCase("scale-negative", _bad(scale=-1.0), ValueError, r"`scale` must be positive and finite, got -1\.0"),
    ErrorCase("scale-nan", _bad(scale=math.nan), ValueError, r"`scale` must be positive and finite, got nan"),
    ErrorCase("scale-inf", _bad(scale=math.inf), ValueError, r"`scale` must be positive and finite, got inf"),
]


def sweep() -> list[Case]:
    quick = {(4096, 128, False), (4096, 128, True), (512, 64, False)}
    both = {512, 2048, 4096, 16384}
    tokens, model_dim = 16384, 2048
    points = []
    for d in (64, 128, 256):
        for s in (512, 1024, 2048, 4096, 8192, 16384):
            for causal in (False, True):
                b, h = tokens // s, model_dim // d
                options = {"is_causal": causal, "scale": None, "enable_gqa": False}
                ident = f"B{b} H{h} S{s} D{d} {'causal' if causal else 'full'}"
                passes = ("forward", "backward") if s in (both if d < 256 else {4096}) else ("forward",)
                shapes = _shapes((b,), h, h, s, s, d)
                points.append(Case(ident, shapes, options, quick=(s, d, causal) in quick, passes=passes))
    grouped = {"is_causal": True, "scale": None, "enable_gqa": True}
    points.append(Case("B2 H32/8 S4096 D128 causal", _shapes((2,), 32, 8, 4096, 4096, 128), grouped))
    ours = {"is_causal": True, "scale": None, "enable_gqa": False}
    points.append(Case("B2 H16 S4096 D96 causal", _shapes((2,), 16, 16, 4096, 4096, 96), ours))
    points.append(Case("B2 H16 S4096 D192/128 causal", _shapes((2,), 16, 16, 4096, 4096, 192, 128), ours))
    window = {**ours, "window_size": (1023, 0)}
    points.append(Case("B1 H16 S16384 D128 window", _shapes((1,), 16, 16, 16384, 16384, 128), window))
    # Decoding: one new token per sequence, with cached keys and values. Training has no such calls: forward only.
    for b, s_k in ((8, 8192), (8, 131072), (32, 32768), (64, 4096)):
        decode = {**grouped, "is_causal": LOWER_RIGHT}
        shapes = _shapes((b,), 32, 8, 1, s_k, 128)
        points.append(Case(f"B{b} H32/8 Q1 S{s_k} D128 decode", shapes, decode, passes=("forward",)))
    return points
