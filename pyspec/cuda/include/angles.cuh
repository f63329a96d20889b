// One angle of a rope, as torch makes it on a GPU: the position rounded to f32, times 1 / factor, times the frequency, each
// product rounded; cosf and sinf of full precision. Texts hang on these bits.
#pragma once
#include "types.cuh"

__device__ __forceinline__ void put_angle(i64 position, float freq, float inverse, float* cos_to, float* sin_to) {
  const float theta = __fmul_rn(__fmul_rn(static_cast<float>(position), inverse), freq);
  *cos_to = cosf(theta);
  *sin_to = sinf(theta);
  __threadfence();  // who starts when this kernel is over may read them without waiting for it
}
