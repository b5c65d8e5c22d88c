// Every operator's functions, as bindings.cpp registers them, and the facts about kernels that it shows to Python.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <typeinfo>
#include <vector>

#include "core/tensor.h"

namespace kl {

// What the compiler made of a kernel, and how much of it fits on one SM (occupancy needs a GPU: -1 without one).
struct KernelAttributes {
    std::string name;
    std::string type;       // mangled name of a type that names the kernel, so that it can be found in the binary
    int registers;          // per thread
    int64_t static_shared;  // bytes per block
    int64_t dynamic_shared;
    int64_t local;  // bytes per thread: spills and arrays that did not fit in registers
    int threads;    // per block
    int blocks_per_sm;
};

template <auto* KERNEL>
struct KernelType {};

/// Attributes of a kernel of that type name.
KernelAttributes kernel_attributes_of(const void* kernel, const char* type, const char* name, int threads,
                                      int64_t dynamic_shared);

template <auto* KERNEL>
KernelAttributes kernel_attributes(const char* name, int threads, int64_t dynamic_shared = 0) {
    return kernel_attributes_of(reinterpret_cast<const void*>(KERNEL), typeid(KernelType<KERNEL>).name(), name, threads,
                                dynamic_shared);
}

// gelu.cu
Tensor gelu_naive(const Tensor& input, const std::string& approximate);
Tensor gelu_vectorized(const Tensor& input, const std::string& approximate);
Tensor gelu_backward_naive(const Tensor& grad, const Tensor& input, const std::string& approximate);
Tensor gelu_backward_vectorized(const Tensor& grad, const Tensor& input, const std::string& approximate);
void gelu_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype);

// softmax/*.cu; multirow has the backward pass of registers
Tensor softmax_naive(const Tensor& input, int64_t dim);
Tensor softmax_online(const Tensor& input, int64_t dim);
Tensor softmax_shared(const Tensor& input, int64_t dim);
Tensor softmax_registers(const Tensor& input, int64_t dim);
Tensor softmax_multirow(const Tensor& input, int64_t dim);
Tensor softmax_cluster(const Tensor& input, int64_t dim);
Tensor softmax_cluster_two_pass(const Tensor& input, int64_t dim);
Tensor softmax_backward_naive(const Tensor& grad, const Tensor& output, int64_t dim);
Tensor softmax_backward_online(const Tensor& grad, const Tensor& output, int64_t dim);
Tensor softmax_backward_shared(const Tensor& grad, const Tensor& output, int64_t dim);
Tensor softmax_backward_registers(const Tensor& grad, const Tensor& output, int64_t dim);
Tensor softmax_backward_cluster(const Tensor& grad, const Tensor& output, int64_t dim);
Tensor softmax_backward_cluster_two_pass(const Tensor& grad, const Tensor& output, int64_t dim);
void softmax_naive_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype);
void softmax_online_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype);
void softmax_shared_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype);
void softmax_registers_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype);
void softmax_multirow_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype);
void softmax_cluster_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype);
void softmax_cluster_two_pass_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype);

// The rungs of the normalisations, of which an operation has some: csrc/norm has a file for each.
enum class NormStep { naive, block, registers, smem_pipeline, cluster, persistent_cluster };

// Instantiates an operator's function, a template of the rung, for one rung of the schema table in core/bindings.cpp.
#define KL_NORM_RUNG(function, step) template decltype(function<NormStep::step>) function<NormStep::step>;

// layer_norm.cu: over the last dimension. Forward gives output and, where asked to keep it, what the backward pass needs of
// the rows.
template <NormStep STEP>
std::tuple<Tensor, Tensor> layer_norm(const Tensor& input, const std::optional<Tensor>& weight,
                                      const std::optional<Tensor>& bias, double eps, bool keep);
template <NormStep STEP>
std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(const Tensor& grad, const Tensor& input,
                                                       const std::optional<Tensor>& weight, const Tensor& stats,
                                                       bool needs_input, bool needs_weight, bool needs_bias);
void layer_norm_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype);

// rms_norm.cu
template <NormStep STEP>
std::tuple<Tensor, Tensor> rms_norm(const Tensor& input, const std::optional<Tensor>& weight, double eps, bool keep);
template <NormStep STEP>
std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad, const Tensor& input,
                                             const std::optional<Tensor>& weight, const Tensor& stats, bool needs_input,
                                             bool needs_weight);
void rms_norm_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype);

// add_rms_norm.cu
template <NormStep STEP>
std::tuple<Tensor, Tensor, Tensor> add_rms_norm(const Tensor& input, const Tensor& residual,
                                                const std::optional<Tensor>& weight, double eps, bool keep);
template <NormStep STEP>
std::tuple<Tensor, Tensor> add_rms_norm_backward(const Tensor& grad, const Tensor& grad_sum, const Tensor& sum,
                                                 const std::optional<Tensor>& weight, const Tensor& stats,
                                                 bool needs_input, bool needs_weight);
void add_rms_norm_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype);

// bias_dropout_add_layer_norm/*.cu: output, sum and statistics; backward, from the sum's gradient those of input and bias
template <NormStep STEP>
std::tuple<Tensor, Tensor, Tensor> bias_dropout_add_layer_norm(
    const Tensor& input, const Tensor& bias, const Tensor& residual, const std::optional<Tensor>& weight,
    const std::optional<Tensor>& norm_bias, int64_t threshold, double scale, int64_t seed, double eps, bool keep);
template <NormStep STEP>
std::tuple<Tensor, Tensor> bias_dropout_add_layer_norm_backward(const Tensor& grad, int64_t threshold, double scale,
                                                                int64_t seed);
void bias_dropout_add_layer_norm_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype);
void bias_dropout_add_layer_norm_backward_kernel_attributes(std::vector<KernelAttributes>& attributes,
                                                            ScalarType dtype);

// matmul/*.cu
Tensor matmul_naive(const Tensor& input, const Tensor& other);
Tensor matmul_coalesced(const Tensor& input, const Tensor& other);
Tensor matmul_tiled(const Tensor& input, const Tensor& other);
Tensor matmul_thread_tile(const Tensor& input, const Tensor& other);
Tensor matmul_vectorized(const Tensor& input, const Tensor& other);
Tensor matmul_double_buffered(const Tensor& input, const Tensor& other);
Tensor matmul_registers(const Tensor& input, const Tensor& other);
Tensor matmul_registers_tma(const Tensor& input, const Tensor& other);
Tensor matmul_mma(const Tensor& input, const Tensor& other, bool allow_tf32);
Tensor matmul_wgmma(const Tensor& input, const Tensor& other, bool allow_tf32);
Tensor matmul_warp_specialized(const Tensor& input, const Tensor& other, bool allow_tf32);
Tensor matmul_cluster(const Tensor& input, const Tensor& other, bool allow_tf32);
Tensor matmul_persistent(const Tensor& input, const Tensor& other, bool allow_tf32);
Tensor matmul_stream_k(const Tensor& input, const Tensor& other, bool allow_tf32);
Tensor matmul_split_k(const Tensor& input, const Tensor& other, bool allow_tf32, int64_t tile_m, int64_t tile_n,
                      int64_t splits, bool pair);
// How many blocks run at once on a device in clusters of 1, 2, 4 and 8. Needs a GPU of compute capability 9.0.
std::vector<int> matmul_split_k_blocks_at_once(int device);
Tensor matmul_skinny(const Tensor& input, const Tensor& other);
void matmul_naive_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype);
void matmul_coalesced_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype);
void matmul_tiled_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype);
void matmul_thread_tile_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype);
void matmul_vectorized_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype);
void matmul_double_buffered_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype);
void matmul_registers_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype);
void matmul_registers_tma_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype);
void matmul_mma_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype);
void matmul_wgmma_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype);
void matmul_warp_specialized_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype);
void matmul_cluster_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype);
void matmul_persistent_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype);
void matmul_split_k_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype);
void matmul_skinny_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype);

// attention/*.cu
std::tuple<Tensor, Tensor> attention_naive(const Tensor& query, const Tensor& key, const Tensor& value,
                                           const std::optional<Tensor>& attn_mask, int64_t first, int64_t last,
                                           double scale, bool enable_gqa);
std::tuple<Tensor, Tensor> attention_flash(const Tensor& query, const Tensor& key, const Tensor& value,
                                           const std::optional<Tensor>& attn_mask, int64_t first, int64_t last,
                                           double scale, bool enable_gqa);
std::tuple<Tensor, Tensor> attention_wgmma(const Tensor& query, const Tensor& key, const Tensor& value,
                                           const std::optional<Tensor>& attn_mask, int64_t first, int64_t last,
                                           double scale, bool enable_gqa);
std::tuple<Tensor, Tensor> attention_warp_specialized(const Tensor& query, const Tensor& key, const Tensor& value,
                                                      const std::optional<Tensor>& attn_mask, int64_t first,
                                                      int64_t last, double scale, bool enable_gqa);
std::tuple<Tensor, Tensor> attention_pingpong(const Tensor& query, const Tensor& key, const Tensor& value,
                                              const std::optional<Tensor>& attn_mask, int64_t first, int64_t last,
                                              double scale, bool enable_gqa);
std::tuple<Tensor, Tensor> attention_persistent(const Tensor& query, const Tensor& key, const Tensor& value,
                                                const std::optional<Tensor>& attn_mask, int64_t first, int64_t last,
                                                double scale, bool enable_gqa);
std::tuple<Tensor, Tensor> attention_split_kv(const Tensor& query, const Tensor& key, const Tensor& value,
                                              const std::optional<Tensor>& attn_mask, int64_t first, int64_t last,
                                              double scale, bool enable_gqa);
std::tuple<Tensor, Tensor> attention_varlen_flash(const Tensor& query, const Tensor& key, const Tensor& value,
                                                  const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
                                                  int64_t max_seqlen_q, int64_t left, int64_t right, double scale,
                                                  bool enable_gqa);
std::tuple<Tensor, Tensor> attention_varlen_pingpong(const Tensor& query, const Tensor& key, const Tensor& value,
                                                     const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
                                                     int64_t max_seqlen_q, int64_t left, int64_t right, double scale,
                                                     bool enable_gqa);
std::tuple<Tensor, Tensor, Tensor> attention_backward_naive(const Tensor& grad, const std::optional<Tensor>& grad_lse,
                                                            const Tensor& query, const Tensor& key, const Tensor& value,
                                                            const std::optional<Tensor>& attn_mask, int64_t first,
                                                            int64_t last, double scale, bool enable_gqa);
std::tuple<Tensor, Tensor, Tensor> attention_backward_flash(const Tensor& grad, const std::optional<Tensor>& grad_lse,
                                                            const Tensor& query, const Tensor& key, const Tensor& value,
                                                            const Tensor& output, const Tensor& lse,
                                                            const std::optional<Tensor>& attn_mask, int64_t first,
                                                            int64_t last, double scale, bool enable_gqa);
std::tuple<Tensor, Tensor, Tensor> attention_backward_wgmma(const Tensor& grad, const std::optional<Tensor>& grad_lse,
                                                            const Tensor& query, const Tensor& key, const Tensor& value,
                                                            const Tensor& output, const Tensor& lse,
                                                            const std::optional<Tensor>& attn_mask, int64_t first,
                                                            int64_t last, double scale, bool enable_gqa);
std::tuple<Tensor, Tensor, Tensor> attention_backward_warp_specialized(
    const Tensor& grad, const std::optional<Tensor>& grad_lse, const Tensor& query, const Tensor& key,
    const Tensor& value, const Tensor& output, const Tensor& lse, const std::optional<Tensor>& attn_mask, int64_t first,
    int64_t last, double scale, bool enable_gqa, bool deterministic);
std::tuple<Tensor, Tensor> attention_paged_split_kv(const Tensor& query, const Tensor& key_cache,
                                                    const Tensor& value_cache, const Tensor& block_table,
                                                    const Tensor& cache_seqlens, int64_t left, int64_t right,
                                                    double scale, bool enable_gqa, bool batch_invariant);
std::tuple<Tensor, Tensor, Tensor> attention_varlen_backward_flash(
    const Tensor& grad, const std::optional<Tensor>& grad_lse, const Tensor& query, const Tensor& key,
    const Tensor& value, const Tensor& output, const Tensor& lse, const Tensor& cu_seqlens_q,
    const Tensor& cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k, int64_t left, int64_t right, double scale,
    bool enable_gqa);
std::tuple<Tensor, Tensor, Tensor> attention_varlen_backward_warp_specialized(
    const Tensor& grad, const std::optional<Tensor>& grad_lse, const Tensor& query, const Tensor& key,
    const Tensor& value, const Tensor& output, const Tensor& lse, const Tensor& cu_seqlens_q,
    const Tensor& cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k, int64_t left, int64_t right, double scale,
    bool enable_gqa);
std::tuple<Tensor, Tensor> attention_dropout_flash(const Tensor& query, const Tensor& key, const Tensor& value,
                                                   const std::optional<Tensor>& attn_mask, int64_t first, int64_t last,
                                                   double scale, bool enable_gqa, int64_t threshold, double drop_scale,
                                                   int64_t seed);
std::tuple<Tensor, Tensor, Tensor> attention_dropout_backward_flash(
    const Tensor& grad, const std::optional<Tensor>& grad_lse, const Tensor& query, const Tensor& key,
    const Tensor& value, const Tensor& output, const Tensor& lse, const std::optional<Tensor>& attn_mask, int64_t first,
    int64_t last, double scale, bool enable_gqa, int64_t threshold, double drop_scale, int64_t seed);
Tensor attention_mask_backward_naive(const Tensor& grad, const std::optional<Tensor>& grad_lse, const Tensor& query,
                                     const Tensor& key, const Tensor& value, const Tensor& attn_mask, int64_t first,
                                     int64_t last, double scale, bool enable_gqa);
Tensor attention_mask_backward_flash(const Tensor& grad, const std::optional<Tensor>& grad_lse, const Tensor& query,
                                     const Tensor& key, const Tensor& value, const Tensor& output, const Tensor& lse,
                                     const Tensor& attn_mask, int64_t first, int64_t last, double scale,
                                     bool enable_gqa, int64_t threshold, double drop_scale, int64_t seed);
void attention_naive_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype);
void attention_flash_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype);
void attention_flash_masked_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype);
void attention_wgmma_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype);
void attention_warp_specialized_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype);
void attention_pingpong_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype);
void attention_persistent_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype);
void attention_split_kv_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype);
void attention_varlen_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype);
void attention_flash_backward_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype);
void attention_paged_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype);
void attention_flash_masked_backward_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype);
void attention_flash_mask_gradient_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype);
void attention_wgmma_backward_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype);
void attention_warp_specialized_backward_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype);

// add.cu
Tensor add_naive(const Tensor& input, const Tensor& other);
Tensor add_vectorized(const Tensor& input, const Tensor& other);
void add_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype);

// sum.cu: `dim` holds each dimension once, counted from the first
Tensor sum_naive(const Tensor& input, const std::vector<int64_t>& dim, bool keepdim);
Tensor sum_block(const Tensor& input, const std::vector<int64_t>& dim, bool keepdim);
Tensor sum_coalesced(const Tensor& input, const std::vector<int64_t>& dim, bool keepdim);
Tensor sum_two_stage(const Tensor& input, const std::vector<int64_t>& dim, bool keepdim);
void sum_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype);

// dropout.cu
Tensor dropout_naive(const Tensor& input, int64_t threshold, double scale, int64_t seed);
Tensor dropout_vectorized(const Tensor& input, int64_t threshold, double scale, int64_t seed);
void dropout_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype);

// bias_gelu.cu; vectorized has the backward pass of multirow
Tensor bias_gelu_naive(const Tensor& input, const Tensor& bias, const std::string& approximate);
Tensor bias_gelu_vectorized(const Tensor& input, const Tensor& bias, const std::string& approximate);
Tensor bias_gelu_multirow(const Tensor& input, const Tensor& bias, const std::string& approximate);
std::tuple<Tensor, Tensor> bias_gelu_backward_naive(const Tensor& grad, const Tensor& input, const Tensor& bias,
                                                    const std::string& approximate);
std::tuple<Tensor, Tensor> bias_gelu_backward_multirow(const Tensor& grad, const Tensor& input, const Tensor& bias,
                                                       const std::string& approximate);
void bias_gelu_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype);

// swiglu.cu
Tensor swiglu_naive(const Tensor& gate, const Tensor& up);
Tensor swiglu_vectorized(const Tensor& gate, const Tensor& up);
std::tuple<Tensor, Tensor> swiglu_backward_naive(const Tensor& grad, const Tensor& gate, const Tensor& up);
std::tuple<Tensor, Tensor> swiglu_backward_vectorized(const Tensor& grad, const Tensor& gate, const Tensor& up);
void swiglu_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype);

// rope.cu
Tensor rope_naive(const Tensor& input, const Tensor& table, bool interleaved, bool backward,
                  const std::optional<Tensor>& offsets, int64_t offset);
Tensor rope_vectorized(const Tensor& input, const Tensor& table, bool interleaved, bool backward,
                       const std::optional<Tensor>& offsets, int64_t offset);
void rope_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype);

// cross_entropy.cu: forward gives the output, each row's softmax state, and of a mean the number of its rows
std::tuple<Tensor, Tensor, Tensor> cross_entropy_online(const Tensor& input, const Tensor& target,
                                                        const std::string& reduction, int64_t ignore_index,
                                                        double label_smoothing, double z_loss, bool wide_loss);
Tensor cross_entropy_backward_online(const Tensor& grad, const Tensor& input, const Tensor& target, const Tensor& stats,
                                     const Tensor& count, const std::string& reduction, int64_t ignore_index,
                                     double label_smoothing, double z_loss);
void cross_entropy_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype);

// cross_entropy.cu, linear_cross_entropy.cu: each writes to the arguments after its inputs. The loss of a chunk's logits,
// and its gradient over these; a product, and one that adds; the sum or mean of losses; gradients times that of the result
void linear_cross_entropy_chunked(const Tensor& logits, const Tensor& target, const Tensor& losses, const Tensor& stats,
                                  int64_t ignore_index, double label_smoothing, double z_loss);
void linear_cross_entropy_backward_chunked(const Tensor& grad, const Tensor& target, const Tensor& stats,
                                           const Tensor& logits, int64_t ignore_index, double label_smoothing,
                                           double z_loss);
void linear_cross_entropy_product_chunked(const Tensor& input, const Tensor& other, const Tensor& output,
                                          const std::string& rung, bool allow_tf32, int64_t tile_m, int64_t tile_n,
                                          int64_t splits, bool pair);
void linear_cross_entropy_add_product_chunked(const Tensor& input, const Tensor& other, const Tensor& output,
                                              bool allow_tf32, bool by_tma);
void linear_cross_entropy_sum_chunked(const Tensor& losses, const Tensor& target, const Tensor& output,
                                      const Tensor& count, int64_t ignore_index, bool mean);
void linear_cross_entropy_scale_chunked(const Tensor& sums, const Tensor& grad, const Tensor& count,
                                        const Tensor& output, bool mean);
void linear_cross_entropy_kernel_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype);

// linear.cu, matmul/: output, and what stood before the bias where `keep`, else a tensor of no elements.
std::tuple<Tensor, Tensor> linear_naive(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                                        const std::string& activation, bool keep);
std::tuple<Tensor, Tensor> linear_registers(const Tensor& input, const Tensor& weight,
                                            const std::optional<Tensor>& bias, const std::string& activation,
                                            bool keep);
std::tuple<Tensor, Tensor> linear_mma(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                                      const std::string& activation, bool keep, bool allow_tf32);
std::tuple<Tensor, Tensor> linear_persistent(const Tensor& input, const Tensor& weight,
                                             const std::optional<Tensor>& bias, const std::string& activation,
                                             bool keep, bool allow_tf32);
std::tuple<Tensor, Tensor> linear_split_k(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                                          const std::string& activation, bool keep, int64_t tile_m, int64_t tile_n,
                                          int64_t splits);
std::tuple<Tensor, Tensor> linear_skinny(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                                         const std::string& activation, bool keep);
void linear_naive_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype);
void linear_registers_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype);
void linear_mma_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype);
void linear_persistent_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype);
void linear_split_k_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype);
void linear_skinny_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype);

// linear_float8/*.cu: attributes are those of an output's dtype.
Tensor linear_float8_naive(const Tensor& input, const Tensor& weight, const Tensor& input_scale,
                           const Tensor& weight_scale, const std::optional<Tensor>& bias, const std::string& out_dtype);
Tensor linear_float8_persistent(const Tensor& input, const Tensor& weight, const Tensor& input_scale,
                                const Tensor& weight_scale, const std::optional<Tensor>& bias,
                                const std::string& out_dtype);
void linear_float8_naive_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype);
void linear_float8_persistent_attributes(std::vector<KernelAttributes>& attributes, ScalarType dtype);

}  // namespace kl
