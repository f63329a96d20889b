// Weights from the bytes of a file, in the bits of dequant.py: every product and difference is rounded. Macro: TYPE (ggml's number).
#pragma once
#include "types.cuh"

#define F32 0
#define F16 1
#define Q4_0 2
#define Q4_1 3
#define Q5_0 6
#define Q5_1 7
#define Q8_0 8
#define Q4_K 12
#define Q5_K 13
#define Q6_K 14
#define IQ4_NL 20
#define BF16 30

__device__ __forceinline__ u16 load2(const u8* p) { return *reinterpret_cast<const u16*>(p); }

// Four bytes; blocks of an even number of bytes begin at even ones only.
__device__ __forceinline__ u32 load4(const u8* p) { return load2(p) | static_cast<u32>(load2(p + 2)) << 16; }

__device__ __forceinline__ int byte_of(u32 bytes, int i) { return bytes >> 8 * i & 255; }

#if TYPE == Q4_K || TYPE == Q5_K
// The six-bit scale and minimum of one of eight groups of 32.
__device__ __forceinline__ int2 scales_of(const u8* scales, int group) {
  if (group < 4) return make_int2(scales[group] & 63, scales[group + 4] & 63);
  const int both = scales[group + 4];
  return make_int2((both & 15) | (scales[group - 4] >> 2 & 48), both >> 4 | (scales[group] >> 2 & 48));
}
#endif

// Columns column .. column + 3 of a row, column a multiple of 4.
__device__ __forceinline__ float4 unpacked(const u8* row, int column) {
  float y[4];
#if TYPE == F32
  return *reinterpret_cast<const float4*>(row + column * 4ll);
#elif TYPE == F16 || TYPE == BF16
  const uint2 two = *reinterpret_cast<const uint2*>(row + column * 2ll);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u16 bits = (i < 2 ? two.x : two.y) >> 16 * (i % 2);
    y[i] = TYPE == F16 ? f16_to_f32(bits) : bf16_to_f32(bits);
  }
#elif TYPE == Q8_0
  const u8* block = row + column / 32 * 34ll;
  const float d = f16_to_f32(load2(block));
  const u32 codes = load4(block + 2 + column % 32);
#pragma unroll
  for (int i = 0; i < 4; ++i) y[i] = __fmul_rn(static_cast<float>(static_cast<i8>(byte_of(codes, i))), d);
#elif TYPE == Q4_0
  const u8* block = row + column / 32 * 18ll;
  const float d = f16_to_f32(load2(block));
  const u32 codes = load4(block + 2 + column % 16) >> column % 32 / 16 * 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) y[i] = __fmul_rn(d, static_cast<float>((byte_of(codes, i) & 15) - 8));
#elif TYPE == IQ4_NL
  constexpr int kLevels[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
  const u8* block = row + column / 32 * 18ll;
  const float d = f16_to_f32(load2(block));
  const u32 codes = load4(block + 2 + column % 16) >> column % 32 / 16 * 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float level = 0.f;
#pragma unroll
    for (int k = 0; k < 16; ++k) level = (byte_of(codes, i) & 15) == k ? static_cast<float>(kLevels[k]) : level;
    y[i] = __fmul_rn(d, level);
  }
#elif TYPE == Q4_1 || TYPE == Q5_0 || TYPE == Q5_1
  constexpr bool kFive = TYPE != Q4_1, kHasLow = TYPE != Q5_0;
  constexpr int kHead = kHasLow ? 4 : 2, kCodes = kHead + (kFive ? 4 : 0);
  const u8* block = row + column / 32 * static_cast<i64>(kCodes + 16);
  const float d = f16_to_f32(load2(block)), low = kHasLow ? f16_to_f32(load2(block + 2)) : 0.f;
  const u32 codes = load4(block + kCodes + column % 16) >> column % 32 / 16 * 4;
  const u32 fifths = kFive ? load4(block + kHead) >> column % 32 : 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int q = (byte_of(codes, i) & 15) | (fifths >> i & 1) << 4;
    y[i] = kHasLow ? __fadd_rn(__fmul_rn(d, static_cast<float>(q)), low) : __fmul_rn(d, static_cast<float>(q - 16));
  }
#elif TYPE == Q4_K || TYPE == Q5_K
  constexpr bool kFive = TYPE == Q5_K;
  const u8* block = row + column / 256 * (kFive ? 176ll : 144ll);
  const int at = column % 256, group = at / 32;
  const int2 scales = scales_of(block + 4, group);
  const float scale = __fmul_rn(f16_to_f32(load2(block)), static_cast<float>(scales.x));
  const float low = __fmul_rn(f16_to_f32(load2(block + 2)), static_cast<float>(scales.y));
  const u32 codes = load4(block + (kFive ? 48 : 16) + group / 2 * 32 + at % 32) >> group % 2 * 4;
  const u32 fifths = kFive ? load4(block + 16 + at % 32) >> group : 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int q = (byte_of(codes, i) & 15) | (byte_of(fifths, i) & 1) << 4;
    y[i] = __fsub_rn(__fmul_rn(scale, static_cast<float>(q)), low);
  }
#elif TYPE == Q6_K
  const u8* block = row + column / 256 * 210ll;
  const int at = column % 128, half = column % 256 / 128;
  const float scale =
      __fmul_rn(f16_to_f32(load2(block + 208)), static_cast<float>(static_cast<i8>(block[192 + column % 256 / 16])));
  const u32 lows = load4(block + half * 64 + at % 64) >> at / 64 * 4;
  const u32 highs = load4(block + 128 + half * 32 + at % 32) >> at / 32 * 2;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int q = ((byte_of(lows, i) & 15) | (byte_of(highs, i) & 3) << 4) - 32;
    y[i] = __fmul_rn(scale, static_cast<float>(q));
  }
#else
#error "a type that is not known"
#endif
  return make_float4(y[0], y[1], y[2], y[3]);
}
