// Keys and values of all kinds, written and read a warp's 32 dims at a time; numbers of KV_KIND, if that is given, one by one.
//
// Rounding is that of slots/kv_codes.py, bit by bit, on every architecture.
#pragma once
#include "kv_kinds.cuh"

constexpr float MAX_SCALE = 515.5f, MAX_F8 = 448.f, MAX_PACKED = 64512.f, LEAST_STEP = 5.42101086e-20f;  // 2^-64

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

// A warp's 32 values into block `block` of a head, one a lane: codes [n_code] and factors [WIDTH / 32 * n_factor] of the head.
template <int KIND, int WIDTH>
__device__ __forceinline__ void store_bits(u8* codes, u16* factors, int block, int lane, float given) {
  constexpr int MIDDLE = 1 << (n_bit(KIND) - 1), MOST = 2 * MIDDLE - 1;
  const bool is_none = __any_sync(0xffffffffu, given != given);
  const float x = given > MAX_PACKED ? MAX_PACKED : given < -MAX_PACKED ? -MAX_PACKED : given;
  float step, least = 0.f;
  if constexpr (n_factor(KIND) == 2) {
    float top = least = x;
#pragma unroll
    for (int far = 16; far > 0; far >>= 1) {
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, far));
      least = fminf(least, __shfl_xor_sync(0xffffffffu, least, far));
    }
    step = __fdiv_rn(top - least, static_cast<float>(MOST));
  } else {
    const int size = __float_as_int(x) & 0x7fffffff;
    const int first = __ffs(static_cast<int>(__ballot_sync(0xffffffffu, size == __reduce_max_sync(0xffffffffu, size)))) - 1;
    step = __shfl_sync(0xffffffffu, x, first) * (-1.f / MIDDLE);
  }
  if (is_none) step = __int_as_float(0x7fffffff);
  if (is_none && n_factor(KIND) == 2) least = step;
  const float inverse = fabsf(step) >= LEAST_STEP ? __frcp_rn(step) : 0.f;
  const float place = __fmaf_rn(x - least, inverse, n_factor(KIND) == 2 ? 0.5f : MIDDLE + 0.5f);
  const int code = place > 0.f ? static_cast<int>(fminf(place, static_cast<float>(MOST))) : 0;  // NaN is 0
  const int next = __shfl_down_sync(0xffffffffu, code, 1);
  if (lane % 2 == 0) codes[block * 16 + lane / 2] = static_cast<u8>((code & 15) | (next & 15) << 4);
  if constexpr (n_bit(KIND) == 5) {
    const u32 fifth = __ballot_sync(0xffffffffu, code >> 4);
    if (lane == 0) *reinterpret_cast<u32*>(codes + WIDTH / 2 + block * 4) = fifth;
  }
  if (lane == 0) {
    factors[block * n_factor(KIND)] = f32_to_f16(step);
    if constexpr (n_factor(KIND) == 2) factors[block * 2 + 1] = f32_to_f16(least);
  }
}

// The same of every kind.
template <int KIND, int WIDTH>
__device__ __forceinline__ void store_block(typename Codes<KIND>::Plane* codes, u16* factors, int block, int lane, float x) {
  if constexpr (KIND == 0) codes[block * 32 + lane] = x;
  if constexpr (KIND == 1) codes[block * 32 + lane] = f32_to_f16(x);
  if constexpr (KIND == 2) codes[block * 32 + lane] = f32_to_bf16(x);
  if constexpr (KIND == 3) {
    const u16 scale = q8_scale(x);
    codes[block * 32 + lane] = static_cast<u8>(q8_code(x, scale));
    if (lane == 0) factors[block] = scale;
  }
  if constexpr (KIND == 4) codes[block * 32 + lane] = f32_to_e4m3(x);
  if constexpr (KIND >= 5) store_bits<KIND, WIDTH>(codes, factors, block, lane, x);
}

// A lane's value of a head's block, in f32.
template <int KIND, int WIDTH>
__device__ __forceinline__ float load_block(const typename Codes<KIND>::Plane* codes, const u16* factors, int block, int lane) {
  if constexpr (KIND == 0) return codes[block * 32 + lane];
  if constexpr (KIND == 1) return f16_to_f32(codes[block * 32 + lane]);
  if constexpr (KIND == 2) return bf16_to_f32(codes[block * 32 + lane]);
  if constexpr (KIND == 3) return static_cast<float>(static_cast<i8>(codes[block * 32 + lane])) * f16_to_f32(factors[block]);
  if constexpr (KIND == 4) return e4m3_to_f32(codes[block * 32 + lane]);
  if constexpr (KIND >= 5) {
    int code = codes[block * 16 + lane / 2] >> (4 * (lane % 2)) & 15;
    if constexpr (n_bit(KIND) == 5) code |= (codes[WIDTH / 2 + block * 4 + lane / 8] >> lane % 8 & 1) << 4;
    const float step = f16_to_f32(factors[block * n_factor(KIND)]);
    if constexpr (n_factor(KIND) == 2) return fmaf(static_cast<float>(code), step, f16_to_f32(factors[2 * block + 1]));
    return static_cast<float>(code - (1 << (n_bit(KIND) - 1))) * step;
  }
}

#ifdef KV_KIND
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
#else
typedef u8 Kv;
__device__ __forceinline__ Kv to_kv(float x) { return f32_to_e4m3(x); }
__device__ __forceinline__ float from_kv(Kv x) { return e4m3_to_f32(x); }
#endif
#endif
