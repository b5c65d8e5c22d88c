"""A linear layer of float8 operands compiled: PyTorch's float8 product, and the formula as the compiler makes it.

The compiler fuses both conversions to float32 with the product's operands, and the scales with what follows it.
"""

from compile_impl import register
from torch_ref.linear_float8 import builtin, builtin_unsupported, naive, no_gradient


def _formula_unsupported(*inputs, **options):
    return no_gradient(*inputs)


register(
    "linear_float8",
    builtin,
    formula=naive,
    unsupported=builtin_unsupported,
    formula_unsupported=_formula_unsupported,
)
