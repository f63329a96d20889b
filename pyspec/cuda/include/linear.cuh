// What linear.cu and linear_sm90.cu share: sums of a stage in shared memory, shares of tiles, stores. See linear.cu.
#pragma once
#include "quants.cuh"

#define PLAIN 0
#define RESIDUAL 1
#define GATED 2  // rows 0-7 of each 16 are gates, 8-15 the ups of the same features: writes silu(gate) * up

constexpr int kThreads = 32 * WARPS_M * WARPS_N;
constexpr int kTile = 16;  // 16-row tiles of a CTA
constexpr int kPad = 8 * TILES_N * WARPS_N;
constexpr int kWeightBytes = kTile * RECORD;
constexpr int kRowBytes = CHUNK * kPad * 64;
constexpr int kSumBytes = HAS_MIN ? CHUNK * kPad * 4 : 0;
constexpr int kWarps = WARPS_M * WARPS_N;
constexpr int kStageBytes = kWeightBytes + kRowBytes + kSumBytes;
static_assert(WARPS_M * TILES_M == kTile, "a CTA owns 256 rows");

struct Shape {
  int n_row, n_out, n_tile16, n_chunk;
};

struct Accumulator {
  float v[TILES_M][TILES_N][4];
};

// Calls f(value, its number) for each of a thread's sums.
template <class F>
__device__ __forceinline__ void each(Accumulator& acc, F f) {
#pragma unroll
  for (int m = 0; m < TILES_M; ++m)
#pragma unroll
    for (int n = 0; n < TILES_N; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j) f(acc.v[m][n][j], (m * TILES_N + n) * 4 + j);
}

__device__ __forceinline__ void multiply(float (&acc)[4], const Weights& w, uint4 b, float s0, float s1) {
  float part[4];
  mma_f16(part, w.a[0], w.a[1], w.a[2], w.a[3], b.x, b.y, 0.f, 0.f, 0.f, 0.f);
#if HALF_SCALES
  acc[0] = fmaf(part[0], w.scale, acc[0]);
  acc[1] = fmaf(part[1], w.scale, acc[1]);
  acc[2] = fmaf(part[2], w.scale8, acc[2]);
  acc[3] = fmaf(part[3], w.scale8, acc[3]);
  mma_f16(part, w.a[4], w.a[5], w.a[6], w.a[7], b.z, b.w, 0.f, 0.f, 0.f, 0.f);
  acc[0] = fmaf(part[0], w.more, acc[0]);
  acc[1] = fmaf(part[1], w.more, acc[1]);
  acc[2] = fmaf(part[2], w.more8, acc[2]);
  acc[3] = fmaf(part[3], w.more8, acc[3]);
#else
  mma_f16(part, w.a[4], w.a[5], w.a[6], w.a[7], b.z, b.w, part[0], part[1], part[2], part[3]);
  acc[0] = fmaf(part[0], w.scale, acc[0]);
  acc[1] = fmaf(part[1], w.scale, acc[1]);
  acc[2] = fmaf(part[2], w.scale8, acc[2]);
  acc[3] = fmaf(part[3], w.scale8, acc[3]);
#endif
#if HAS_MIN
  acc[0] = fmaf(-w.more, s0, acc[0]);
  acc[1] = fmaf(-w.more, s1, acc[1]);
  acc[2] = fmaf(-w.more8, s0, acc[2]);
  acc[3] = fmaf(-w.more8, s1, acc[3]);
#endif
}

// What a warp multiplies of one block: its part of the weights and of the rows.
struct Left {
  Codes codes[TILES_M];
};

struct Right {
  uint4 x[TILES_N];
  uint2 sums[TILES_N];
};

// Past the rows of a last, lower tile lies anything: it is multiplied and not stored.
__device__ __forceinline__ void fetch(Left& left, u32 stage, int block) {
  const int lane = threadIdx.x & 31, tile = (threadIdx.x >> 5) / WARPS_N * TILES_M;
#pragma unroll
  for (int m = 0; m < TILES_M; ++m) fetch(left.codes[m], stage + (tile + m) * RECORD, block, lane);
}

__device__ __forceinline__ void fetch(Right& right, u32 stage, int block) {
  const int lane = threadIdx.x & 31, column = (threadIdx.x >> 5) % WARPS_N * TILES_N;
  const u32 rows = stage + kWeightBytes + block * (kPad * 64) + column * 512 + lane * 16;
  const u32 sums = stage + kWeightBytes + kRowBytes + block * (kPad * 4) + column * 32 + (lane & 3) * 8;
#pragma unroll
  for (int n = 0; n < TILES_N; ++n) right.x[n] = shared_16(rows + n * 512);
#if HAS_MIN
#pragma unroll
  for (int n = 0; n < TILES_N; ++n) right.sums[n] = shared_8(sums + n * 32);
#endif
}

__device__ __forceinline__ void multiply(Accumulator& acc, const Left& left, const Right& right) {
  Weights w[TILES_M];
#pragma unroll
  for (int m = 0; m < TILES_M; ++m) unpack(w[m], left.codes[m]);
#pragma unroll
  for (int n = 0; n < TILES_N; ++n)
#pragma unroll
    for (int m = 0; m < TILES_M; ++m)
      multiply(acc.v[m][n], w[m], right.x[n], __uint_as_float(right.sums[n].x), __uint_as_float(right.sums[n].y));
}

__device__ __forceinline__ void clear(Accumulator& acc) {
  each(acc, [](float& v, int) { v = 0.f; });
}

__device__ __forceinline__ float silu(float x) { return x / (1.f + __expf(-x)); }

// Stores the vectors of sums (16 weight rows, 8 rows) whose bits are set.
__device__ __forceinline__ void store(const Accumulator& acc, u32 vectors, Shape s, int tile, const u8* weights,
                                      const float* powers, const float* residual, float* out) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2;
  const int first16 = tile * kTile + (warp / WARPS_N) * TILES_M;
  float scale[TILES_M], scale8[TILES_M];
#pragma unroll
  for (int m = 0; m < TILES_M; ++m) {
    scale[m] = scale8[m] = kUnit;
#if ROW_SCALES
    const float* row_scales = reinterpret_cast<const float*>(weights + static_cast<i64>(s.n_tile16) * s.n_chunk * RECORD);
    scale[m] *= row_scales[(first16 + m) * 16 + g];
    scale8[m] *= row_scales[(first16 + m) * 16 + g + 8];
#endif
  }
#pragma unroll
  for (int n = 0; n < TILES_N; ++n) {
    const int row = ((warp % WARPS_N) * TILES_N + n) * 8 + (lane & 3) * 2;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (row + j >= s.n_row) continue;
      const float power = powers[row + j];
#pragma unroll
      for (int m = 0; m < TILES_M; ++m) {
        if (!(vectors >> (m * TILES_N + n) & 1)) continue;
        const int tile16 = first16 + m;
        const float y = acc.v[m][n][j] * scale[m] * power, y8 = acc.v[m][n][j + 2] * scale8[m] * power;
#if EPILOGUE == GATED
        const int column = tile16 * 8 + g;
        if (column < s.n_out) out[static_cast<i64>(row + j) * s.n_out + column] = silu(y) * y8;
#else
        const int column = tile16 * 16 + g;
        const i64 at = static_cast<i64>(row + j) * s.n_out + column;
        if (column < s.n_out) out[at] = EPILOGUE == RESIDUAL ? residual[at] + y : y;
        if (column + 8 < s.n_out) out[at + 8] = EPILOGUE == RESIDUAL ? residual[at + 8] + y8 : y8;
#endif
      }
    }
  }
}

// Which CTAs share a tile, from the cut of the line of units. Only the last may go on with another tile: the others stay.
struct Sharers {
  int first, last, n_stay;
  bool is_second;  // the first sharer began with an earlier tile: its share lies in its second slot
};

__device__ __forceinline__ Sharers sharers(int tile, int n_chunk, i64 total, int grid) {
  const i64 start = static_cast<i64>(tile) * n_chunk, end = start + n_chunk;
  const int first = static_cast<int>(((start + 1) * grid - 1) / total);
  const int last = static_cast<int>((end * grid - 1) / total);
  return {first, last, last - first + (total * (last + 1) / grid <= end), total * first / grid < start};
}

// Shares carry their own message: a word is there once it is not kNothing, which whoever took it puts back.
constexpr u32 kNothing = 0xffffffffu;  // a NaN that no arithmetic makes

__device__ __forceinline__ uint4 load_relaxed(const uint4* from) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}

__device__ __forceinline__ void store_relaxed(uint4* to, uint4 v) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

__device__ __forceinline__ u32 word(float x) { return min(__float_as_uint(x), kNothing - 1); }

__device__ __forceinline__ bool is_there(uint4 v) {
  return v.x != kNothing && v.y != kNothing && v.z != kNothing && v.w != kNothing;
}

// Adds the shares of a cut tile in the order of its columns. The vectors of sums fall in turn to the CTAs that stay, warp by
// warp: each gives away the others' and waits for its own, so all that stay must be running: a CTA for each multiprocessor
// is no more than the GPU holds. Returns a bit for each vector that is this warp's to store.
__device__ __forceinline__ u32 gather(Accumulator& acc, uint4* partial, Sharers who, int cta, bool is_second) {
  constexpr int kVectors = TILES_M * TILES_N;
  constexpr int kSlot = 64 * kPad;                   // in vectors
  constexpr int kAtOnce = kVectors <= 8 ? 8 : 4;     // shares looked for together
  uint4* const own = partial + (2 * cta + is_second) * kSlot + threadIdx.x;
  u32 mine = 0;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const float(&v)[4] = acc.v[i / TILES_N][i % TILES_N];
    if (who.first + ((threadIdx.x >> 5) * kVectors + i) % who.n_stay == cta)
      mine |= 1u << i;
    else
      store_relaxed(own + i * kThreads, make_uint4(word(v[0]), word(v[1]), word(v[2]), word(v[3])));
  }
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (!(mine >> i & 1)) continue;
    float(&v)[4] = acc.v[i / TILES_N][i % TILES_N];
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
    for (int from = who.first; from <= who.last; from += kAtOnce) {
      uint4 share[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        share[j] = make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3]));
        if (from + j <= who.last && from + j != cta)
          share[j] = load_relaxed(partial + (2 * (from + j) + (from + j == who.first && who.is_second)) * kSlot +
                                  i * kThreads + threadIdx.x);
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (from + j > who.last) break;
        if (from + j != cta) {
          uint4* const at = partial + (2 * (from + j) + (from + j == who.first && who.is_second)) * kSlot +
                            i * kThreads + threadIdx.x;
          while (!is_there(share[j])) share[j] = load_relaxed(at);
          store_relaxed(at, make_uint4(kNothing, kNothing, kNothing, kNothing));
        }
        sum.x += __uint_as_float(share[j].x), sum.y += __uint_as_float(share[j].y);
        sum.z += __uint_as_float(share[j].z), sum.w += __uint_as_float(share[j].w);
      }
    }
    v[0] = sum.x, v[1] = sum.y, v[2] = sum.z, v[3] = sum.w;
  }
  return mine;
}
