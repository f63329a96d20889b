// Around the products of experts for many rows: which take which (moe_lists), and the sum of what a row's experts gave
// (moe_combine, expert_sums.cuh). For few rows moe.cu does both itself.
//
//   ids      [pair]          i32  pair = row * n_used + choice
//   order    [pair]          i32  pairs by expert; within one in any order: no row's result depends on it
//   items    [n_item]        i32 x 4  {expert, first place in `order`, pairs, 0}; at most `per_item` pairs, none past the last
//
// One CTA of a thread an expert makes the lists; moe_combine has a CTA for each row and 1024 columns.
#include "expert_sums.cuh"
#include "overlap.cuh"

constexpr int kMost = 1024;  // experts

// Sums of x over the CTA's threads up to and with this one, and over all of them.
__device__ __forceinline__ u32 sum_up_to(u32 x, u32& all) {
  __shared__ u32 of_warp[32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  auto scan = [lane](u32 v) {
#pragma unroll
    for (int hop = 1; hop < 32; hop *= 2) {
      const u32 lower = __shfl_up_sync(0xffffffffu, v, hop);
      if (lane >= hop) v += lower;
    }
    return v;
  };
  const u32 own = scan(x);
  if (lane == 31) of_warp[warp] = own;
  __syncthreads();
  const u32 warps = scan(lane < static_cast<int>(blockDim.x / 32) ? of_warp[lane] : 0u);
  const u32 before = __shfl_sync(0xffffffffu, warps, max(warp - 1, 0));
  all = __shfl_sync(0xffffffffu, warps, 31);
  return own + (warp == 0 ? 0u : before);
}

extern "C" __global__ void __launch_bounds__(kMost, 1)
    moe_lists(const int* ids, int* order, int4* items, int n_pair, int n_expert, int per_item, int n_item) {
  let_successor_start();
  __shared__ int count[kMost];
  const int t = threadIdx.x, n_thread = blockDim.x;  // at least a thread an expert
  count[t] = 0;
  wait_for_predecessor();
  __syncthreads();
  auto expert_of = [&](int pair) { return min(max(ids[pair], 0), n_expert - 1); };
  for (int p = t; p < n_pair; p += n_thread) atomicAdd(&count[expert_of(p)], 1);
  __syncthreads();
  const int n = count[t], n_part = (n + per_item - 1) / per_item;
  u32 all;  // pairs in the lower half, items in the upper: neither reaches 2^16
  const u32 reached = sum_up_to(static_cast<u32>(n_part) << 16 | static_cast<u32>(n), all);
  const int first = static_cast<int>(reached & 0xffffu) - n, part = static_cast<int>(reached >> 16) - n_part;
  for (int i = 0; i < n_part; ++i)
    items[part + i] = make_int4(t, first + i * per_item, min(per_item, n - i * per_item), 0);
  for (int i = static_cast<int>(all >> 16) + t; i < n_item; i += n_thread) items[i] = make_int4(0, 0, 0, 0);
  count[t] = first;  // where the expert's next pair goes
  __syncthreads();
  for (int p = t; p < n_pair; p += n_thread) order[atomicAdd(&count[expert_of(p)], 1)] = p;
}

constexpr int kAtOnce = 12;  // experts' shares of four columns under way

// What was there before the products (weights, gate, residual) is loaded while they run: who lets this kernel start so early
// has waited for all of it. Past L1, where it may lie as it was in another forward.
extern "C" __global__ void __launch_bounds__(256)
    moe_combine(const float4* y, const float* weights, const float4* shared, const float* gate, const float4* residual,
                float4* out, int n_used, int n_quad, int n_piece) {
  let_successor_start();
  __shared__ float by[32];
  const int row = blockIdx.x, n_row = gridDim.x, quad = blockIdx.y * 256 + threadIdx.x;
  const bool is_in = quad < n_quad;
  const i64 at = static_cast<i64>(row) * n_quad + quad;
  if (threadIdx.x < n_used) by[threadIdx.x] = __ldcg(weights + static_cast<i64>(row) * n_used + threadIdx.x);
  const float4 none = make_float4(0.f, 0.f, 0.f, 0.f);
  const float4 before = residual && is_in ? __ldcg(residual + at) : none;
  const float by_gate = gate ? __ldcg(gate + row) : 1.f;
  __syncthreads();
  wait_for_predecessor();
  if (!is_in) return;
  float4 more = n_piece > 0 ? __ldcg(shared + at) : none;
  const float4* from = y + static_cast<i64>(row) * n_used * n_quad + quad;
  float4 sum = none;
  for (int first = 0; first < n_used; first += kAtOnce) {
    float4 v[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
      v[j] = first + j < n_used ? __ldcg(from + static_cast<i64>(first + j) * n_quad) : none;
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
      if (first + j < n_used) sum = plus(sum, v[j], by[first + j]);
  }
  for (int i = 1; i < n_piece; ++i) more = plus(more, __ldcg(shared + static_cast<i64>(i) * n_row * n_quad + at), 1.f);
  if (n_piece > 0) sum = plus(sum, more, by_gate);
  out[at] = residual ? plus(before, sum, 1.f) : sum;
}
