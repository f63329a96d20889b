// Softmax sums over some keys, in log2 units: maximum of the scores, sum of exp2(score - maximum), the same of values. Without a key: -inf, 0, 0.
#pragma once
#include "types.cuh"

__device__ __forceinline__ float none_seen() { return __uint_as_float(0xff800000u); }  // -inf

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float finite_or_zero(float m) { return m == none_seen() ? 0.f : m; }

struct Fold {
  float m, keep, take;
};

__device__ __forceinline__ Fold fold_of(float running, float next) {
  const float m = fmaxf(running, next), at = finite_or_zero(m);
  return {m, exp2_fast(running - at), exp2_fast(next - at)};
}

__device__ __forceinline__ float folded(float running, float next, Fold f) {
  return __fmaf_rn(running, f.keep, __fmul_rn(next, f.take));
}
