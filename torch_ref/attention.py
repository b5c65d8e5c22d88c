"""Attention, ``softmax(query · keyᵀ · scale) · value`` (Vaswani et al., arXiv:1706.03762, equation 1).

scores:  S[i, j] = scale · Σ_d query[i, d] · key[j, d];  causal: only j ≤ i, counted from the top left
weights: P[i, j] = exp(S[i, j] − max_j S[i, j]) / Σ_j exp(S[i, j] − max_j S[i, j])
output:  O[i, d] = Σ_j P[i, j] · value[j, d]

Grouped queries (Ainslie et al., arXiv:2305.13245): consecutive query heads share one head of key and value.
"""

import math
import numbers
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernel_ladder.spec import Case, ErrorCase, Inputs, Spec, check_tensors
from kernel_ladder.table import register, register_spec

MAX_HEAD_DIM = 256


def naive(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """The formula: the whole matrix of scores goes out to memory and comes back at every step."""
    if enable_gqa and key.shape[-3]:
        group = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(group, dim=-3), value.repeat_interleave(group, dim=-3)
    scores = query * (query.shape[-1] ** -0.5 if scale is None else scale) @ key.transpose(-1, -2)
    if scores.shape[-1] == 0:
        return scores @ value  # a sum over no keys: zeros, as PyTorch gives
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    # The result does not depend on what is subtracted, so no gradient goes through the maximum.
    exp = torch.exp(scores - scores.detach().amax(-1, keepdim=True))
    return (exp / exp.sum(-1, keepdim=True)) @ value


def builtin(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: object) -> torch.Tensor:
    """PyTorch's own choice among its kernels."""
    return F.scaled_dot_product_attention(query, key, value, **options)


def check(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, is_causal: bool, scale: object, enable_gqa: bool
) -> None:
    check_tensors("attention", query=query, key=key, value=value)
    q, k, v = query.shape, key.shape, value.shape
    # Every call comes by here: first whether all is as it mostly is, and only else what is not, if anything.
    if not (
        len(q) >= 3
        and k[:-3] == q[:-3]
        and v[:-1] == k[:-1]
        and k[-1] == q[-1]
        and 1 <= q[-1] <= MAX_HEAD_DIM
        and 1 <= v[-1] <= MAX_HEAD_DIM
        and isinstance(is_causal, bool)
        and isinstance(enable_gqa, bool)
        and k[-3] == q[-3]
        and scale is None
    ):
        _check_each(q, k, v, is_causal, scale, enable_gqa)


def _check_each(
    q: torch.Size, k: torch.Size, v: torch.Size, is_causal: object, scale: object, enable_gqa: object
) -> None:
    """Raise for the first thing wrong with the shapes and options, if there is one."""
    if len(q) < 3:
        raise ValueError(f"attention: argument `query` must have at least 3 dimensions (..., H, S, D), got {tuple(q)}")
    for name, shape in (("key", k), ("value", v)):
        if len(shape) != len(q) or shape[:-3] != q[:-3]:
            raise ValueError(
                f"attention: argument `{name}` must have as many dimensions and the same batch dimensions as `query` "
                f"{tuple(q)}, got {tuple(shape)}"
            )
    if v[-3:-1] != k[-3:-1]:
        raise ValueError(
            f"attention: argument `value` must have the heads and length of `key` (H, S) = {tuple(k[-3:-1])}, "
            f"got {tuple(v[-3:-1])}"
        )
    if k[-1] != q[-1]:
        raise ValueError(f"attention: argument `key` must have the head dimension of `query`, {q[-1]}, got {k[-1]}")
    for name, dim in (("query", q[-1]), ("value", v[-1])):
        if not 1 <= dim <= MAX_HEAD_DIM:
            raise ValueError(f"attention: argument `{name}` has head dimension {dim}; accepted are 1 to {MAX_HEAD_DIM}")
    for name, flag in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        if not isinstance(flag, bool):
            raise TypeError(f"attention: argument `{name}` must be a bool, got {type(flag).__name__}")
    if k[-3] != q[-3]:
        if not enable_gqa:
            raise ValueError(
                f"attention: argument `key` must have the {q[-3]} heads of `query` unless `enable_gqa` is True, "
                f"got {k[-3]}"
            )
        if k[-3] == 0 or q[-3] % k[-3]:
            raise ValueError(
                f"attention: argument `key` must have a number of heads that divides query's {q[-3]}, got {k[-3]}"
            )
    if scale is not None:
        if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
            raise TypeError(
                f"attention: argument `scale` must be a positive number or None, got {type(scale).__name__}"
            )
        if not 0 < scale < math.inf:
            raise ValueError(f"attention: argument `scale` must be positive and finite, got {scale}")


def _shapes(batch: tuple[int, ...], heads: int, heads_kv: int, s_q: int, s_k: int, d: int, d_v: int | None = None):
    return (*batch, heads, s_q, d), (*batch, heads_kv, s_k, d), (*batch, heads_kv, s_k, d if d_v is None else d_v)


def _cases() -> list[Case]:
    def case(name: str, *shape: int, causal: bool = False, d_v: int | None = None, batch=None, **more) -> Case:
        b, h, h_kv, s_q, s_k, d = shape
        options = {"is_causal": causal, "scale": more.pop("scale", None), "enable_gqa": h != h_kv}
        shapes = _shapes((b,) if batch is None else batch, h, h_kv, s_q, s_k, d, d_v)
        return Case(f"{name}-causal" if causal else name, shapes, options, **more)

    return [
        # One of everything, and nothing.
        case("one", 1, 1, 1, 1, 1, 1),
        case("one-query", 2, 2, 2, 1, 37, 8),
        # One key seen: the gradients of query and key are zero, and one column of value lets a fused backward, too,
        # cancel to exactly that.
        case("one-query", 1, 2, 2, 1, 37, 8, d_v=1, causal=True),
        case("one-key", 1, 2, 2, 19, 1, 8, d_v=1),
        case("one-key", 1, 2, 2, 19, 1, 8, d_v=1, causal=True),
        case("empty-batch", 0, 2, 2, 3, 3, 8),
        case("no-heads", 2, 0, 0, 3, 3, 8),
        case("no-queries", 1, 2, 2, 0, 3, 8),
        case("no-keys", 1, 2, 2, 3, 0, 8),
        # Lengths: a tile and one more or less, primes, more queries than keys and fewer.
        case("tile-1", 1, 1, 1, 63, 127, 40),
        case("tile-1", 1, 1, 1, 127, 127, 64, causal=True),
        case("tile", 1, 1, 1, 128, 128, 64),
        case("tile", 1, 1, 1, 128, 128, 64, causal=True),
        case("tile+1", 1, 1, 1, 65, 129, 64),
        case("tile+1", 1, 1, 1, 129, 129, 64, causal=True),
        case("prime", 1, 2, 2, 101, 83, 17, causal=True),
        case("prime", 1, 2, 2, 83, 101, 17, causal=True),
        case("long-keys", 1, 1, 1, 5, 301, 16),
        case("long-queries", 1, 1, 1, 301, 5, 16, causal=True),
        # Head dimensions, of value apart from query and key.
        case("d8", 2, 2, 2, 33, 33, 8, causal=True),
        case("d80", 1, 1, 1, 33, 65, 80),
        case("d96", 1, 1, 1, 65, 65, 96, causal=True),
        case("d128", 1, 1, 1, 65, 65, 128, causal=True),
        case("d256", 1, 1, 1, 65, 65, 256, causal=True),
        case("d256", 1, 1, 1, 33, 65, 256),
        case("d24-dv40", 1, 2, 2, 33, 47, 24, d_v=40),
        case("d64-dv8", 1, 2, 2, 33, 47, 64, d_v=8, causal=True),
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
    ErrorCase("matrix", _bad((5, 8), (5, 8)), ValueError, r"`query` must have at least 3 dimensions .* got \(5, 8\)"),
    ErrorCase("dimensions", _bad(k=(4, 5, 8)), ValueError, r"`key` must have as many dimensions .* got \(4, 5, 8\)"),
    ErrorCase("batch", _bad(k=(1, 4, 5, 8)), ValueError, r"`key` must .* same batch dimensions .* got \(1, 4, 5, 8\)"),
    ErrorCase("length", _bad(v=(2, 4, 6, 8)), ValueError, r"`value` must have .* \(H, S\) = \(4, 5\), got \(4, 6\)"),
    ErrorCase("value-heads", _bad(v=(2, 1, 5, 8)), ValueError, r"`value` must have .* \(4, 5\), got \(1, 5\)"),
    ErrorCase("head-dim", _bad(k=(2, 4, 5, 16)), ValueError, r"`key` must have the head dimension .* 8, got 16"),
    ErrorCase("head-dim-0", _bad((2, 4, 5, 0), (2, 4, 5, 0)), ValueError, r"`query` has head dimension 0; accepted"),
    ErrorCase("head-dim-257", _bad(v=(2, 4, 5, 257)), ValueError, r"`value` has .* 257; accepted are 1 to 256"),
    ErrorCase("heads", _bad(k=(2, 2, 5, 8)), ValueError, r"`key` must have the 4 heads of `query` unless .* got 2"),
    ErrorCase(
        "group", _bad(k=(2, 3, 5, 8), enable_gqa=True), ValueError, r"`key` must have .* divides query's 4, got 3"
    ),
    ErrorCase("is-causal", _bad(is_causal=1), TypeError, r"`is_causal` must be a bool, got int"),
    ErrorCase("enable-gqa", _bad(enable_gqa=None), TypeError, r"`enable_gqa` must be a bool, got NoneType"),
    ErrorCase("scale-type", _bad(scale="1"), TypeError, r"`scale` must be a positive number or None, got str"),
    ErrorCase("scale-bool", _bad(scale=True), TypeError, r"`scale` must be a positive number or None, got bool"),
    ErrorCase("scale-zero", _bad(scale=0.0), ValueError, r"`scale` must be positive and finite, got 0\.0"),
    ErrorCase("scale-negative", _bad(scale=-1.0), ValueError, r"`scale` must be positive and finite, got -1\.0"),
    ErrorCase("scale-nan", _bad(scale=math.nan), ValueError, r"`scale` must be positive and finite, got nan"),
    ErrorCase("scale-inf", _bad(scale=math.inf), ValueError, r"`scale` must be positive and finite, got inf"),
]


def _sweep() -> list[Case]:
    quick = {(4096, 128, False), (4096, 128, True), (512, 64, False)}
    tokens, model_dim = 16384, 2048
    cases = []
    for d in (64, 128):
        for s in (512, 2048, 4096, 16384):
            for causal in (False, True):
                b, h = tokens // s, model_dim // d
                options = {"is_causal": causal, "scale": None, "enable_gqa": False}
                ident = f"B{b} H{h} S{s} D{d} {'causal' if causal else 'full'}"
                cases.append(Case(ident, _shapes((b,), h, h, s, s, d), options, quick=(s, d, causal) in quick))
    options = {"is_causal": True, "scale": None, "enable_gqa": True}
    cases.append(Case("B2 H32/8 S4096 D128 causal", _shapes((2,), 32, 8, 4096, 4096, 128), options))
    return cases


def _bytes(case: Case, itemsize: int, backward: bool) -> int:
    q, _, v = case.shapes
    inputs, output = sum(map(math.prod, case.shapes)), math.prod((*q[:-1], v[-1]))
    # Forward reads query, key, value and writes the output.
    # Backward reads these, the output and its gradient and writes three gradients.
    return itemsize * (2 * inputs + 2 * output if backward else inputs + output)


def _flops(case: Case, backward: bool) -> int:
    (*batch, s_q, d), (*_, s_k, _), (*_, d_v) = case.shapes
    pairs = s_q * s_k
    if case.options["is_causal"]:
        square = min(s_q, s_k)
        pairs = square * (square + 1) // 2 + max(s_q - s_k, 0) * s_k
    # Forward: scores and output. Backward: the scores again, and the gradients of query, key, weights and value.
    return 2 * math.prod(batch) * pairs * (3 * d + 2 * d_v if backward else d + d_v)


def _parts(inputs: Inputs) -> Iterator[tuple[tuple, tuple]]:
    """One part per batch entry and head of key and value, with the query heads that share it."""
    query, key, _ = inputs
    heads_kv = key.shape[-3]
    group = query.shape[-3] // max(heads_kv, 1)
    for *batch, head in _indices((*query.shape[:-3], heads_kv)):
        of_query, of_key = (*batch, slice(head * group, (head + 1) * group)), (*batch, slice(head, head + 1))
        yield (of_query, of_key, of_key), of_query


def _indices(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    if not shape:
        yield ()
    else:
        for outer in _indices(shape[:-1]):
            yield from ((*outer, i) for i in range(shape[-1]))


SPEC = register_spec(
    Spec(
        name="attention",
        reference=naive,
        builtin=builtin,
        check=check,
        samples=_cases(),
        errors=ERRORS,
        sweep=_sweep(),
        bytes=_bytes,
        flops=_flops,
        auto=("torch.builtin", "cuda", "triton", "torch.naive"),
        parts=_parts,
    )
)


def _too_large(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: object) -> str | None:
    """Why the matrix of scores does not fit in the GPU's memory, or None."""
    if not query.is_cuda:
        return None
    scores = math.prod(query.shape[:-1]) * key.shape[-2] * query.element_size()
    # Alive at once: without gradients the masked scores, the exponentials and one more;
    # with gradients exponentials and weights are kept, and two of their gradients with two intermediates come on top.
    wants_grad = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    needed = scores * (6 if wants_grad else 3)
    total = torch.cuda.get_device_properties(query.device).total_memory
    if needed > total:
        return f"the scores and what is made of them need {needed / 2**30:.0f} GiB; the GPU has {total / 2**30:.0f} GiB"
    return None


def _faults(*inputs: torch.Tensor) -> str | None:
    """Why PyTorch's fused kernels would fault or fail on these inputs, or None. Seen in PyTorch 2.11.

    Rows of 16-bit values that do not start on 16 bytes are read wrong, or end the process's use of the GPU; so do
    float32 operands whose first element does not. For empty tensors the kernels return nothing, or their backward
    fails.
    """
    if not inputs[0].is_cuda:
        return None
    if any(x.numel() == 0 for x in inputs):
        return "PyTorch's fused attention takes no empty tensors"
    if inputs[0].dtype == torch.float64:
        return None
    for name, x in zip(("query", "key", "value"), inputs, strict=True):
        # While torch.compile traces, where a tensor starts is not known.
        aligned = torch.compiler.is_compiling() or x.storage_offset() * x.element_size() % 16 == 0
        if x.element_size() == 2:
            if x.shape[-1] % 8:
                continue  # PyTorch pads it first, into an aligned copy
            strides = zip(x.stride()[:-1], x.shape[:-1], strict=True)
            aligned = aligned and all(s % 8 == 0 for s, size in strides if size > 1)
        if not aligned:
            return f"PyTorch's fused attention faults on rows that do not start on 16 bytes, as those of `{name}`"
    return None


def _builtin_unsupported(*inputs: torch.Tensor, **options: object) -> str | None:
    return _faults(*inputs)


def _pinned(backend: SDPBackend) -> Callable[..., tuple[torch.Tensor, tuple]]:
    def forward(*inputs: torch.Tensor, **options: object) -> tuple[torch.Tensor, tuple]:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*inputs, **options), ()

    return forward


def _pinned_unsupported(
    name: str, takes: Callable[..., bool], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: bool
) -> str | None:
    if not query.is_cuda:
        return f"PyTorch's {name} attention takes CUDA tensors, got {query.device.type}"
    if query.dtype not in (torch.float16, torch.bfloat16):
        return f"PyTorch's {name} attention takes float16 and bfloat16, got {str(query.dtype).removeprefix('torch.')}"
    if query.dim() != 4:
        return f"PyTorch's {name} attention takes 4 dimensions (B, H, S, D), got {query.dim()}"
    if (reason := _faults(query, key, value)) is not None:
        return reason
    causal = options["is_causal"]
    if name == "flash":
        if value.shape[-1] != query.shape[-1]:
            return f"value's head dimension must be query's, {query.shape[-1]}, got {value.shape[-1]}"
        if causal and query.shape[-2] != key.shape[-2]:
            return f"a causal mask needs as many queries as keys, got {query.shape[-2]} and {key.shape[-2]}"
    elif query.shape[-1] % 8 or value.shape[-1] % 8:
        return f"head dimensions must be multiples of 8, got {query.shape[-1]} and {value.shape[-1]}"
    params = torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, causal, options["enable_gqa"])
    if not takes(params):
        return f"PyTorch's {name} attention does not take these shapes or strides on this GPU"
    return None


def _flash_unsupported(*inputs: torch.Tensor, **options: bool) -> str | None:
    return _pinned_unsupported("flash", torch.backends.cuda.can_use_flash_attention, *inputs, **options)


def _cudnn_unsupported(*inputs: torch.Tensor, **options: bool) -> str | None:
    return _pinned_unsupported("cuDNN", torch.backends.cuda.can_use_cudnn_attention, *inputs, **options)


def _naive(*inputs: torch.Tensor, **options: object) -> tuple[torch.Tensor, tuple]:
    return naive(*inputs, **options), ()


def _builtin(*inputs: torch.Tensor, **options: object) -> tuple[torch.Tensor, tuple]:
    return builtin(*inputs, **options), ()


register("attention", "torch.naive", forward=_naive, unsupported=_too_large)
register("attention", "torch.builtin", forward=_builtin, unsupported=_builtin_unsupported)
register("attention", "torch.flash", forward=_pinned(SDPBackend.FLASH_ATTENTION), unsupported=_flash_unsupported)
register("attention", "torch.cudnn", forward=_pinned(SDPBackend.CUDNN_ATTENTION), unsupported=_cudnn_unsupported)
