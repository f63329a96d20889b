// moe.cu's inner loop where rows are whole numbers (prepared.cuh's units): types of expert_codes.cuh.
//
// Its bound is instructions and what they cost in power, not bytes. So codes are multiplied as bytes, four in a register, and scales,
// whole numbers too, multiply sums or the codes; all of it exactly. A row's 16 bits are two planes of signed bytes: a tile of 4 pairs fills
// an operand, whose columns 2 p and 2 p + 1 are the planes of pair p. Rows have a power for each 32 columns, or (INNER: the model's width)
// for 64.
//
// Records lie as lanes need them and no two warps share one: they go to registers, a chunk ahead of their products (asking for more of
// them in the second-level cache made all slower). Rows go to shared memory, PER_STAGE chunks at once, and so barriers are few.
#pragma once

constexpr int kUnits = CHUNK / 2;
constexpr int kOwnUnit = PLANES == 2 ? kHalvedUnitBytes : kUnitBytes;
constexpr int kOfRow = kUnits * kOwnUnit;            // a chunk of a pair's row
constexpr int kRowStride = PER_STAGE * kOfRow + 16;  // in shared memory: four pairs' powers lie in banks of their own
constexpr int kStage = kPad * kRowStride;
constexpr int kSide = 1;
static_assert(CHUNK == 8 && TILE_ROWS == 4 && (PLANES == 2) == HALF_MINIMA && kPad <= 32, "a lane has a pair");

constexpr int kTiles = TILES_N;
using Acc = float[kTiles][2];  // a lane's sums of rows g and g + 8, of pair t of each 4

// f(pair, its sum of row g, of row g + 8)
template <typename F>
__device__ __forceinline__ void each_pair(const Acc& acc, F f) {
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) f(tile * 4 + (threadIdx.x & 3), acc[tile][0], acc[tile][1]);
}

// Zeros in all stages' place of pair n, where no copy goes: most experts have a pair or two, and zeros are the numbers that tensor cores
// spend the least power on.
__device__ __forceinline__ void clear_place(uint4* stages, int n) {
  if (!LISTED || TILES_N > 1 || n >= kPad) return;
#pragma unroll 1
  for (int i = threadIdx.x; i < STAGES * kRowStride / 16; i += kThreads)
    stages[(i / (kRowStride / 16) * kStage + n * kRowStride) / 16 + i % (kRowStride / 16)] = make_uint4(0, 0, 0, 0);
}

#include "expert_codes.cuh"

// Where a lane's operands lie in a stage. For places past the `n` pairs the one behind them is read (clear_place).
struct Places {
  u32 right, powers, sums;  // of pair g / 2 a plane; of pair t; of pair g / 2 those of block t, behind it t + 4

  __device__ __forceinline__ explicit Places(int n) {
    const u32 lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const u32 pair = LISTED && TILES_N == 1 ? min(g / 2, static_cast<u32>(n)) : g / 2;
    right = anew(pair * kRowStride + g % 2 * 64 + t * 16);
    powers = anew(t * kRowStride + (HALF_MINIMA ? 144 : 136));
    sums = g / 2 * kRowStride + t / 2 * kOwnUnit + 128 + t % 2 * (HALF_MINIMA ? 8 : 4);
  }
};

template <int kN>  // tiles that have pairs
__device__ __forceinline__ void add_chunk(Acc& acc, const Record& r, const Places& at, u32 rows) {
  const u32 table[2] = {anew(0x002b1908u), anew(0x00d5e7f8u)};
  float sums[kN][2] = {};
#pragma unroll
  for (int unit = 0; unit < kUnits; ++unit) {
    const Operands w(r, unit, table);
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const uint4 x = shared_16(rows + at.right + unit * kOwnUnit + n * (4 * kRowStride));
      const u32 powers = rows + at.powers + unit * kOwnUnit + n * (4 * kRowStride);
      const Whole both[2] = {w.times<0>(make_uint2(x.x, x.y)), w.times<1>(make_uint2(x.z, x.w))};
#if INNER
      const float power = __uint_as_float(shared_4(powers));
      const Whole all = both[0] + both[1];
      all.add_to(sums[n], power);
#else
      const uint2 own = shared_8(powers);
      both[0].add_to(sums[n], __uint_as_float(own.x));
      both[1].add_to(sums[n], __uint_as_float(own.y));
#endif
    }
  }
  const RowFactors f(r);
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    f.add_to(acc[n], sums[n], rows + at.sums + n * (4 * kRowStride));
  }
}

// An item's products. Where a tile has fewer groups than the CTA, the last warps do what the last group's does, and do not store it.
class Line {
  const u8* weights;        // the lane's part of the warp's record
  const u8* row;            // of the lane's pair, or (up to 4 pairs) of the one that the warp copies
  int step;                 // from a record to the next chunk's
  int n_chunk, n_row_left;  // all; of rows, not yet on their way
  int warp;
  u32 stages;
  Record record;

 public:
  __device__ __forceinline__ Line(u32 stages, Records own, int n_group, int n_chunk)
      : step(own.step), n_chunk(n_chunk), n_row_left(n_chunk), stages(stages) {
    warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x >> 5), 0);  // as one number for all lanes
    weights = own.first + min(warp, n_group - 1) * RECORD + threadIdx.x % 32 * 16;
  }

  __device__ __forceinline__ void load_early() { fetch(record, weights); }

  // Of the first stages, with a row for the thread's pair.
  __device__ __forceinline__ void load_first(const u8* x, const float*, const float*, int at, int, int, int n) {
    row = x + at * (static_cast<i64>(n_chunk) * kOfRow);
    if (kPad <= 4) row = row_of(warp);
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) load_rows(i, n);
  }

  __device__ __forceinline__ void multiply(Acc& acc, int n) {
    if (kTiles == 1 || n > 4 * 6) {
      multiply_tiles<kTiles>(acc, n);
    } else if (n > 4 * 4) {
      multiply_tiles<kTiles < 6 ? kTiles : 6>(acc, n);
    } else {
      multiply_tiles<kTiles < 4 ? kTiles : 4>(acc, n);
    }
  }

 private:
  // Pair by pair, by a warp each.
  __device__ __forceinline__ void load_rows(int stage, int n) {
    constexpr int kMost = PER_STAGE * kOfRow / 16;
    const int lane = threadIdx.x & 31, n_piece = min(n_row_left, PER_STAGE) * (kOfRow / 16);
#pragma unroll 1
    for (int pair = warp; pair < n; pair += kThreads / 32) {
      const u8* from = (kPad > 4 ? row_of(pair) : row) + lane * 16;
      const u32 to = stages + stage * kStage + pair * kRowStride + lane * 16;
#pragma unroll
      for (int i = 0; i < kMost; i += 32)
        if (i + lane < n_piece) copy16(to + i * 16, from + i * 16);
    }
    copies_commit();
    row += PER_STAGE * kOfRow;
    n_row_left -= PER_STAGE;
  }

  __device__ __forceinline__ const u8* row_of(int pair) const {
    return reinterpret_cast<const u8*>(__shfl_sync(0xffffffffu, reinterpret_cast<u64>(row), pair));
  }

  template <int kN>
  __device__ __forceinline__ void multiply_tiles(Acc& acc, int n) {
    const Places at(n);
    Record other;
    for (int chunk = 0; chunk < n_chunk; chunk += 2) {
      multiply_chunk<kN>(acc, record, other, at, chunk, n);
      if (chunk + 1 < n_chunk) multiply_chunk<kN>(acc, other, record, at, chunk + 1, n);
    }
  }

  template <int kN>
  __device__ __forceinline__ void multiply_chunk(Acc& acc, const Record& own, Record& next, const Places& at, int chunk, int n) {
    const int stage = chunk / PER_STAGE % STAGES, of_stage = chunk % PER_STAGE;
    weights += step;
    if (chunk + 1 < n_chunk) fetch(next, weights);
    if (of_stage == 0) {
      copies_wait<STAGES - 2>();
      __syncthreads();
      load_rows((stage + STAGES - 1) % STAGES, n);
    }
    add_chunk<kN>(acc, own, at, stages + stage * kStage + of_stage * kOfRow);
  }
};
