// angles: cos and sin of every row's rope angles. Meaning: angles_ref.py.
//
//   positions  [row]     i64
//   freq       [n_turn]  f32
//   cos, sin   [row, n_turn]  f32  written
//
// A thread an angle. It waits for nobody and lets nobody start early: kernels far behind it read angles before they wait
// for their own predecessors (rope_kv.cu), so this one has to be over before any of them begins. See angles.cuh.
#include "angles.cuh"

constexpr int kThreads = 128;

extern "C" __global__ void __launch_bounds__(kThreads)
    angles(const i64* positions, const float* freq, float* cos_to, float* sin_to, int n_row, int n_turn, float inverse) {
  const i64 at = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= static_cast<i64>(n_row) * n_turn) return;
  put_angle(positions[at / n_turn], freq[at % n_turn], inverse, cos_to + at, sin_to + at);
}
