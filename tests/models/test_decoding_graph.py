"""What a compiled step of generation consists of: one token a sequence, on a cache of fixed size."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kernel_ladder import gpu, models

from ..conftest import needs_extension
from ..dispatch.test_small_calls import kernels_of, needs_cuda_tensors
from . import families

transformers = pytest.importorskip("transformers")


@needs_cuda_tensors
@needs_extension
@pytest.mark.usefixtures("forget_compiled")
def test_a_step_launches_attention_alone_beside_what_the_compiler_fuses():
    model = families.make("llama").to(torch.bfloat16).eval()
    models.patch(model, backend="auto", report=False)
    model.to("meta")
    with gpu.pretend("H100"), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        model.to_empty(device="cuda")
        config, device = model.config, torch.device("cuda")
        cache = transformers.StaticCache(config=config, max_cache_len=32)
        sizes = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
        cache.early_initialization(1, *sizes, torch.bfloat16, device)

        def step(tokens: torch.Tensor, place: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
            given = {"cache_position": place, "position_ids": place[None], "attention_mask": known}
            return model(input_ids=tokens, past_key_values=cache, **given).logits

        whole = (torch.empty(shape, dtype=torch.long, device=device) for shape in ((1, 1), (1,), (1, 8)))
        found = kernels_of(step, *whole)
    assert set(found) == {"cuda.split_kv"}
    assert len(found) == model.config.num_hidden_layers
