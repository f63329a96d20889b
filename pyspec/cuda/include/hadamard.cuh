// A Hadamard transform of a warp's head, to the bits of slots/kv_codes.py: sums and differences of pairs, near ones first.
#pragma once
#include "types.cuh"

__device__ constexpr float over_root(int n) {  // 1 / sqrt(n) of a power of two, rounded as the host rounds it
  float y = n == 1 || n == 4 || n == 16 || n == 64 || n == 256 || n == 1024 ? 1.f : 0.70710678118654752440f;
  for (; n >= 4; n /= 4) y *= 0.5f;
  return y;
}

// Lane `lane` has dims 32 i + lane in x[i]. N: a power of two, at least 2, that divides 32 times PER.
template <int N, int PER>
__device__ __forceinline__ void turned(float (&x)[PER], int lane) {
#pragma unroll
  for (int far = 1; far < 32 && far < N; far *= 2)
#pragma unroll
    for (int i = 0; i < PER; i++) {
      const float other = __shfl_xor_sync(0xffffffffu, x[i], far);
      x[i] = lane & far ? other - x[i] : x[i] + other;
    }
#pragma unroll
  for (int far = 1; far < N / 32; far *= 2)
#pragma unroll
    for (int i = 0; i < PER; i++)
      if (!(i & far) && i + far < PER) {
        const float a = x[i], b = x[i + far];
        x[i] = a + b;
        x[i + far] = a - b;
      }
#pragma unroll
  for (int i = 0; i < PER; i++) x[i] *= over_root(N);
}
