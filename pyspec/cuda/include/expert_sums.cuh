// The sum of what a row's experts gave, in one order of operations wherever it is made: in moe.cu, in moe_pairs.cu, or in rows.cu
// on the way to the next product.
//
//   y        [pair, n]          f32  pair = row * n_used + choice
//   weights  [row, n_used]      f32
//   shared   [n_piece, row, n]  f32  pieces of one sum, added times gate [row] f32 (none: 1)
//   residual [row, n]           f32  added last; or none
//
// What was there before the products (weights, gate, residual) is loaded while they run: who lets this kernel start so early
// has waited for all of it. All is read past L1, where it may lie as it was in another forward, or before others wrote it.
#pragma once
#include "types.cuh"

__device__ __forceinline__ float4 plus(float4 sum, float4 v, float by) {
  return make_float4(__fadd_rn(sum.x, __fmul_rn(v.x, by)), __fadd_rn(sum.y, __fmul_rn(v.y, by)),
                     __fadd_rn(sum.z, __fmul_rn(v.z, by)), __fadd_rn(sum.w, __fmul_rn(v.w, by)));
}

struct ExpertSums {
  const float4 *y, *shared, *residual;
  const float* by;  // the row's weights, in shared memory if they are kept
  float gate;
  int row, n_row, n_used, n_quad, n_piece;

  __device__ __forceinline__ ExpertSums(const float4* y, const float* weights, const float4* shared, const float* gate,
                                        const float4* residual, int row, int n_row, int n_used, int n_quad, int n_piece)
      : y(y), shared(shared), residual(residual), by(weights + static_cast<i64>(row) * n_used),
        gate(gate ? __ldcg(gate + row) : 1.f), row(row), n_row(n_row), n_used(n_used), n_quad(n_quad), n_piece(n_piece) {}

  // Threads below n_used write the row's weights down, where all read them behind a barrier.
  __device__ __forceinline__ void keep_weights(float* own) {
    if (threadIdx.x < n_used) own[threadIdx.x] = __ldcg(by + threadIdx.x);
    by = own;
  }

  __device__ __forceinline__ float4 before(int quad) const {
    const bool is_in = residual != nullptr && quad < n_quad;
    return is_in ? __ldcg(residual + static_cast<i64>(row) * n_quad + quad) : make_float4(0.f, 0.f, 0.f, 0.f);
  }

  // Of four columns, once the products are over; so many experts' shares are under way at once. kKept: keep_weights was called.
  template <int kShares, bool kKept>
  __device__ __forceinline__ float4 of(int quad, float4 before) const {
    const i64 at = static_cast<i64>(row) * n_quad + quad;
    const float4 none = make_float4(0.f, 0.f, 0.f, 0.f);
    const float4* from = y + static_cast<i64>(row) * n_used * n_quad + quad;
    float4 more = n_piece > 0 ? __ldcg(shared + at) : none, sum = none;
    for (int first = 0; first < n_used; first += kShares) {
      float4 v[kShares];
#pragma unroll
      for (int j = 0; j < kShares; ++j)
        v[j] = first + j < n_used ? __ldcg(from + static_cast<i64>(first + j) * n_quad) : none;
#pragma unroll
      for (int j = 0; j < kShares; ++j)
        if (first + j < n_used) sum = plus(sum, v[j], kKept ? by[first + j] : __ldcg(by + first + j));
    }
    for (int i = 1; i < n_piece; ++i) more = plus(more, __ldcg(shared + static_cast<i64>(i) * n_row * n_quad + at), 1.f);
    if (n_piece > 0) sum = plus(sum, more, gate);
    return residual != nullptr ? plus(before, sum, 1.f) : sum;
  }
};
