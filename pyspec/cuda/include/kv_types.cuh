// Types of keys and values, written and read one by one. KV_KIND 0: f32, 1: f16, 2: bf16, 3: i8 codes of q8_0, 4: f8_e4m3.
//
// Rounding is that of slots/kv.py, bit by bit, on every architecture.
#pragma once
#include "types.cuh"

constexpr float MAX_SCALE = 515.5f, MAX_F8 = 448.f;

// To nearest even, saturating; NaN stays NaN. In whole numbers, since GPUs below 8.9 have no instruction for it.
__device__ __forceinline__ u8 f32_to_e4m3(float x) {
  const u32 bits = __float_as_uint(x), sign = bits >> 24 & 0x80u, size = bits & 0x7fffffffu;
  if (size > 0x7f800000u) return static_cast<u8>(sign | 0x7fu);
  const float y = fminf(__uint_as_float(size), MAX_F8);
  if (y < 0.015625f) return static_cast<u8>(sign | __float2int_rn(y * 512.f));  // multiples of 2^-9; 8 is the next power's
  const u32 z = __float_as_uint(y);
  return static_cast<u8>(sign | (((z + 0x7ffffu + (z >> 20 & 1)) >> 20) - (120u << 3)));
}

__device__ __forceinline__ float e4m3_to_f32(u8 x) {
  const u32 size = x & 0x7fu, sign = (x & 0x80u) << 24;
  if (size == 0x7fu) return __uint_as_float(0x7fffffffu);
  return __uint_as_float(sign | __float_as_uint(__uint_as_float(size << 20) * __uint_as_float(0x7b800000u)));  // 2^120
}

// The f16 scale of 32 values of one warp, whose lanes have one each. NaN has more bits than any number.
__device__ __forceinline__ u16 q8_scale(float x) {
  const float top = __int_as_float(__reduce_max_sync(0xffffffffu, __float_as_int(x) & 0x7fffffff)) * (1.f / 127.f);
  return f32_to_f16(top > MAX_SCALE ? MAX_SCALE : top);
}

__device__ __forceinline__ i8 q8_code(float x, u16 scale) {
  const float wide = f16_to_f32(scale);
  if (!(wide > 0.f)) return 0;
  return static_cast<i8>(__float2int_rn(fminf(fmaxf(x * __frcp_rn(wide), -127.f), 127.f)));
}

#if KV_KIND == 0
typedef float Kv;
__device__ __forceinline__ Kv to_kv(float x) { return x; }
__device__ __forceinline__ float from_kv(Kv x) { return x; }
#elif KV_KIND == 1
typedef u16 Kv;
__device__ __forceinline__ Kv to_kv(float x) { return f32_to_f16(x); }
__device__ __forceinline__ float from_kv(Kv x) { return f16_to_f32(x); }
#elif KV_KIND == 2
typedef u16 Kv;
__device__ __forceinline__ Kv to_kv(float x) { return f32_to_bf16(x); }
__device__ __forceinline__ float from_kv(Kv x) { return bf16_to_f32(x); }
#elif KV_KIND == 3
typedef i8 Kv;
#else
typedef u8 Kv;
__device__ __forceinline__ Kv to_kv(float x) { return f32_to_e4m3(x); }
__device__ __forceinline__ float from_kv(Kv x) { return e4m3_to_f32(x); }
#endif
