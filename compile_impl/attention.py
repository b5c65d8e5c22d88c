"""Attention compiled.

formula          Product, softmax, product: Inductor fuses scale, mask and softmax between two matrix products. Where
                 its pattern matcher recognises the formula, it calls PyTorch's fused kernel instead.
default          `scaled_dot_product_attention`: one call of a fused kernel, which the compiler leaves alone
reduce_overhead  that call launched as a CUDA graph
max_autotune     the same call; what is tuned is the copies around it
"""

from compile_impl import ROUNDED, register
from torch_ref.attention import naive
from torch_ref.attention_builtin import builtin, unsupported

register("attention", builtin, unsupported=unsupported, formula=naive, formula_settings={"options": ROUNDED})
