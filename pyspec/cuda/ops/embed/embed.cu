// embed: a token's row of the embedding, unpacked, and cos and sin of its position's rope. Meaning: embed_ref.py.
//
//   raw        [token, row_bytes]  u8   rows of whole blocks of TYPE as in the file, the first at a multiple of 16 bytes
//   tokens     [row]               i64
//   x          [row, n_column]     f32  written, to the bits of dequant_ref.py: every product and difference is rounded
//   positions  [row]               i64
//   freq       [n_turn]            f32
//   cos, sin   [row, n_turn]       f32  written; these four are not looked at where n_turn is 0
//   fault      [5]                 i32  see bounds.cuh
//
// grid (row, parts of a row and, where there are angles, one more), THREADS of 4 columns each. Bound by latency: a token, then its
// bytes. It waits for nobody and lets nobody start early; why: angles.cu.
// Macros: TYPE (ggml's number), THREADS, OP_ID.
#include "angles.cuh"
#include "bounds.cuh"

#define F32 0
#define F16 1
#define Q4_0 2
#define Q8_0 8
#define Q4_K 12
#define Q5_K 13
#define Q6_K 14
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

extern "C" __global__ void __launch_bounds__(THREADS)
    embed(const u8* raw, i64 row_bytes, int n_token, const i64* tokens, float* x, int n_column, const i64* positions,
          const float* freq, float* cos_to, float* sin_to, int n_turn, float inverse, int* fault) {
  const i64 row = blockIdx.x;
  const int column = (blockIdx.y * THREADS + threadIdx.x) * 4;
  if (n_turn != 0 && blockIdx.y == gridDim.y - 1) {
    const i64 position = positions[row];
    for (int i = threadIdx.x; i < n_turn; i += THREADS)
      put_angle(position, freq[i], inverse, cos_to + row * n_turn + i, sin_to + row * n_turn + i);
    return;
  }
  if (column >= n_column) return;
  const i64 given = tokens[row];
  const int place = given < 0 || given > 0x7fffffff ? -1 : static_cast<int>(given);
  const int token = clamped(place, n_token, OP_ID, static_cast<int>(row), fault);
  *reinterpret_cast<float4*>(x + row * n_column + column) = unpacked(raw + token * row_bytes, column);
}
