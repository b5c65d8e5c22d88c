// What becomes of a product's outputs on their way from the registers to memory: a policy, instantiated as Identity by
// the product alone. A kernel asks for the columns of a run of N neighbouring outputs, and stores rows of it:
//
//   const auto columns = epilogue.template columns<N>(n, N_left);     // reads what belongs to columns, once
//   columns.store(c, offset, x, whole);                               // for each row
//
// A kernel that stores by other means takes the parts: epilogue.bias, activate(form, x).
#pragma once

#include <type_traits>

#include "core/gelu.cuh"

namespace kl {

// N neighbouring outputs, of which the first `left` are inside: one store where all are, and it would be aligned.
template <int N, typename T>
__device__ inline void store_run(T* to, const float (&x)[N], int64_t left, bool aligned) {
    struct alignas(N * sizeof(T)) Run {
        T elements[N];
    } run;
#pragma unroll
    for (int e = 0; e < N; ++e) run.elements[e] = from_float<T>(x[e]);
    if (aligned && left >= N) {
        *reinterpret_cast<Run*>(to) = run;
    } else {
#pragma unroll
        for (int e = 0; e < N; ++e) {
            if (e < left) to[e] = run.elements[e];
        }
    }
}

// N neighbouring values, zeros past the first `left`: one load where all are inside, and it would be aligned.
template <int N, typename T>
__device__ inline void load_run(float (&x)[N], const T* from, int64_t left, bool aligned) {
    struct alignas(N * sizeof(T)) Run {
        T elements[N];
    };
    if (aligned && left >= N) {
        const Run run = *reinterpret_cast<const Run*>(from);
#pragma unroll
        for (int e = 0; e < N; ++e) x[e] = to_float(run.elements[e]);
    } else {
#pragma unroll
        for (int e = 0; e < N; ++e) x[e] = e < left ? to_float(from[e]) : 0.0f;
    }
}

// The product as it is.
struct Identity {
    template <int N>
    struct Columns {
        int64_t left;

        template <typename T>
        __device__ void store(T* c, int64_t offset, const float (&x)[N], bool aligned) const {
            store_run(c + offset, x, left, aligned);
        }
    };
    template <int N>
    __device__ Columns<N> columns(int64_t, int64_t left) const {
        return {left};
    }
};

// Adds the product to `sums`, laid out as the output, which may have a wider type than the operands; the kernel's own
// output is not used. Each sum is rounded once a product, and has one thread, so that every run gives the same bits.
template <typename Sum>
struct AddTo {
    Sum* sums;

    template <int N>
    struct Columns {
        Sum* sums;
        int64_t left;

        template <typename T>
        __device__ void store(T*, int64_t offset, const float (&x)[N], bool aligned) const {
            float total[N];
            load_run(total, sums + offset, left, aligned);
#pragma unroll
            for (int e = 0; e < N; ++e) total[e] += x[e];
            store_run(sums + offset, total, left, aligned);
        }
    };
    template <int N>
    __device__ Columns<N> columns(int64_t, int64_t left) const {
        return {sums, left};
    }
};

enum class Activation : int { none, gelu, gelu_tanh };

template <int N>
__device__ inline void activate(Activation form, float (&x)[N]) {
    if (form == Activation::gelu) {
#pragma unroll
        for (int e = 0; e < N; ++e) x[e] = Exact::forward(x[e]);
    } else if (form == Activation::gelu_tanh) {
#pragma unroll
        for (int e = 0; e < N; ++e) x[e] = Tanh::forward(x[e]);
    }
}

// activation(x + bias). The activation is a value and not a type. A branch that all threads take alike costs little
// here; an instance of a product for each form costs seconds of compilation.
template <typename T>
struct BiasActivation {
    const T* bias;      // null for zeros
    int64_t bias_step;  // elements
    T* kept;            // laid out as the output: x itself, for the gradient; null where not wanted
    Activation activation;

    template <int N>
    struct Columns {
        const BiasActivation& epilogue;
        int64_t left;
        float bias[N];

        __device__ void activate(float (&x)[N]) const {
#pragma unroll
            for (int e = 0; e < N; ++e) x[e] += bias[e];
            kl::activate(epilogue.activation, x);
        }
        __device__ void store(T* c, int64_t offset, const float (&x)[N], bool aligned) const {
            if (epilogue.kept != nullptr) store_run(epilogue.kept + offset, x, left, aligned);
            float y[N];
#pragma unroll
            for (int e = 0; e < N; ++e) y[e] = x[e];
            activate(y);
            store_run(c + offset, y, left, aligned);
        }
    };
    template <int N>
    __device__ Columns<N> columns(int64_t n, int64_t left) const {
        Columns<N> found{*this, left, {}};
        if (bias != nullptr) {
#pragma unroll
            for (int e = 0; e < N; ++e) {
                if (e < left) found.bias[e] = to_float(bias[(n + e) * bias_step]);
            }
        }
        return found;
    }
};

}  // namespace kl
