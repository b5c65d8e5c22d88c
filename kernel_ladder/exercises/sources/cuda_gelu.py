"""Solution of the exercise `cuda_gelu`."""

import torch

from kernel_ladder.exercises import not_plain
from kernel_ladder.exercises.cuda import CudaKernel
from kernel_ladder.table import register

EXERCISE = "cuda_gelu"
THREADS = 256

SOURCE = r"""
// Grid: a thread for each element, in blocks of THREADS. The last block may overhang the end.
extern "C" __global__ void gelu_kernel(float* output, const float* input, int numel) {
    // TODO 1: `i`, the element of this thread, from blockIdx.x, blockDim.x and threadIdx.x.
    // gap
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    // end
    // TODO 2: leave the kernel where the element lies past the end.
    // gap
    if (i >= numel) return;
    // end
    // TODO 3: read the element, compute the formula by tanhf, and write it.
    // gap
    const float x = input[i];
    const float u = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    output[i] = 0.5f * x * (1.0f + tanhf(u));
    // end
}
"""

gelu_kernel = CudaKernel(SOURCE, "gelu_kernel")


def gelu(input, *, approximate):
    output = torch.empty_like(input)
    numel = output.numel()
    # TODO 4: `blocks`, so many that there is a thread for each element.
    # gap
    blocks = -(-numel // THREADS)
    # end
    gelu_kernel(blocks, THREADS, output, input, numel)
    return output, ()


def unsupported(input, *, approximate):
    if approximate != "tanh" or input.dtype != torch.float32:
        return "takes approximate='tanh' in float32"
    return not_plain(input)


register("gelu", "cuda.my_gelu", forward=gelu, unsupported=unsupported)
