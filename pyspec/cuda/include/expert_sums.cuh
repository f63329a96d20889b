// The sum of what a row's experts gave, in one order of operations wherever it is made: moe.cu for few rows, moe_pairs.cu.
//
//   y        [pair, n]          f32  pair = row * n_used + choice; read past L1, since other multiprocessors wrote it
//   weights  [row, n_used]      f32
//   shared   [n_piece, row, n]  f32  pieces of one sum, added times gate [row] f32 (none: 1)
//   residual [row, n]           f32  added last; or none
//   out      [row, n]           f32  sums in the order of choice
#pragma once
#include "types.cuh"

__device__ __forceinline__ float4 plus(float4 sum, float4 v, float by) {
  return make_float4(__fadd_rn(sum.x, __fmul_rn(v.x, by)), __fadd_rn(sum.y, __fmul_rn(v.y, by)),
                     __fadd_rn(sum.z, __fmul_rn(v.z, by)), __fadd_rn(sum.w, __fmul_rn(v.w, by)));
}

struct ExpertSums {
  const float4* y;
  const float* weights;
  const float4* shared;
  const float* gate;
  const float4* residual;
  float4* out;
  int n_row, n_used, n_quad, n_piece;

  // Of four columns.
  __device__ __forceinline__ void add(int row, int quad) const {
    const float* w = weights + static_cast<i64>(row) * n_used;
    const float4* from = y + static_cast<i64>(row) * n_used * n_quad + quad;
    const i64 at = static_cast<i64>(row) * n_quad + quad;
    const float4 none = make_float4(0.f, 0.f, 0.f, 0.f);
    float4 more = n_piece > 0 ? __ldcg(shared + at) : none;
    const float4 before = residual ? residual[at] : none;
    const float by = gate ? gate[row] : 1.f;
    float4 sum = none;
#pragma unroll 8
    for (int j = 0; j < n_used; ++j) sum = plus(sum, __ldcg(from + static_cast<i64>(j) * n_quad), w[j]);
    for (int i = 1; i < n_piece; ++i) more = plus(more, __ldcg(shared + static_cast<i64>(i) * n_row * n_quad + at), 1.f);
    if (n_piece > 0) sum = plus(sum, more, by);
    out[at] = residual ? plus(before, sum, 1.f) : sum;
  }
};
