// linear, activation(input · weightᵀ + bias): the products of the climb, each with an epilogue.
//
//   rung       the one idea it adds                                        what limits it now
//   naive      bias and activation on the sum, in its register             loads of the weight touch 32 rows a warp
//   registers  the epilogue of matmul's `registers`, float32               the rate of the float32 units
//   mma        the epilogue of matmul's `mma`                              mma.sync; the epilogue itself, under nothing
//   persistent the epilogue of matmul's `persistent`, half under products  what of it the other half does not hide
//   split_k    the epilogue of matmul's `split_k`, where tiles are few      the first and last bytes; partial waves
//   skinny     the epilogue of matmul's `skinny`, at most 16 rows          reading the weights
//
// The product before the bias is kept only where a gradient through an activation will be wanted. In the backward pass
// bias_gelu's kernels compute the gradients of the activation and the bias, and two products of matmul's the others.
#pragma once

#include <optional>
#include <tuple>

#include "matmul/epilogue.cuh"
#include "matmul/matmul.cuh"

namespace kl {

// A checked call: the product, and the output and what is kept, allocated (of no elements where nothing is).
struct LinearCall {
    Product product;
    Tensor output, kept;
    const std::optional<Tensor>& bias;
    Activation activation;
    bool keep;

    template <typename T>
    BiasActivation<T> epilogue() const {
        return {bias ? static_cast<const T*>(bias->data_ptr()) : nullptr, bias ? bias->stride(0) : 0,
                keep ? static_cast<T*>(kept.data_ptr()) : nullptr, activation};
    }
    std::tuple<Tensor, Tensor> outputs() const { return {output, kept}; }
};

// `activation`: "none", "gelu" or "gelu_tanh".
LinearCall prepare_linear(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                          const std::string& activation, bool keep);

}  // namespace kl
