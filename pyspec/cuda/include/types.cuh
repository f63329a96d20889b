// Own types and conversions: NVRTC ships no device headers, and kernels that need none compile in milliseconds.
#pragma once
typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

__device__ __forceinline__ float bf16_to_f32(u16 x) { return __uint_as_float(static_cast<u32>(x) << 16); }

__device__ __forceinline__ u16 f32_to_bf16(float x) {  // round to nearest even; NaN stays NaN
  u16 out;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out) : "f"(x));
  return out;
}

__device__ __forceinline__ float f16_to_f32(u16 x) {
  float out;
  asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(x));
  return out;
}

__device__ __forceinline__ u16 f32_to_f16(float x) {
  u16 out;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out) : "f"(x));
  return out;
}

__device__ __forceinline__ float warp_sum(float x) {  // fixed order: the same bits every time
#pragma unroll
  for (int lane = 16; lane > 0; lane >>= 1) x += __shfl_xor_sync(0xffffffffu, x, lane);
  return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int lane = 16; lane > 0; lane >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, lane));
  return x;
}
