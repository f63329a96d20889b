// What linear.cu and linear_sm90.cu share: sums of a stage in shared memory, shares of tiles, stores. See linear.cu.
#pragma once
#include "linear_block.cuh"
#include "ticket.cuh"

constexpr int kThreads = 32 * WARPS_M * WARPS_N;
constexpr int kTile = 16;  // 16-row tiles of a CTA
constexpr int kWeightBytes = kTile * RECORD;
constexpr int kWarps = WARPS_M * WARPS_N;
constexpr int kStageBytes = kWeightBytes + kRowBytes + kSumBytes;
constexpr int kAtOnce = TILES_N <= 3 ? TILES_N : TILES_N <= 8 ? 2 : 1;  // tiles whose residuals are under way
static_assert(WARPS_M * TILES_M == kTile, "a CTA owns 256 rows");
static_assert(TILES_N % kAtOnce == 0, "groups of tiles");

#ifndef PART_TILES
#define PART_TILES 0
#endif
// Of rows: what a tile's chunk is multiplied with. PART_TILES > 0: so many tiles have a part of the rows' columns of their own.
__device__ __forceinline__ int chunk_of_rows(int tile, int chunk, int n_chunk) {
  return PART_TILES > 0 ? tile / (PART_TILES > 0 ? PART_TILES : 1) * n_chunk + chunk : chunk;
}

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

// What a warp multiplies of one block: its part of the weights and of the rows.
struct Left {
  Codes codes[TILES_M];
};

// Past the rows of a last, lower tile lies anything: it is multiplied and not stored.
__device__ __forceinline__ void fetch(Left& left, u32 stage, int block) {
  const int lane = threadIdx.x & 31, tile = (threadIdx.x >> 5) / WARPS_N * TILES_M;
#pragma unroll
  for (int m = 0; m < TILES_M; ++m) fetch(left.codes[m], stage + (tile + m) * RECORD, block, lane);
}

__device__ __forceinline__ void fetch(Right& right, u32 stage, int block) {
  const int column = (threadIdx.x >> 5) % WARPS_N * TILES_N;
  const u32 rows = stage + kWeightBytes + block * (kPad * 64) + column * 512;
  fetch(right, rows, stage + kWeightBytes + kRowBytes + block * (kPad * 4) + column * 32);
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

// Which of a thread's sums go where: rows of x and columns of out.
struct Place {
  int row, column;  // of tile n: rows row + 8 n and the next; of tile m: 16-row tile column + m
  int g;

  __device__ __forceinline__ explicit Place(int tile) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    row = (warp % WARPS_N) * TILES_N * 8 + (lane & 3) * 2;
    column = tile * kTile + (warp / WARPS_N) * TILES_M;
    g = lane >> 2;
  }
};

// What a tile's sums meet on their way out. Loads are apart from stores, because the compiler may not move a load over a
// store that may be to its place: one trip to memory instead of one for each row.
struct Beside {
  float power[kAtOnce][2];
  float old[kAtOnce][2][TILES_M][2];

  __device__ __forceinline__ void load(Shape s, Place at, int n0, const float* powers, const float* residual) {
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int row = at.row + (n0 + n) * 8 + j;
        const bool is_row = row < s.n_row;
        power[n][j] = is_row ? powers[row] : 0.f;
        if (EPILOGUE != RESIDUAL) continue;
#pragma unroll
        for (int m = 0; m < TILES_M; ++m) {
          const int column = (at.column + m) * 16 + at.g;
          const float* from = residual + static_cast<i64>(row) * s.n_out + column;
          old[n][j][m][0] = is_row && column < s.n_out ? from[0] : 0.f;
          old[n][j][m][1] = is_row && column + 8 < s.n_out ? from[8] : 0.f;
        }
      }
  }
};

__device__ __forceinline__ void store(const Accumulator& acc, Shape s, Place at, const u8* weights, const float* powers,
                                      const float* residual, float* out, Beside& beside) {
  float scale[TILES_M], scale8[TILES_M];
#pragma unroll
  for (int m = 0; m < TILES_M; ++m) {
    scale[m] = scale8[m] = kUnit;
#if ROW_SCALES
    const float* row_scales = reinterpret_cast<const float*>(weights + static_cast<i64>(s.n_tile16) * s.n_chunk * RECORD);
    scale[m] *= row_scales[(at.column + m) * 16 + at.g];
    scale8[m] *= row_scales[(at.column + m) * 16 + at.g + 8];
#endif
  }
#pragma unroll
  for (int n = 0; n < TILES_N; ++n) {
    if (n > 0 && n % kAtOnce == 0) beside.load(s, at, n, powers, residual);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int row = at.row + n * 8 + j;
      if (row >= s.n_row) continue;
      const float power = beside.power[n % kAtOnce][j];
#pragma unroll
      for (int m = 0; m < TILES_M; ++m) {
        const float y = acc.v[m][n][j] * scale[m] * power, y8 = acc.v[m][n][j + 2] * scale8[m] * power;
#if EPILOGUE == GATED
        const int column = (at.column + m) * 8 + at.g;
        if (column < s.n_out) put(out, powers_of(residual), s.n_out, row, column, silu(cut_gate(y)) * cut_up(y8));
#else
        const int column = (at.column + m) * 16 + at.g;
        const float(&old)[2] = beside.old[n % kAtOnce][j][m];
        float* const by = powers_of(residual);
        if (column < s.n_out) put(out, by, s.n_out, row, column, EPILOGUE == RESIDUAL ? old[0] + y : y);
        if (column + 8 < s.n_out) put(out, by, s.n_out, row, column + 8, EPILOGUE == RESIDUAL ? old[1] + y8 : y8);
#endif
      }
    }
  }
}

// Which CTAs share a tile, from the cut of the line of units.
struct Sharers {
  int first, last;
  bool is_second;  // the first sharer began with an earlier tile: its share lies in its second slot
};

__device__ __forceinline__ Sharers sharers(int tile, int n_chunk, i64 total, int grid) {
  const i64 start = static_cast<i64>(tile) * n_chunk;
  const int first = static_cast<int>(((start + 1) * grid - 1) / total);
  return {first, static_cast<int>(((start + n_chunk) * grid - 1) / total), total * first / grid < start};
}

constexpr int kVectors = TILES_M * TILES_N;
constexpr int kSlot = 64 * kPad;  // a share, in vectors

// Hands in a share of a cut tile; true for the last to arrive. Each warp has a ticket of its own and waits for no other: a
// CTA's warps cover different rows or tokens.
__device__ __forceinline__ bool comes_last(const Accumulator& acc, float4* shares, int* tickets, Sharers who, int slot) {
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const float(&v)[4] = acc.v[i / TILES_N][i % TILES_N];
    __stcg(shares + slot * kSlot + i * kThreads, make_float4(v[0], v[1], v[2], v[3]));
  }
  __syncwarp();
  int n_before = 0;
  if ((threadIdx.x & 31) == 0) {
    int* ticket = tickets + (threadIdx.x >> 5);
    n_before = arrive(ticket);
    if (n_before == who.last - who.first) *ticket = 0;
  }
  return __shfl_sync(0xffffffffu, n_before, 0) == who.last - who.first;
}

// Adds the shares of a cut tile in the order of its columns.
__device__ __forceinline__ void add_shares(Accumulator& acc, const float4* shares, Sharers who) {
  // under way at once: what registers allow
  constexpr int kShares = kVectors <= 2 ? 8 : kVectors <= 6 ? 3 : kVectors <= 8 && __CUDA_ARCH__ < 1200 ? 2 : 1;
  clear(acc);
#pragma unroll 1
  for (int first = who.first; first <= who.last; first += kShares) {
    float4 v[kShares][kVectors];
#pragma unroll
    for (int k = 0; k < kShares; ++k) {
      const int cta = min(first + k, who.last);
      const float4* share = shares + (2 * cta + (cta == who.first && who.is_second)) * kSlot;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) v[k][i] = __ldcg(share + i * kThreads);
    }
#pragma unroll
    for (int k = 0; k < kShares; ++k)
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        float(&sum)[4] = acc.v[i / TILES_N][i % TILES_N];
        if (first + k <= who.last) sum[0] += v[k][i].x, sum[1] += v[k][i].y, sum[2] += v[k][i].z, sum[3] += v[k][i].w;
      }
  }
}

// A CTA's sums of a tile, or of its share of one, are complete.
__device__ __forceinline__ void finish(Accumulator& acc, Shape s, int tile, Sharers who, int slot, const u8* weights,
                                       const float* powers, const float* residual, float* out, float* partial,
                                       int* tickets) {
  float4* shares = reinterpret_cast<float4*>(partial) + threadIdx.x;
  const bool is_cut = who.first != who.last;
  if (is_cut && !comes_last(acc, shares, tickets + tile * kWarps, who, slot)) return;
  const Place at(tile);
  Beside beside;
  if (kVectors <= 2) beside.load(s, at, 0, powers, residual);  // with more, registers are short
  if (is_cut) add_shares(acc, shares, who);
  if (kVectors > 2) beside.load(s, at, 0, powers, residual);
  store(acc, s, at, weights, powers, residual, out, beside);
}
