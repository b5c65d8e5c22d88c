// The extension module kernel_ladder._C registers every operator with PyTorch through its stable ABI. It also tells
// Python which variants there are, and what the compiler made of their kernels.
//
// SCHEMAS is the one list of CUDA variants. Each is an overload of its operator; their order is the order of the climb,
// and the last is the default of the level.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "core/ops.h"
#include "core/torch_tensor.h"
#include "matmul/chunked_copy.h"

namespace kl {
namespace {

struct Schema {
    const char* signature;
    void (*boxed)(StableIValue*, uint64_t, uint64_t);

    std::string qualified_name() const { return {signature, std::strchr(signature, '(')}; }  // "gelu.naive"
};

// The name and overload stand in the signature, so that no operator is named twice.
#define KL_OP(signature, function) \
    Schema { signature, boxed<&function> }

// The rung of a normalisation is the overload and the function's template argument alike.
#define KL_NORM(op, step, arguments) KL_OP(#op "." #step arguments, op<NormStep::step>)
#define KL_LAYER_NORM "(Tensor input, Tensor? weight, Tensor? bias, float eps, bool keep) -> (Tensor, Tensor)"
#define KL_LAYER_NORM_BACKWARD                                                                       \
    "(Tensor grad, Tensor input, Tensor? weight, Tensor stats, bool needs_input, bool needs_weight," \
    " bool needs_bias) -> (Tensor, Tensor, Tensor)"
#define KL_RMS_NORM "(Tensor input, Tensor? weight, float eps, bool keep) -> (Tensor, Tensor)"
#define KL_RMS_NORM_BACKWARD                                                                         \
    "(Tensor grad, Tensor input, Tensor? weight, Tensor stats, bool needs_input, bool needs_weight)" \
    " -> (Tensor, Tensor)"
#define KL_ADD_RMS_NORM \
    "(Tensor input, Tensor residual, Tensor? weight, float eps, bool keep) -> (Tensor, Tensor, Tensor)"
#define KL_ADD_RMS_NORM_BACKWARD                                                                 \
    "(Tensor grad, Tensor grad_sum, Tensor sum, Tensor? weight, Tensor stats, bool needs_input," \
    " bool needs_weight) -> (Tensor, Tensor)"
#define KL_DROPOUT_ADD_NORM                                                                          \
    "(Tensor input, Tensor bias, Tensor residual, Tensor? weight, Tensor? norm_bias, int threshold," \
    " float scale, SymInt seed, float eps, bool keep) -> (Tensor, Tensor, Tensor)"
#define KL_DROPOUT_ADD_NORM_BACKWARD "(Tensor grad, int threshold, float scale, SymInt seed) -> (Tensor, Tensor)"

const std::vector<Schema>& schemas() {
    static const std::vector<Schema> list = {
        KL_OP("gelu.naive(Tensor input, str approximate) -> Tensor", gelu_naive),
        KL_OP("gelu.vectorized(Tensor input, str approximate) -> Tensor", gelu_vectorized),
        KL_OP("gelu_backward.naive(Tensor grad, Tensor input, str approximate) -> Tensor", gelu_backward_naive),
        KL_OP("gelu_backward.vectorized(Tensor grad, Tensor input, str approximate) -> Tensor",
              gelu_backward_vectorized),
        KL_OP("softmax.naive(Tensor input, int dim) -> Tensor", softmax_naive),
        KL_OP("softmax.online(Tensor input, int dim) -> Tensor", softmax_online),
        KL_OP("softmax.shared(Tensor input, int dim) -> Tensor", softmax_shared),
        KL_OP("softmax.registers(Tensor input, int dim) -> Tensor", softmax_registers),
        KL_OP("softmax.multirow(Tensor input, int dim) -> Tensor", softmax_multirow),
        KL_OP("softmax.cluster(Tensor input, int dim) -> Tensor", softmax_cluster),
        KL_OP("softmax.cluster_two_pass(Tensor input, int dim) -> Tensor", softmax_cluster_two_pass),
        KL_OP("softmax_backward.naive(Tensor grad, Tensor output, int dim) -> Tensor", softmax_backward_naive),
        KL_OP("softmax_backward.online(Tensor grad, Tensor output, int dim) -> Tensor", softmax_backward_online),
        KL_OP("softmax_backward.shared(Tensor grad, Tensor output, int dim) -> Tensor", softmax_backward_shared),
        KL_OP("softmax_backward.registers(Tensor grad, Tensor output, int dim) -> Tensor", softmax_backward_registers),
        KL_OP("softmax_backward.cluster(Tensor grad, Tensor output, int dim) -> Tensor", softmax_backward_cluster),
        KL_OP("softmax_backward.cluster_two_pass(Tensor grad, Tensor output, int dim) -> Tensor",
              softmax_backward_cluster_two_pass),
        KL_OP("matmul.naive(Tensor input, Tensor other) -> Tensor", matmul_naive),
        KL_OP("matmul.coalesced(Tensor input, Tensor other) -> Tensor", matmul_coalesced),
        KL_OP("matmul.tiled(Tensor input, Tensor other) -> Tensor", matmul_tiled),
        KL_OP("matmul.thread_tile(Tensor input, Tensor other) -> Tensor", matmul_thread_tile),
        KL_OP("matmul.vectorized(Tensor input, Tensor other) -> Tensor", matmul_vectorized),
        KL_OP("matmul.double_buffered(Tensor input, Tensor other) -> Tensor", matmul_double_buffered),
        KL_OP("matmul.registers(Tensor input, Tensor other) -> Tensor", matmul_registers),
        KL_OP("matmul.mma(Tensor input, Tensor other, bool allow_tf32) -> Tensor", matmul_mma),
        KL_OP("matmul.wgmma(Tensor input, Tensor other, bool allow_tf32) -> Tensor", matmul_wgmma),
        KL_OP("matmul.registers_tma(Tensor input, Tensor other) -> Tensor", matmul_registers_tma),
        KL_OP("matmul.warp_specialized(Tensor input, Tensor other, bool allow_tf32) -> Tensor",
              matmul_warp_specialized),
        KL_OP("matmul.cluster(Tensor input, Tensor other, bool allow_tf32) -> Tensor", matmul_cluster),
        KL_OP("matmul.persistent(Tensor input, Tensor other, bool allow_tf32) -> Tensor", matmul_persistent),
        KL_OP("matmul.stream_k(Tensor input, Tensor other, bool allow_tf32) -> Tensor", matmul_stream_k),
        KL_OP("matmul.skinny(Tensor input, Tensor other) -> Tensor", matmul_skinny),
        KL_OP(
            "matmul.split_k(Tensor input, Tensor other, bool allow_tf32, int tile_m, int tile_n, int splits, bool pair)"
            " -> Tensor",
            matmul_split_k),
        KL_OP("attention.naive(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, SymInt first, SymInt last,"
              " float scale, bool enable_gqa) -> (Tensor, Tensor)",
              attention_naive),
        KL_OP("attention.flash(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, SymInt first, SymInt last,"
              " float scale, bool enable_gqa) -> (Tensor, Tensor)",
              attention_flash),
        KL_OP("attention.wgmma(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, SymInt first, SymInt last,"
              " float scale, bool enable_gqa) -> (Tensor, Tensor)",
              attention_wgmma),
        KL_OP("attention.warp_specialized(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, SymInt first, "
              "SymInt last,"
              " float scale, bool enable_gqa) -> (Tensor, Tensor)",
              attention_warp_specialized),
        KL_OP("attention.pingpong(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, SymInt first, SymInt last,"
              " float scale, bool enable_gqa) -> (Tensor, Tensor)",
              attention_pingpong),
        KL_OP(
            "attention.persistent(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, SymInt first, SymInt last,"
            " float scale, bool enable_gqa) -> (Tensor, Tensor)",
            attention_persistent),
        KL_OP("attention.split_kv(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, SymInt first, SymInt last,"
              " float scale, bool enable_gqa) -> (Tensor, Tensor)",
              attention_split_kv),
        // Operands are (1, H, T, D), sequences one after the other.
        KL_OP("attention_varlen.flash(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q,"
              " Tensor cu_seqlens_k, SymInt max_seqlen_q, int left, int right, float scale, bool enable_gqa)"
              " -> (Tensor, Tensor)",
              attention_varlen_flash),
        KL_OP("attention_varlen.pingpong(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q,"
              " Tensor cu_seqlens_k, SymInt max_seqlen_q, int left, int right, float scale, bool enable_gqa)"
              " -> (Tensor, Tensor)",
              attention_varlen_pingpong),
        // A sequence's key j is in page block_table[sequence, j / page_size] of (pages, page_size, H_kv, D).
        KL_OP("attention_paged.split_kv(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table,"
              " Tensor cache_seqlens, int left, int right, float scale, bool enable_gqa, bool batch_invariant)"
              " -> (Tensor, Tensor)",
              attention_paged_split_kv),
        KL_OP(
            "attention_backward.naive(Tensor grad, Tensor? grad_lse, Tensor query, Tensor key, Tensor value,"
            " Tensor? attn_mask, SymInt first, SymInt last, float scale, bool enable_gqa) -> (Tensor, Tensor, Tensor)",
            attention_backward_naive),
        KL_OP("attention_backward.flash(Tensor grad, Tensor? grad_lse, Tensor query, Tensor key, Tensor value,"
              " Tensor output, Tensor lse, Tensor? attn_mask, SymInt first, SymInt last, float scale, bool enable_gqa)"
              " -> (Tensor, Tensor, Tensor)",
              attention_backward_flash),
        KL_OP("attention_backward.wgmma(Tensor grad, Tensor? grad_lse, Tensor query, Tensor key, Tensor value,"
              " Tensor output, Tensor lse, Tensor? attn_mask, SymInt first, SymInt last, float scale, bool enable_gqa)"
              " -> (Tensor, Tensor, Tensor)",
              attention_backward_wgmma),
        // deterministic: dQ is summed in one order, so that two runs give the same bits.
        KL_OP("attention_backward.warp_specialized(Tensor grad, Tensor? grad_lse, Tensor query, Tensor key,"
              " Tensor value, Tensor output, Tensor lse, Tensor? attn_mask, SymInt first, SymInt last, float scale,"
              " bool enable_gqa, bool deterministic) -> (Tensor, Tensor, Tensor)",
              attention_backward_warp_specialized),
        // Weights are dropped: a seed may change from call to call, as that of `dropout`.
        KL_OP("attention_dropout.flash(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, SymInt first,"
              " SymInt last, float scale, bool enable_gqa, int threshold, float drop_scale, SymInt seed)"
              " -> (Tensor, Tensor)",
              attention_dropout_flash),
        KL_OP("attention_dropout_backward.flash(Tensor grad, Tensor? grad_lse, Tensor query, Tensor key, Tensor value,"
              " Tensor output, Tensor lse, Tensor? attn_mask, SymInt first, SymInt last, float scale, bool enable_gqa,"
              " int threshold, float drop_scale, SymInt seed) -> (Tensor, Tensor, Tensor)",
              attention_dropout_backward_flash),
        // The gradient of an additive mask, in the mask's own shape, which broadcasts to that of the scores. A threshold of
        // 0 and a factor of 1 drop no weight.
        KL_OP("attention_mask_backward.naive(Tensor grad, Tensor? grad_lse, Tensor query, Tensor key, Tensor value,"
              " Tensor attn_mask, SymInt first, SymInt last, float scale, bool enable_gqa) -> Tensor",
              attention_mask_backward_naive),
        KL_OP("attention_mask_backward.flash(Tensor grad, Tensor? grad_lse, Tensor query, Tensor key, Tensor value,"
              " Tensor output, Tensor lse, Tensor attn_mask, SymInt first, SymInt last, float scale, bool enable_gqa,"
              " int threshold, float drop_scale, SymInt seed) -> Tensor",
              attention_mask_backward_flash),
        KL_OP("attention_varlen_backward.flash(Tensor grad, Tensor? grad_lse, Tensor query, Tensor key, Tensor value,"
              " Tensor output, Tensor lse, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q,"
              " SymInt max_seqlen_k, int left, int right, float scale, bool enable_gqa) -> (Tensor, Tensor, Tensor)",
              attention_varlen_backward_flash),
        KL_OP("attention_varlen_backward.warp_specialized(Tensor grad, Tensor? grad_lse, Tensor query, Tensor key,"
              " Tensor value, Tensor output, Tensor lse, Tensor cu_seqlens_q, Tensor cu_seqlens_k,"
              " SymInt max_seqlen_q, SymInt max_seqlen_k, int left, int right, float scale, bool enable_gqa)"
              " -> (Tensor, Tensor, Tensor)",
              attention_varlen_backward_warp_specialized),
        KL_OP("add.naive(Tensor input, Tensor other) -> Tensor", add_naive),
        KL_OP("add.vectorized(Tensor input, Tensor other) -> Tensor", add_vectorized),
        KL_OP("sum.naive(Tensor input, int[] dim, bool keepdim) -> Tensor", sum_naive),
        KL_OP("sum.block(Tensor input, int[] dim, bool keepdim) -> Tensor", sum_block),
        KL_OP("sum.coalesced(Tensor input, int[] dim, bool keepdim) -> Tensor", sum_coalesced),
        KL_OP("sum.two_stage(Tensor input, int[] dim, bool keepdim) -> Tensor", sum_two_stage),
        // A seed may change from call to call: a SymInt is no constant to torch.compile.
        KL_OP("dropout.naive(Tensor input, int threshold, float scale, SymInt seed) -> Tensor", dropout_naive),
        KL_OP("dropout.vectorized(Tensor input, int threshold, float scale, SymInt seed) -> Tensor",
              dropout_vectorized),
        KL_OP("bias_gelu.naive(Tensor input, Tensor bias, str approximate) -> Tensor", bias_gelu_naive),
        KL_OP("bias_gelu.vectorized(Tensor input, Tensor bias, str approximate) -> Tensor", bias_gelu_vectorized),
        KL_OP("bias_gelu.multirow(Tensor input, Tensor bias, str approximate) -> Tensor", bias_gelu_multirow),
        KL_OP("bias_gelu_backward.naive(Tensor grad, Tensor input, Tensor bias, str approximate) -> (Tensor, Tensor)",
              bias_gelu_backward_naive),
        KL_OP("bias_gelu_backward.multirow(Tensor grad, Tensor input, Tensor bias, str approximate)"
              " -> (Tensor, Tensor)",
              bias_gelu_backward_multirow),
        KL_OP("swiglu.naive(Tensor gate, Tensor up) -> Tensor", swiglu_naive),
        KL_OP("swiglu.vectorized(Tensor gate, Tensor up) -> Tensor", swiglu_vectorized),
        KL_OP("swiglu_backward.naive(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor)", swiglu_backward_naive),
        KL_OP("swiglu_backward.vectorized(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor)",
              swiglu_backward_vectorized),
        KL_OP("rope.naive(Tensor input, Tensor table, bool interleaved, bool backward, Tensor? offsets=None,"
              " SymInt offset=0) -> Tensor",
              rope_naive),
        KL_OP("rope.vectorized(Tensor input, Tensor table, bool interleaved, bool backward, Tensor? offsets=None,"
              " SymInt offset=0) -> Tensor",
              rope_vectorized),
        KL_OP(
            "cross_entropy.online(Tensor input, Tensor target, str reduction, int ignore_index, float label_smoothing,"
            " float z_loss, bool wide_loss) -> (Tensor, Tensor, Tensor)",
            cross_entropy_online),
        KL_OP("cross_entropy_backward.online(Tensor grad, Tensor input, Tensor target, Tensor stats, Tensor count,"
              " str reduction, int ignore_index, float label_smoothing, float z_loss) -> Tensor",
              cross_entropy_backward_online),
        // A chunk's rows: these operators write to arguments, which are views of what the whole call allocates.
        KL_OP("linear_cross_entropy.chunked(Tensor logits, Tensor target, Tensor(a!) losses, Tensor(b!) stats,"
              " int ignore_index, float label_smoothing, float z_loss) -> ()",
              linear_cross_entropy_chunked),
        KL_OP("linear_cross_entropy_backward.chunked(Tensor grad, Tensor target, Tensor stats, Tensor(a!) logits,"
              " int ignore_index, float label_smoothing, float z_loss) -> ()",
              linear_cross_entropy_backward_chunked),
        KL_OP("linear_cross_entropy_product.chunked(Tensor input, Tensor other, Tensor(a!) output, str rung,"
              " bool allow_tf32, int tile_m, int tile_n, int splits, bool pair) -> ()",
              linear_cross_entropy_product_chunked),
        KL_OP("linear_cross_entropy_add_product.chunked(Tensor input, Tensor other, Tensor(a!) output,"
              " bool allow_tf32, bool by_tma) -> ()",
              linear_cross_entropy_add_product_chunked),
        KL_OP("linear_cross_entropy_sum.chunked(Tensor losses, Tensor target, Tensor(a!) output, Tensor(b!) count,"
              " int ignore_index, bool mean) -> ()",
              linear_cross_entropy_sum_chunked),
        KL_OP("linear_cross_entropy_scale.chunked(Tensor sums, Tensor grad, Tensor count, Tensor(a!) output,"
              " bool mean) -> ()",
              linear_cross_entropy_scale_chunked),
        // The rungs from `registers` on share the backward pass of that name.
        KL_NORM(layer_norm, naive, KL_LAYER_NORM),
        KL_NORM(layer_norm, block, KL_LAYER_NORM),
        KL_NORM(layer_norm, registers, KL_LAYER_NORM),
        KL_NORM(layer_norm, smem_pipeline, KL_LAYER_NORM),
        KL_NORM(layer_norm, cluster, KL_LAYER_NORM),
        KL_NORM(layer_norm, persistent_cluster, KL_LAYER_NORM),
        KL_NORM(layer_norm_backward, naive, KL_LAYER_NORM_BACKWARD),
        KL_NORM(layer_norm_backward, block, KL_LAYER_NORM_BACKWARD),
        KL_NORM(layer_norm_backward, registers, KL_LAYER_NORM_BACKWARD),
        KL_NORM(rms_norm, naive, KL_RMS_NORM),
        KL_NORM(rms_norm, block, KL_RMS_NORM),
        KL_NORM(rms_norm, registers, KL_RMS_NORM),
        KL_NORM(rms_norm, smem_pipeline, KL_RMS_NORM),
        KL_NORM(rms_norm, cluster, KL_RMS_NORM),
        KL_NORM(rms_norm_backward, naive, KL_RMS_NORM_BACKWARD),
        KL_NORM(rms_norm_backward, block, KL_RMS_NORM_BACKWARD),
        KL_NORM(rms_norm_backward, registers, KL_RMS_NORM_BACKWARD),
        KL_NORM(add_rms_norm, naive, KL_ADD_RMS_NORM),
        KL_NORM(add_rms_norm, block, KL_ADD_RMS_NORM),
        KL_NORM(add_rms_norm, registers, KL_ADD_RMS_NORM),
        KL_NORM(add_rms_norm, smem_pipeline, KL_ADD_RMS_NORM),
        KL_NORM(add_rms_norm, cluster, KL_ADD_RMS_NORM),
        KL_NORM(add_rms_norm_backward, naive, KL_ADD_RMS_NORM_BACKWARD),
        KL_NORM(add_rms_norm_backward, block, KL_ADD_RMS_NORM_BACKWARD),
        KL_NORM(add_rms_norm_backward, registers, KL_ADD_RMS_NORM_BACKWARD),
        KL_NORM(bias_dropout_add_layer_norm, naive, KL_DROPOUT_ADD_NORM),
        KL_NORM(bias_dropout_add_layer_norm, registers, KL_DROPOUT_ADD_NORM),
        KL_NORM(bias_dropout_add_layer_norm, smem_pipeline, KL_DROPOUT_ADD_NORM),
        KL_NORM(bias_dropout_add_layer_norm, cluster, KL_DROPOUT_ADD_NORM),
        KL_NORM(bias_dropout_add_layer_norm_backward, naive, KL_DROPOUT_ADD_NORM_BACKWARD),
        KL_NORM(bias_dropout_add_layer_norm_backward, registers, KL_DROPOUT_ADD_NORM_BACKWARD),
        KL_OP("linear.naive(Tensor input, Tensor weight, Tensor? bias, str activation, bool keep) -> (Tensor, Tensor)",
              linear_naive),
        KL_OP("linear.registers(Tensor input, Tensor weight, Tensor? bias, str activation, bool keep)"
              " -> (Tensor, Tensor)",
              linear_registers),
        KL_OP("linear.mma(Tensor input, Tensor weight, Tensor? bias, str activation, bool keep, bool allow_tf32)"
              " -> (Tensor, Tensor)",
              linear_mma),
        KL_OP("linear.persistent(Tensor input, Tensor weight, Tensor? bias, str activation, bool keep, bool allow_tf32)"
              " -> (Tensor, Tensor)",
              linear_persistent),
        KL_OP("linear.split_k(Tensor input, Tensor weight, Tensor? bias, str activation, bool keep, int tile_m,"
              " int tile_n, int splits) -> (Tensor, Tensor)",
              linear_split_k),
        KL_OP("linear.skinny(Tensor input, Tensor weight, Tensor? bias, str activation, bool keep) -> (Tensor, Tensor)",
              linear_skinny),
        KL_OP("linear_float8.naive(Tensor input, Tensor weight, Tensor input_scale, Tensor weight_scale, Tensor? bias,"
              " str out_dtype) -> Tensor",
              linear_float8_naive),
        KL_OP("linear_float8.persistent(Tensor input, Tensor weight, Tensor input_scale, Tensor weight_scale,"
              " Tensor? bias, str out_dtype) -> Tensor",
              linear_float8_persistent),
    };
    return list;
}

#define KL_STRING_OF(...) #__VA_ARGS__
#define KL_STRING(...) KL_STRING_OF(__VA_ARGS__)

// What nvcc embedded, as setup.py asked for it: "sm_90a" is machine code, "compute_80" is PTX.
std::vector<std::string> architectures() {
    std::vector<std::string> found;
    std::istringstream list(KL_STRING(KL_ARCHITECTURES));
    for (std::string name; std::getline(list, name, ',');) {
        name.erase(std::remove(name.begin(), name.end(), ' '), name.end());
        found.push_back(name);
    }
    return found;
}

// {"gelu": ["naive", "vectorized"], …}
std::map<std::string, std::vector<std::string>> variants() {
    std::map<std::string, std::vector<std::string>> found;
    for (const Schema& schema : schemas()) {
        const std::string name = schema.qualified_name();
        const size_t dot = name.find('.');
        found[name.substr(0, dot)].push_back(name.substr(dot + 1));
    }
    return found;
}

ScalarType dtype_named(const std::string& name) {
    static const std::map<std::string, ScalarType> dtypes = {
        {"float32", ScalarType::Float}, {"float16", ScalarType::Half}, {"bfloat16", ScalarType::BFloat16}};
    const auto found = dtypes.find(name);
    if (found == dtypes.end()) {
        const auto message = "argument `dtype` must be float32, float16 or bfloat16, got " + name;
        pybind11::set_error(PyExc_ValueError, message.c_str());
        throw pybind11::error_already_set();
    }
    return found->second;
}

std::vector<KernelAttributes> kernels(const std::string& dtype_name) {
    const ScalarType dtype = dtype_named(dtype_name);
    std::vector<KernelAttributes> attributes;
    gelu_kernel_attributes(attributes, dtype);
    softmax_naive_kernel_attributes(attributes, dtype);
    softmax_online_kernel_attributes(attributes, dtype);
    softmax_shared_kernel_attributes(attributes, dtype);
    softmax_registers_kernel_attributes(attributes, dtype);
    softmax_multirow_kernel_attributes(attributes, dtype);
    softmax_cluster_kernel_attributes(attributes, dtype);
    softmax_cluster_two_pass_kernel_attributes(attributes, dtype);
    matmul_naive_attributes(attributes, dtype);
    matmul_coalesced_attributes(attributes, dtype);
    matmul_tiled_attributes(attributes, dtype);
    matmul_thread_tile_attributes(attributes, dtype);
    matmul_vectorized_attributes(attributes, dtype);
    matmul_double_buffered_attributes(attributes, dtype);
    matmul_registers_attributes(attributes, dtype);
    matmul_mma_attributes(attributes, dtype);
    matmul_wgmma_attributes(attributes, dtype);
    matmul_registers_tma_attributes(attributes, dtype);
    matmul_warp_specialized_attributes(attributes, dtype);
    matmul_cluster_attributes(attributes, dtype);
    matmul_persistent_attributes(attributes, dtype);
    matmul_skinny_attributes(attributes, dtype);
    matmul_split_k_attributes(attributes, dtype);
    attention_naive_kernel_attributes(attributes, dtype);
    attention_flash_kernel_attributes(attributes, dtype);
    attention_flash_masked_kernel_attributes(attributes, dtype);
    attention_wgmma_kernel_attributes(attributes, dtype);
    attention_warp_specialized_kernel_attributes(attributes, dtype);
    attention_pingpong_kernel_attributes(attributes, dtype);
    attention_persistent_kernel_attributes(attributes, dtype);
    attention_split_kv_kernel_attributes(attributes, dtype);
    attention_varlen_kernel_attributes(attributes, dtype);
    attention_paged_kernel_attributes(attributes, dtype);
    attention_flash_backward_kernel_attributes(attributes, dtype);
    attention_flash_masked_backward_kernel_attributes(attributes, dtype);
    attention_flash_mask_gradient_kernel_attributes(attributes, dtype);
    attention_wgmma_backward_kernel_attributes(attributes, dtype);
    attention_warp_specialized_backward_kernel_attributes(attributes, dtype);
    add_kernel_attributes(attributes, dtype);
    sum_kernel_attributes(attributes, dtype);
    dropout_kernel_attributes(attributes, dtype);
    bias_gelu_kernel_attributes(attributes, dtype);
    swiglu_kernel_attributes(attributes, dtype);
    rope_kernel_attributes(attributes, dtype);
    cross_entropy_kernel_attributes(attributes, dtype);
    linear_cross_entropy_kernel_attributes(attributes, dtype);
    layer_norm_kernel_attributes(attributes, dtype);
    rms_norm_kernel_attributes(attributes, dtype);
    add_rms_norm_kernel_attributes(attributes, dtype);
    bias_dropout_add_layer_norm_kernel_attributes(attributes, dtype);
    bias_dropout_add_layer_norm_backward_kernel_attributes(attributes, dtype);
    linear_naive_attributes(attributes, dtype);
    linear_registers_attributes(attributes, dtype);
    linear_mma_attributes(attributes, dtype);
    linear_persistent_attributes(attributes, dtype);
    linear_split_k_attributes(attributes, dtype);
    linear_skinny_attributes(attributes, dtype);
    linear_float8_naive_attributes(attributes, dtype);
    linear_float8_persistent_attributes(attributes, dtype);
    return attributes;
}

// What STABLE_TORCH_LIBRARY and STABLE_TORCH_LIBRARY_IMPL do, save that the libraries are never destroyed. At exit
// their destructors would call PyTorch's operator registry. It may be gone by then, which aborts the process.
void register_operators() {
    using torch::stable::detail::StableLibrary;
    auto* const definitions = new StableLibrary(StableLibrary::Kind::DEF, "kernel_ladder", nullptr, __FILE__, __LINE__);
    auto* const kernels = new StableLibrary(StableLibrary::Kind::IMPL, "kernel_ladder", "CUDA", __FILE__, __LINE__);
    for (const Schema& schema : schemas()) definitions->def(schema.signature);
    for (const Schema& schema : schemas()) kernels->impl(schema.qualified_name().c_str(), schema.boxed);
}

}  // namespace
}  // namespace kl

PYBIND11_MODULE(_C, module) {
    namespace py = pybind11;
    kl::register_operators();
    module.doc() = "Operators torch.ops.kernel_ladder.*, and attributes about their kernels.";
    py::class_<kl::KernelAttributes>(module, "KernelAttributes", "What the compiler made of a kernel.")
        .def_readonly("name", &kl::KernelAttributes::name)
        .def_readonly("type", &kl::KernelAttributes::type)
        .def_readonly("registers", &kl::KernelAttributes::registers)
        .def_readonly("static_shared", &kl::KernelAttributes::static_shared)
        .def_readonly("dynamic_shared", &kl::KernelAttributes::dynamic_shared)
        .def_readonly("local", &kl::KernelAttributes::local)
        .def_readonly("threads", &kl::KernelAttributes::threads)
        .def_readonly("blocks_per_sm", &kl::KernelAttributes::blocks_per_sm);
    module.def("architectures", &kl::architectures,
               "What the kernels were compiled to: 'sm_90a' is machine code, 'compute_80' is PTX.");
    module.def("variants", &kl::variants, "Operators with their variants, in the order of the climb.");
    module.def("kernels", &kl::kernels, py::arg("dtype") = "bfloat16",
               "Registers, shared and local memory and occupancy of each kernel, for operands of a dtype.");
    module.def("split_k_blocks_at_once", &kl::matmul_split_k_blocks_at_once, py::arg("device"),
               "How many blocks of matmul.split_k run at once, in clusters of 1, 2, 4 and 8.");
    py::class_<kl::CopiedOperand>(module, "CopiedOperand", "Bytes of an operand's copy: of a batch, and of a tile.")
        .def(py::init([](int64_t of_batch, int64_t of_tile, bool per_batch) {
                 return kl::CopiedOperand{of_batch, of_tile, per_batch};
             }),
             py::arg("of_batch"), py::arg("of_tile"), py::arg("per_batch"));
    module.def(
        "matmul_parts",
        [](int64_t batches, int64_t M, int64_t N, int64_t row_bytes, const kl::CopiedOperand& a,
           const kl::CopiedOperand& b, int64_t most, int64_t sms) {
            std::vector<std::array<int64_t, 6>> found;
            for (const kl::Part& p : kl::parts_of(batches, M, N, row_bytes, a, b, most, sms)) {
                found.push_back({p.batch, p.batches, p.m, p.M, p.n, p.N});
            }
            return found;
        },
        py::arg("batches"), py::arg("M"), py::arg("N"), py::arg("row_bytes"), py::arg("a"), py::arg("b"),
        py::arg("most"), py::arg("sms"),
        "Parts (batch, batches, m, M, n, N) of a product whose copied operands take at most so many bytes at a time.");
}
