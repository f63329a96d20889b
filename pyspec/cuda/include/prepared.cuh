// Rows on their way into a product: what rows.cu and kernels that write prepared rows themselves share, so that both give
// the same bits. Operations are spelt out where compilers might contract two into one, in one kernel and not in the other.
#pragma once
#include "types.cuh"

__device__ __forceinline__ float square(float x) { return __fmul_rn(x, x); }

__device__ __forceinline__ u32 pair(float low, float high) {
  return f32_to_f16(low) | static_cast<u32>(f32_to_f16(high)) << 16;
}

struct Power {  // value = f16 * power; f16 = value * factor
  float power, factor;
};

// The power of two that brings a row's largest magnitude into [1, 2). Rows of zeros and infinite ones go as they are.
__device__ __forceinline__ Power power_of(float largest) {
  const u32 exponent = __float_as_uint(largest) & 0x7f800000u;
  const bool is_usual = exponent >= 0x00800000u && exponent < 0x7f800000u;
  const u32 bits = min(exponent, 0x7e800000u);  // 2^126, whose inverse is a normal number
  if (!is_usual) return {1.f, 1.f};
  return {__uint_as_float(bits), __uint_as_float(0x7f000000u - bits)};
}

// Of 4 neighbours. A head's sum of squares is a tree of neighbours: of 2 columns, of 4, of 8, ..., whoever holds them.
__device__ __forceinline__ float squares_of(float4 v) {
  return __fadd_rn(__fadd_rn(square(v.x), square(v.y)), __fadd_rn(square(v.z), square(v.w)));
}

// The tree's next hops, over N lanes side by side; all of them get the sum.
template <int N>
__device__ __forceinline__ float sum_of_neighbours(float x) {
#pragma unroll
  for (int lane = 1; lane < N; lane <<= 1) x = __fadd_rn(x, __shfl_xor_sync(0xffffffffu, x, lane));
  return x;
}

__device__ __forceinline__ float head_scale(float squares, int dim, float eps) {  // dim is a power of two
  return rsqrtf(__fadd_rn(__fmul_rn(squares, 1.f / static_cast<float>(dim)), eps));
}

__device__ __forceinline__ float fast_silu(float x) { return __fdividef(x, __fadd_rn(1.f, __expf(-x))); }

// What normed columns are multiplied with: weights and silu(gates).
__device__ __forceinline__ float4 head_gate(float4 w, float4 gates) {
  return make_float4(w.x * fast_silu(gates.x), w.y * fast_silu(gates.y), w.z * fast_silu(gates.z),
                     w.w * fast_silu(gates.w));
}

__device__ __forceinline__ float4 gated_head(float4 v, float scale, float4 gate) {
  return make_float4(v.x * scale * gate.x, v.y * scale * gate.y, v.z * scale * gate.z, v.w * scale * gate.w);
}

__device__ __forceinline__ uint2 halves_of(float4 v, float factor) {
  return make_uint2(pair(v.x * factor, v.y * factor), pair(v.z * factor, v.w * factor));
}

// Four columns of a row into its block of LAYOUT 0 (rows.cu), and the block's sum. For all lanes of a warp: 8 hold a block.
__device__ __forceinline__ void put_in_block(u16* blocks, float* sums, int pad, int row, int column, uint2 packed,
                                             bool is_in) {
  float total = f16_to_f32(static_cast<u16>(packed.x)) + f16_to_f32(static_cast<u16>(packed.x >> 16)) +
                (f16_to_f32(static_cast<u16>(packed.y)) + f16_to_f32(static_cast<u16>(packed.y >> 16)));
#pragma unroll
  for (int lane = 4; lane > 0; lane >>= 1) total += __shfl_xor_sync(0xffffffffu, total, lane);
  if (!is_in) return;
  const i64 at = static_cast<i64>(column / 32) * pad + row;
  const int quad = column % 32 / 4;
  *reinterpret_cast<uint2*>(blocks + at * 32 + (quad & 3) * 8 + (quad >> 2) * 4) = packed;
  if (quad == 0) sums[at] = total;
}

// The same of LAYOUT 2, without sums. For any lane.
__device__ __forceinline__ void put_in_tall(u16* blocks, int pad, int row, int column, uint2 packed) {
  const int part = column % 64 / 16 * 2, turn = row % 8, at = column % 16 / 2;  // two of the row's eight parts
  u16* to = blocks + (static_cast<i64>(column / 64) * pad + row) * 64 + at;
  *reinterpret_cast<u32*>(to + (part ^ turn) * 8) = packed.x;
  *reinterpret_cast<u32*>(to + ((part + 1) ^ turn) * 8) = packed.y;
}

// LAYOUT 3 of rows.cu: a unit of 64 columns is 64 bytes of upper halves, 64 of lower ones, two sums, two powers.
// Halved: columns in order, of four sums (of 16 columns each) as many bf16 and then what those are too little by, the powers, 8 bytes of nothing.
constexpr int kUnitBytes = 144, kHalvedUnitBytes = 160;

template <bool kHalved = false>
__device__ __forceinline__ int plane_bytes(int n) {  // of a row of n columns, padded
  return (n + 255) / 256 * (4 * (kHalved ? kHalvedUnitBytes : kUnitBytes));
}

__device__ __forceinline__ float4 times(float4 v, float by) { return make_float4(v.x * by, v.y * by, v.z * by, v.w * by); }

// Four columns of a row into their unit, as whole numbers of 16 bits times a power that kLanes side by side have in common: 8 of them a
// block of 32 columns, 16 a unit. For all lanes of a warp. Columns lie as moe.cu's operands take them: 8 t + ... of a block's 4t to 4t + 3
// and 16 more, in turn unless halved. What is no number, or infinite, makes the power so.
template <int kLanes, bool kHalved = false>
__device__ __forceinline__ void put_in_planes(u8* row, int column, float4 v, bool is_in) {
  constexpr u32 kSize = 0x7fffffffu, kAll = 0xffffffffu;
  constexpr float kMost = 127 * 256 + 127;  // what two signed bytes hold on both sides of zero
  u32 largest = max(max(__float_as_uint(v.x) & kSize, __float_as_uint(v.y) & kSize),
                    max(__float_as_uint(v.z) & kSize, __float_as_uint(v.w) & kSize));
#pragma unroll
  for (int hop = kLanes / 2; hop > 0; hop >>= 1) largest = max(largest, __shfl_xor_sync(kAll, largest, hop));
  const float most = __uint_as_float(largest), power = most * (1.f / kMost);
  const float factor = most > 1e-30f ? kMost / most : 0.f;
  const int x = __float2int_rn(v.x * factor), y = __float2int_rn(v.y * factor), z = __float2int_rn(v.z * factor),
            w = __float2int_rn(v.w * factor);
  const u32 lower = __byte_perm(__byte_perm(x, y, 0x0040), __byte_perm(z, w, 0x0040), 0x5410);
  const u32 upper = __byte_perm(__byte_perm(x + 128, y + 128, 0x0051), __byte_perm(z + 128, w + 128, 0x0051), 0x5410);
  int total = x + y + z + w;
#pragma unroll
  for (int hop = kHalved ? 2 : 4; hop > 0; hop >>= 1) total += __shfl_xor_sync(kAll, total, hop);
  // A lane has a plane's bytes of its own four columns and of those 16 before or behind.
  const int quad = column % 32 / 4, block = column % 64 / 32;
  const bool is_second = quad >= 4;
  const u32 own = is_second ? lower : upper, other = __shfl_xor_sync(kAll, is_second ? upper : lower, 4);
  const u32 first = is_second ? other : own, second = is_second ? own : other;
  if (!is_in) return;
  u8* to = row + column / 64 * (kHalved ? kHalvedUnitBytes : kUnitBytes);
  *reinterpret_cast<uint2*>(to + is_second * 64 + quad % 4 * 16 + block * 8) =
      kHalved ? make_uint2(first, second) : make_uint2(__byte_perm(first, second, 0x5140), __byte_perm(first, second, 0x7362));
  const float sum = static_cast<float>(total) * power;
  if (kHalved) {
    if (quad % 4 == 0) {
      u16* const part = reinterpret_cast<u16*>(to + 128 + block * 4 + quad / 2);
      part[0] = f32_to_bf16(sum), part[4] = f32_to_bf16(sum - bf16_to_f32(part[0]));
    }
    if (quad == 1) *reinterpret_cast<float*>(to + 144 + block * 4) = power;
    return;
  }
  if (quad == 0) *reinterpret_cast<float*>(to + 128 + block * 4) = sum;
  if (quad == 1) *reinterpret_cast<float*>(to + 136 + block * 4) = power;
}
