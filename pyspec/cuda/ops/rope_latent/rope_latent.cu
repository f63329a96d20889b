// rope_latent: from the products of latent attention to what it reads: the key normed, turned and in its page, queries turned behind the
// heads' key matrices. Meaning: rope_latent/ref.py.
//
//   kv        [row, kv_step]              f32    the first DIM columns are the key
//   y         [row, n_head, PLAIN + N_ROT]  f32  rows y_step apart: the queries' last dims are read, those that turn
//   plain     [row, n_head, RANK]         f32
//   norm      [RANK]                      f32
//   cos, sin  [row, N_ROT / 2]            f32
//   kv_rows   [row]                       int64  where the row's key goes in the pool
//   q         [row, n_head, DIM]          f32    written
//   k         [pool row, ...]             codes  written at kv_rows, see kv_kinds.cuh
//   k_scale   [pool row, ...]             f16    factors of kinds that have any
//   fault     [5]                         int32  see bounds.cuh
//
// DIM = RANK + N_ROT. NEOX pairs d of the tail with d + N_ROT / 2, otherwise 2d with 2d + 1. Behind that every TURN_K dims are turned
// together by hadamard.cuh; 0: none. A warp has the key or a query of a row; bound by latency for few rows, by queries' bytes for many.
// Macros: RANK, N_ROT, PLAIN, NEOX, K_KIND, TURN_K, OP_ID.
#define V_KIND K_KIND
#include "kv_types.cuh"
#include "bounds.cuh"
#include "hadamard.cuh"
#include "overlap.cuh"

constexpr int DIM = RANK + N_ROT, kWarps = 4, kEach = DIM / 32, kHalf = N_ROT / 2 + !N_ROT;  // nothing is read of no pairs
static_assert(DIM % 32 == 0 && N_ROT % 2 == 0, "whole warps, whole pairs");

// grid (row, (1 + n_head) / 4)
extern "C" __global__ void __launch_bounds__(32 * kWarps)
    rope_latent(const float* kv, i64 kv_step, const float* y, i64 y_step, const float* plain, const float* norm, float eps,
                const float* cos_of, const float* sin_of, const i64* kv_rows, float* __restrict__ q,
                Codes<K_KIND>::Plane* __restrict__ k,
#if K_FACTORS
                u16* __restrict__ k_scale,
#endif
                int n_head, int n_pool, int* fault) {
  __shared__ float tails[kWarps][2 * kHalf];
  let_successor_start();
  const int row = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, unit = blockIdx.y * kWarps + warp, head = unit - 1;
  if (unit > n_head) return;
  const bool is_key = unit == 0;
  // the model's and the forward's, there since before the predecessor
  const i64 given = is_key ? kv_rows[row] : 0;
  float2 turn[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int d = i * 32 + lane - RANK, pair = row * kHalf + (NEOX ? d % kHalf : d / 2);
    turn[i] = d >= 0 ? make_float2(cos_of[pair], sin_of[pair]) : make_float2(1.f, 0.f);
  }
  wait_for_predecessor();
  const i64 at = static_cast<i64>(row) * n_head + head;
  const float* const latent = is_key ? kv + row * kv_step : plain + at * RANK;
  const float* const tail = is_key ? kv + row * kv_step + RANK : y + row * y_step + head * (PLAIN + N_ROT) + PLAIN;
  float x[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int d = i * 32 + lane;
    x[i] = d < RANK ? latent[d] : tail[d - RANK];
    if (d >= RANK) tails[warp][d - RANK] = x[i];
  }
  if (is_key) {
    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (i * 32 + lane < RANK) squares = fmaf(x[i], x[i], squares);
    const float scale = rsqrtf(warp_sum(squares) / RANK + eps);
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (i * 32 + lane < RANK) x[i] *= scale * norm[i * 32 + lane];
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int d = i * 32 + lane - RANK;
    if (d >= 0) {
      const bool is_second = NEOX ? d >= kHalf : d & 1;
      const float other = tails[warp][NEOX ? (is_second ? d - kHalf : d + kHalf) : d ^ 1];
      x[i] = x[i] * turn[i].x + (is_second ? other : -other) * turn[i].y;
    }
  }
#if TURN_K
  turned<TURN_K>(x, lane);
#endif
  if (!is_key) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) q[at * DIM + i * 32 + lane] = x[i];
    return;
  }
  const int place = given < 0 || given > 0x7fffffff ? -1 : static_cast<int>(given);
  if (clamped(place, n_pool, OP_ID, row, fault) != place) return;  // a write elsewhere would spoil another slot
#if K_FACTORS
  u16* const factors = k_scale + static_cast<i64>(place) * (K_FACTORS * kEach);
#else
  u16* const factors = nullptr;
#endif
#pragma unroll
  for (int i = 0; i < kEach; ++i)
    store_block<K_KIND, DIM>(k + static_cast<i64>(place) * n_code(K_KIND, DIM), factors, i, lane, x[i]);
}
