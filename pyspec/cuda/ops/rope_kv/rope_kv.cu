// rope_kv: from the product of q, k and v to what attention reads: heads normed and turned, k and v in their pages.
//
//   y         [row, ...]                  f32    columns: n_q heads of Q_STEP, then n_kv keys, then n_kv values of DIM
//   q_weight, k_weight  [DIM]             f32    head norms; read when HAS_NORM
//   cos, sin  [row, N_ROT / 2]            f32
//   kv_rows   [row]                       int64  where the row's k and v go in the pool
//   q         [row, n_q, DIM]             f32    written
//   k, v      [pool row, n_kv, ...]       codes  written at kv_rows, see kv_kinds.cuh
//   k_scale, v_scale  [pool row, n_kv, ...]  f16  factors of kinds that have any
//   fault     [5]                         int32  see bounds.cuh
//
// Q_STEP is DIM, or 2 DIM where each query is followed by its gate, which stays where it is. NEOX pairs d with
// d + N_ROT / 2, otherwise 2d with 2d + 1. With N_ROT 0 no pair turns. Behind that, every TURN_K dims of q and k, and
// every TURN_V of v, are turned together by hadamard.cuh; 0: none. One warp a head; bound by latency.
// KEYS_ARE_VALUES: y has no values, they are the keys as they come. NORMS_V: values are normed, without weights.
// NORM_BEHIND: heads are normed when they have turned, without weights unless HAS_NORM.
// Macros: DIM, N_ROT, NEOX, HAS_NORM, NORM_BEHIND, NORMS_V, KEYS_ARE_VALUES, Q_STEP, K_KIND, V_KIND, TURN_K, TURN_V, OP_ID.
#include "kv_types.cuh"
#include "bounds.cuh"
#include "hadamard.cuh"
#include "overlap.cuh"

constexpr int kWarps = 4, kEach = DIM / 32, kHalf = N_ROT / 2;
static_assert(DIM % 32 == 0 && N_ROT <= DIM && N_ROT % 2 == 0, "whole warps, whole pairs");

// What makes the mean square of a head one.
__device__ __forceinline__ float to_one(const float (&x)[kEach], float eps) {
  float squares = 0.f;
#pragma unroll
  for (int i = 0; i < kEach; ++i) squares = fmaf(x[i], x[i], squares);
  return rsqrtf(warp_sum(squares) / DIM + eps);
}

// grid (row, heads of all kinds / 4)
extern "C" __global__ void __launch_bounds__(32 * kWarps)
    rope_kv(const float* y, i64 stride, const float* q_weight, const float* k_weight, float eps, const float* cos_of,
            const float* sin_of, const i64* kv_rows, float* __restrict__ q, Codes<K_KIND>::Plane* __restrict__ k,
            Codes<V_KIND>::Plane* __restrict__ v,
#if K_FACTORS
            u16* __restrict__ k_scale,
#endif
#if V_FACTORS
            u16* __restrict__ v_scale,
#endif
            int n_q, int n_kv, int n_pool, int* fault) {
#if N_ROT
  __shared__ float heads[kWarps][DIM];
#endif
  let_successor_start();
  const int row = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int unit = blockIdx.y * kWarps + warp;
  if (unit >= n_q + 2 * n_kv) return;
  const bool is_q = unit < n_q, is_v = unit >= n_q + n_kv;
  // the model's and the forward's, there since before the predecessor
#if HAS_NORM
  float weight[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) weight[i] = (is_q ? q_weight : k_weight)[i * 32 + lane];
#endif
#if N_ROT
  float2 turn[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int d = i * 32 + lane, pair = row * kHalf + (NEOX ? d % kHalf : d / 2);
    turn[i] = d < N_ROT ? make_float2(cos_of[pair], sin_of[pair]) : make_float2(1.f, 0.f);
  }
#endif
  const i64 given = is_q ? 0 : kv_rows[row];
  wait_for_predecessor();
  const int place_of_head = KEYS_ARE_VALUES && is_v ? unit - n_q - n_kv : unit - n_q;
  const float* from = y + row * stride + (is_q ? unit * Q_STEP : n_q * Q_STEP + place_of_head * DIM);
  float x[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) x[i] = from[i * 32 + lane];

  i64 at = 0;  // the pool's head
  if (!is_q) {
    const int place = given < 0 || given > 0x7fffffff ? -1 : static_cast<int>(given);
    if (clamped(place, n_pool, OP_ID, row, fault) != place) return;  // a write elsewhere would spoil another slot
    at = static_cast<i64>(place) * n_kv + (unit - n_q - (is_v ? n_kv : 0));
  }
  if (is_v) {
#if NORMS_V
    const float scale = to_one(x, eps);
#pragma unroll
    for (int i = 0; i < kEach; ++i) x[i] *= scale;
#endif
#if TURN_V
    turned<TURN_V>(x, lane);
#endif
#if V_FACTORS
    u16* const factors = v_scale + at * (V_FACTORS * kEach);
#else
    u16* const factors = nullptr;
#endif
#pragma unroll
    for (int i = 0; i < kEach; ++i) store_block<V_KIND, DIM>(v + at * n_code(V_KIND, DIM), factors, i, lane, x[i]);
    return;
  }
#if HAS_NORM && !NORM_BEHIND
  const float scale = to_one(x, eps);
#pragma unroll
  for (int i = 0; i < kEach; ++i) x[i] *= scale * weight[i];
#endif
#if N_ROT
#pragma unroll
  for (int i = 0; i < kEach; ++i) heads[warp][i * 32 + lane] = x[i];
  __syncwarp();
#endif
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int d = i * 32 + lane;
#if N_ROT
    if (d < N_ROT) {
      const bool is_second = NEOX ? d >= kHalf : d & 1;
      const float other = heads[warp][NEOX ? (is_second ? d - kHalf : d + kHalf) : d ^ 1];
      x[i] = x[i] * turn[i].x + (is_second ? other : -other) * turn[i].y;
    }
#endif
  }
#if NORM_BEHIND
  const float scale = to_one(x, eps);
#pragma unroll
#if HAS_NORM
  for (int i = 0; i < kEach; ++i) x[i] *= scale * weight[i];
#else
  for (int i = 0; i < kEach; ++i) x[i] *= scale;
#endif
#endif
#if TURN_K
  turned<TURN_K>(x, lane);
#endif
#if K_FACTORS
  u16* const factors = k_scale + at * (K_FACTORS * kEach);
#else
  u16* const factors = nullptr;
#endif
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (is_q) q[(static_cast<i64>(row) * n_q + unit) * DIM + i * 32 + lane] = x[i];
    else store_block<K_KIND, DIM>(k + at * n_code(K_KIND, DIM), factors, i, lane, x[i]);
  }
}
