// Around the products of experts: which rows take which (moe_lists), and the sum of what a row's experts gave (moe_combine).
//
//   ids      [pair]          i32  pair = row * n_used + choice
//   order    [pair]          i32  pairs by expert; within one in any order: no row's result depends on it
//   items    [n_item]        i32 x 4  {expert, first place in `order`, pairs, 0}; at most `per_item` pairs, none past the last
//   y        [pair, n]       f32
//   weights  [row, n_used]   f32
//   shared   [row, n]        f32  added times gate [row] f32; or none
//   residual [row, n]        f32  added last; or none
//   out      [row, n]        f32  sums in the order of choice
//
// One CTA makes the lists; moe_combine has a CTA for each row and 1024 columns.
#include "types.cuh"
#include "overlap.cuh"

constexpr int kMost = 1024;  // experts

extern "C" __global__ void __launch_bounds__(kMost, 1)
    moe_lists(const int* ids, int* order, int4* items, int n_pair, int n_expert, int per_item, int n_item) {
  let_successor_start();
  wait_for_predecessor();
  __shared__ int count[kMost];
  __shared__ int pairs[kMost];
  __shared__ int parts[kMost];
  const int t = threadIdx.x;
  auto expert_of = [&](int pair) { return min(max(ids[pair], 0), n_expert - 1); };
  count[t] = 0;
  __syncthreads();
  for (int p = t; p < n_pair; p += kMost) atomicAdd(&count[expert_of(p)], 1);
  __syncthreads();
  const int n = count[t], n_part = (n + per_item - 1) / per_item;
  pairs[t] = n;
  parts[t] = n_part;
  __syncthreads();
  for (int step = 1; step < kMost; step *= 2) {  // sums up to and with each expert
    const int more = t >= step ? pairs[t - step] : 0, more_parts = t >= step ? parts[t - step] : 0;
    __syncthreads();
    pairs[t] += more;
    parts[t] += more_parts;
    __syncthreads();
  }
  const int first = pairs[t] - n, part = parts[t] - n_part;
  for (int i = 0; i < n_part; ++i)
    items[part + i] = make_int4(t, first + i * per_item, min(per_item, n - i * per_item), 0);
  for (int i = parts[kMost - 1] + t; i < n_item; i += kMost) items[i] = make_int4(0, 0, 0, 0);
  count[t] = first;  // where the expert's next pair goes
  __syncthreads();
  for (int p = t; p < n_pair; p += kMost) order[atomicAdd(&count[expert_of(p)], 1)] = p;
}

__device__ __forceinline__ float4 plus(float4 sum, float4 v, float by) {
  return make_float4(__fadd_rn(sum.x, __fmul_rn(v.x, by)), __fadd_rn(sum.y, __fmul_rn(v.y, by)),
                     __fadd_rn(sum.z, __fmul_rn(v.z, by)), __fadd_rn(sum.w, __fmul_rn(v.w, by)));
}

extern "C" __global__ void __launch_bounds__(256)
    moe_combine(const float4* y, const float* weights, const float4* shared, const float* gate, const float4* residual,
                float4* out, int n_used, int n_quad) {
  let_successor_start();
  wait_for_predecessor();
  const int row = blockIdx.x, column = blockIdx.y * 256 + threadIdx.x;
  if (column >= n_quad) return;
  const float* w = weights + static_cast<i64>(row) * n_used;
  const float4* from = y + static_cast<i64>(row) * n_used * n_quad + column;
  const i64 at = static_cast<i64>(row) * n_quad + column;
  const float4 none = make_float4(0.f, 0.f, 0.f, 0.f);
  const float4 more = shared ? shared[at] : none, before = residual ? residual[at] : none;
  const float by = shared ? gate[row] : 0.f;
  float4 sum = none;
#pragma unroll 8
  for (int j = 0; j < n_used; ++j) sum = plus(sum, from[static_cast<i64>(j) * n_quad], w[j]);
  if (shared) sum = plus(sum, more, by);
  out[at] = residual ? plus(before, sum, 1.f) : sum;
}
