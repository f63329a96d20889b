// Around the products of experts for many rows: which take which (moe_lists), and the sum of what a row's experts gave
// (moe_combine, expert_sums.cuh). For few rows moe.cu does both itself.
//
//   ids      [pair]          i32  pair = row * n_used + choice
//   order    [pair]          i32  pairs by expert; within one in any order: no row's result depends on it
//   items    [n_item]        i32 x 4  {expert, first place in `order`, pairs, 0}; at most `per_item` pairs, none past the last
//
// One CTA makes the lists; moe_combine has a CTA for each row and 1024 columns.
#include "expert_sums.cuh"
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

extern "C" __global__ void __launch_bounds__(256)
    moe_combine(const float4* y, const float* weights, const float4* shared, const float* gate, const float4* residual,
                float4* out, int n_used, int n_quad, int n_piece) {
  let_successor_start();
  wait_for_predecessor();
  const ExpertSums sums{y, weights, shared, gate, residual, out, static_cast<int>(gridDim.x), n_used, n_quad, n_piece};
  const int quad = blockIdx.y * 256 + threadIdx.x;
  if (quad < n_quad) sums.add(blockIdx.x, quad);
}
