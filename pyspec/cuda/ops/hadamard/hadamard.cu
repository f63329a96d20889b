// hadamard: every TURNED dims of a head times a Hadamard matrix over the root of their number. Meaning: hadamard/ref.py.
//
//   x, out  [head, DIM]  f32   heads of all rows
//
// A warp a head, so bound by latency. Macros: DIM, TURNED (a power of two that divides DIM).
#include "hadamard.cuh"
#include "overlap.cuh"

extern "C" __global__ void __launch_bounds__(128) hadamard(const float* x, float* out, int n_head) {
  let_successor_start();
  const int head = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (head >= n_head) return;
  const i64 at = static_cast<i64>(head) * DIM + lane;
  wait_for_predecessor();
  float y[DIM / 32];
#pragma unroll
  for (int i = 0; i < DIM / 32; ++i) y[i] = x[at + 32 * i];
  turned<TURNED>(y, lane);
#pragma unroll
  for (int i = 0; i < DIM / 32; ++i) out[at + 32 * i] = y[i];
}
