// linear_unpack: rows of a packed matrix as f16, for a library's product of many rows.
//
//   weights  [tile][chunk][16 rows][record]  u8   linear_pack.py; behind them a scale for each row, f32, for types that have one
//   out      [row, n_in]                     f16  rows 16 first and on; when GATED their gates (rows 0-7 of each 16), then their ups
//
// Values are those of the file in f32, times the row's scale, rounded once: to the bit what plain torch makes of them (dequant.py).
// A warp has a record: 16 rows of a chunk. Bound by memory. grid (chunks over the warps of a CTA, groups of 16 rows)
//
// Set by the launcher: TYPE, CHUNK, RECORD (quants.cuh), GATED (0 or 1).
#include "quants.cuh"
#include "overlap.cuh"

constexpr int kWarps = 8, kTile = 16;
// The product of a code and an f16 scale has so few bits that f32 holds all of them: one rounding, and f16's product has the same.
constexpr bool kInHalf = TYPE == Q8_0 || TYPE == Q4_0 || TYPE == Q5_0 || TYPE == IQ4_NL;

__device__ __forceinline__ u32 two_f16(float low, float high) {
  u32 v;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
}

// Operand i of a lane as weights; of_row: the row's second scale.
__device__ __forceinline__ u32 weight(const Weights& w, int i, float of_row) {
#if TYPE == F16
  return w.a[i];
#else
  const bool is_8 = i & 1;
#if SCALED
  const float scale = of_row * kUnit;
#elif HALF_SCALES
  const float scale = i < 4 ? (is_8 ? w.scale8 : w.scale) : (is_8 ? w.more8 : w.more);
#else
  const float scale = is_8 ? w.scale8 : w.scale;
#endif
  if (kInHalf) return mul_f16x2(w.a[i], two_f16(scale, scale));
  const float low = low_half(w.a[i]), high = high_half(w.a[i]);
#if HAS_MIN || HALF_MINIMA
#if HAS_MIN
  const float less = is_8 ? w.more8 : w.more;
#else
  const float less = w.low[i / 4 * 2 + is_8];
#endif
  return two_f16(fmaf(low, scale, -less), fmaf(high, scale, -less));  // the products are exact
#else
  constexpr float kFirst = SCALED ? 1.f : kUnit;
  return two_f16(low * kFirst * scale, high * kFirst * scale);
#endif
#endif
}

extern "C" __global__ void __launch_bounds__(32 * kWarps)
    linear_unpack(const u8* __restrict__ weights, u16* __restrict__ out, int first, int n_group, int n_record, int n_chunk,
                  int n_row, int n_in) {
  __shared__ __align__(16) uint4 records[kWarps][RECORD / 16];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, chunk = blockIdx.x * kWarps + warp;
  const int group = first + blockIdx.y, tile = group / kTile;
  let_successor_start();
  if (chunk >= n_chunk) return;
  const int n16 = min(kTile, n_record - tile * kTile);
  const u8* from = weights + (static_cast<i64>(tile) * kTile * n_chunk + static_cast<i64>(chunk) * n16 + group % kTile) * RECORD;
  const u32 record = shared_address(records[warp]);
#pragma unroll
  for (int i = 0; i < RECORD / 16; i += 32)
    if (i + lane < RECORD / 16) copy16(record + (i + lane) * 16, from + (i + lane) * 16);
  copies_commit();
  float scale = 1.f, scale8 = 1.f;
#if ROW_SCALES
  const float* const scales = reinterpret_cast<const float*>(weights + static_cast<i64>(n_record) * n_chunk * RECORD) + group * 16 + (lane >> 2);
  scale = scales[0], scale8 = scales[8];
#endif
  copies_wait<0>();
  __syncwarp();
  wait_for_predecessor();  // it reads what is written here
  const int row = static_cast<int>(blockIdx.y) * (GATED ? 8 : 16) + (lane >> 2), row8 = row + (GATED ? n_group * 8 : 8);
  u16* const to = out + static_cast<i64>(row) * n_in + (lane & 3) * 4;
  u16* const to8 = out + static_cast<i64>(row8) * n_in + (lane & 3) * 4;
  const bool has = GATED || row < n_row, has8 = GATED || row8 < n_row;
#pragma unroll(CHUNK <= 4 ? CHUNK : 4)
  for (int block = 0; block < CHUNK; ++block) {
    const int column = (chunk * CHUNK + block) * 32;
    if (column >= n_in) break;
    Weights w;
    unpack(w, record, block, lane);
    u32 v[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = weight(w, i, i & 1 ? scale8 : scale);
    if (has) {
      *reinterpret_cast<uint2*>(to + column) = make_uint2(v[0], v[2]);
      *reinterpret_cast<uint2*>(to + column + 16) = make_uint2(v[4], v[6]);
    }
    if (has8) {
      *reinterpret_cast<uint2*>(to8 + column) = make_uint2(v[1], v[3]);
      *reinterpret_cast<uint2*>(to8 + column + 16) = make_uint2(v[5], v[7]);
    }
  }
}
