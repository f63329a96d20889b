// convolve: rows mixed with the rows before them in their sequence. Meaning: convolve/ref.py.
//
//   x         [row, COLUMNS]          f32
//   given     [row, STEP apart]       f32   [TAPS, COLUMNS / GROUP] of the side
//   base      [TAPS, COLUMNS]         f32   of the side
//   row_seq   [row]                   i32   of the batch's layout
//   residual  [row, COLUMNS]          f32   or null
//   out       [row, COLUMNS]          f32
//
// A thread has 4 columns of a row, all of one group. What is there before the forward is loaded before the wait. Bound by latency:
// a block has few rows, and all of them stand in L2.
// Macros: COLUMNS, TAPS, GROUP, THREADS.
#include "types.cuh"
#include "overlap.cuh"

constexpr int kGroups = COLUMNS / GROUP;
constexpr int kStep = 2 * TAPS * kGroups;  // of rows in `given`
static_assert(COLUMNS % GROUP == 0 && GROUP % 4 == 0, "a group of each thread");

extern "C" __global__ void __launch_bounds__(THREADS)
    convolve(const float* x, const float* given, const float* base, const int* row_seq, const float* residual,
             float* out) {
  const int row = blockIdx.y, column = 4 * (blockIdx.x * THREADS + threadIdx.x);
  let_successor_start();
  if (column >= COLUMNS) return;
  const int own = row_seq[row];
  float4 weights[TAPS];
  bool has[TAPS];
#pragma unroll
  for (int t = 0; t < TAPS; ++t) {
    weights[t] = *reinterpret_cast<const float4*>(base + t * COLUMNS + column);
    has[t] = t <= row && row_seq[row - t] == own && (t == 0 || has[t - 1]);
  }
  wait_for_predecessor();

  float4 y = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
  for (int t = 0; t < TAPS; ++t) {
    if (!has[t]) continue;
    const float mine = given[static_cast<i64>(row) * kStep + t * kGroups + column / GROUP];
    const float4 v = *reinterpret_cast<const float4*>(x + static_cast<i64>(row - t) * COLUMNS + column);
    y.x += (weights[t].x + mine) * v.x;
    y.y += (weights[t].y + mine) * v.y;
    y.z += (weights[t].z + mine) * v.z;
    y.w += (weights[t].w + mine) * v.w;
  }
  const i64 at = static_cast<i64>(row) * COLUMNS + column;
  if (residual != nullptr) {
    const float4 before = *reinterpret_cast<const float4*>(residual + at);
    y = make_float4(before.x + y.x, before.y + y.y, before.z + y.z, before.w + y.w);
  }
  *reinterpret_cast<float4*>(out + at) = y;
}
