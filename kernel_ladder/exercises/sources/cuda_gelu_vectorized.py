"""Solution of the exercise `cuda_gelu_vectorized`."""

import torch

from kernel_ladder.exercises import not_plain
from kernel_ladder.exercises.cuda import CudaKernel
from kernel_ladder.table import register

EXERCISE = "cuda_gelu_vectorized"
THREADS = 256
VECTOR = 4  # float32 elements of 16 bytes

SOURCE = r"""
#define VECTOR 4

__device__ float gelu(float x) {
    return 0.5f * x * (1.0f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
}

// Grid: a thread for each VECTOR elements. Both pointers are multiples of 16 bytes. float4 has members x, y, z and w.
extern "C" __global__ void gelu_kernel(float* output, const float* input, int numel) {
    // TODO 1: `i`, the first of this thread's elements. Neighbouring threads take neighbouring vectors.
    // gap
    const int i = (blockIdx.x * blockDim.x + threadIdx.x) * VECTOR;
    // end
    // TODO 2: where the whole vector lies inside: one load of 16 bytes, gelu of each member, one store of 16 bytes.
    // gap
    if (i + VECTOR <= numel) {
        float4 v = *(const float4*)(input + i);
        v = {gelu(v.x), gelu(v.y), gelu(v.z), gelu(v.w)};
        *(float4*)(output + i) = v;
        return;
    }
    // end
    // TODO 3: the thread at the end, whose vector overhangs: its elements one by one.
    // gap
    for (int j = i; j < numel; ++j) output[j] = gelu(input[j]);
    // end
}
"""

gelu_kernel = CudaKernel(SOURCE, "gelu_kernel")


def gelu(input, *, approximate):
    output = torch.empty_like(input)
    numel = output.numel()
    # TODO 4: `blocks`, so many that there is a thread for each vector, and one for the elements that are left.
    # gap
    blocks = -(-numel // (THREADS * VECTOR))
    # end
    gelu_kernel(blocks, THREADS, output, input, numel)
    return output, ()


def unsupported(input, *, approximate):
    if approximate != "tanh" or input.dtype != torch.float32 or input.data_ptr() % 16:
        return "takes approximate='tanh' in float32, from an address that 16 divides"
    return not_plain(input)


register("gelu", "cuda.my_gelu_vectorized", forward=gelu, unsupported=unsupported)
