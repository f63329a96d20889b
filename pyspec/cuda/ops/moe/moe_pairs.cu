// Around the products of experts: which rows take which (moe_lists; the fewest find each other in moe.cu), and the sum of what
// a row's experts gave (moe_combine), where neither moe.cu nor rows.cu makes it.
//
//   ids      [pair]          i32  pair = row * n_used + choice; -1: it takes none, and stands in no list
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
  auto expert_of = [&](int pair) { return ids[pair] == -1 ? -1 : min(max(ids[pair], 0), n_expert - 1); };
  for (int p = t; p < n_pair; p += n_thread)
    if (const int expert = expert_of(p); expert >= 0) atomicAdd(&count[expert], 1);
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
  for (int p = t; p < n_pair; p += n_thread)
    if (const int expert = expert_of(p); expert >= 0) order[atomicAdd(&count[expert], 1)] = p;
}

extern "C" __global__ void __launch_bounds__(256)
    moe_combine(const float4* y, const float* weights, const float4* shared, const float* gate, const float4* residual,
                float4* out, int n_used, int n_quad, int n_piece) {
  let_successor_start();
  __shared__ float by[32];
  const int row = blockIdx.x, quad = blockIdx.y * 256 + threadIdx.x;
  ExpertSums experts(y, weights, shared, gate, residual, row, gridDim.x, n_used, n_quad, n_piece);
  experts.keep_weights(by);
  const float4 before = experts.before(quad);
  __syncthreads();
  wait_for_predecessor();
  if (quad < n_quad) out[static_cast<i64>(row) * n_quad + quad] = experts.of<12, true>(quad, before);
}
