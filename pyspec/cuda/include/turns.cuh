// Cosine and sine of a position's angle in f32, of which f64 is the base: f32 would not tell apart the angles of late positions.
#pragma once
#include "types.cuh"

__device__ __forceinline__ float2 turn_of(double position, double freq) {
  const double angle = position * freq, whole = rint(angle * 0.15915494309189535);  // turns
  const float rest = static_cast<float>(angle - whole * 6.283185307179586);
  return make_float2(cosf(rest), sinf(rest));
}

// A pair of dims turned by c = (cosine, sine).
__device__ __forceinline__ float2 turned(float a, float b, float2 c) { return make_float2(a * c.x - b * c.y, a * c.y + b * c.x); }
