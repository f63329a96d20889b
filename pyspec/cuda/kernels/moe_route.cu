// moe_route: scores of all experts for each row (moe_scores), then the best of them (moe_choose). Meaning: moe_ref.py.
//
//   x        [row, n_in]             f32
//   matrix   [N_EXPERT + GATED, n_in] f32
//   logits   [row, N_EXPERT + GATED] f32  written by the first, read by the second
//   bias     [N_EXPERT]              f32  takes part in the choice alone (BIASED)
//   ids      [row, N_USED]           i32  best first, of equal ones the lower index; in range whatever the logits are
//   weights  [row, N_USED]           f32
//   gate     [row]                   f32  sigmoid of the last logit (GATED)
//
// A warp makes one score of ROWS rows, or chooses for one row. Sums have an order of their own for each row: a row's bits
// do not depend on the others. Set by the launcher: N_EXPERT, N_USED (at most 32), SIGMOID, RENORM, BIASED, GATED.
#include "types.cuh"
#include "overlap.cuh"

constexpr int kScores = N_EXPERT + GATED;
constexpr int kRows = 4;
constexpr int kEach = (N_EXPERT + 31) / 32;  // scores of a lane: lane, lane + 32, ...
constexpr float kLeastSum = 6.103515625e-5f;
constexpr float kNever = -3.402823466e38f;
constexpr u32 kAll = 0xffffffffu;

extern "C" __global__ void __launch_bounds__(256)
    moe_scores(const float4* x, const float4* __restrict__ matrix, float* logits, int n_row, int n_quad) {
  let_successor_start();
  wait_for_predecessor();
  const int lane = threadIdx.x & 31, score = blockIdx.x * 8 + (threadIdx.x >> 5), first = blockIdx.y * kRows;
  if (score >= kScores) return;
  const float4* w = matrix + static_cast<i64>(score) * n_quad;
  float sum[kRows] = {};
#pragma unroll 4
  for (int i = lane; i < n_quad; i += 32) {
    const float4 a = w[i];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float4 b = x[static_cast<i64>(min(first + r, n_row - 1)) * n_quad + i];
      sum[r] = fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, fmaf(a.w, b.w, sum[r]))));
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float total = warp_sum(sum[r]);
    if (lane == 0 && first + r < n_row) logits[static_cast<i64>(first + r) * kScores + score] = total;
  }
}

__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

extern "C" __global__ void __launch_bounds__(32)
    moe_choose(const float* logits, const float* __restrict__ bias, int* ids, float* weights, float* gate,
               float scale) {
  let_successor_start();
  wait_for_predecessor();
  const int lane = threadIdx.x, row = blockIdx.x;
  const float* own = logits + static_cast<i64>(row) * kScores;
  float p[kEach], score[kEach];
  u32 left = 0;  // a bit for each of the lane's experts that is not taken yet
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int expert = lane + 32 * i;
    p[i] = expert < N_EXPERT ? own[expert] : kNever;
    if (expert < N_EXPERT) left |= 1u << i;
  }
#if !SIGMOID
  float largest = p[0], sum = 0.f;
#pragma unroll
  for (int i = 1; i < kEach; ++i) largest = fmaxf(largest, p[i]);
  largest = warp_max(largest);
#endif
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    score[i] = p[i];
    const bool is_one = lane + 32 * i < N_EXPERT;
#if SIGMOID
    p[i] = sigmoid(p[i]);
#else
    p[i] = is_one ? expf(p[i] - largest) : 0.f;
    sum += p[i];
#endif
#if BIASED && SIGMOID
    if (is_one) score[i] = p[i] + bias[lane + 32 * i];
#endif
  }
#if !SIGMOID
  sum = warp_sum(sum);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    p[i] = p[i] / sum;
#if BIASED
    if (lane + 32 * i < N_EXPERT) score[i] = p[i] + bias[lane + 32 * i];
#endif
  }
#endif
#pragma unroll
  for (int i = 0; i < kEach; ++i) score[i] = isnan(score[i]) ? kNever : score[i];

  int chosen = 0;  // lane j keeps the j-th choice
  float weight = 0.f;
  for (int j = 0; j < N_USED; ++j) {
    float best = 0.f, best_p = 0.f;
    int at = N_EXPERT;  // of none
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (left >> i & 1 && (at == N_EXPERT || score[i] > best)) best = score[i], best_p = p[i], at = lane + 32 * i;
#pragma unroll
    for (int hop = 16; hop > 0; hop >>= 1) {
      const float other = __shfl_xor_sync(kAll, best, hop), other_p = __shfl_xor_sync(kAll, best_p, hop);
      const int other_at = __shfl_xor_sync(kAll, at, hop);
      const bool is_better = at == N_EXPERT || (other_at < N_EXPERT && (other > best || (other == best && other_at < at)));
      if (is_better) best = other, best_p = other_p, at = other_at;
    }
    if (lane == (at & 31)) left &= ~(1u << (at >> 5));
    if (lane == j) chosen = at, weight = best_p;
  }
#if RENORM
  float total = __shfl_sync(kAll, weight, 0);
  for (int j = 1; j < N_USED; ++j) total += __shfl_sync(kAll, weight, j);
  weight = weight / fmaxf(total, kLeastSum);
#endif
  if (lane < N_USED) {
    ids[static_cast<i64>(row) * N_USED + lane] = chosen;
    weights[static_cast<i64>(row) * N_USED + lane] = weight * scale;
  }
#if GATED
  if (lane == 0) gate[row] = sigmoid(own[N_EXPERT]);
#endif
}
