// moe.cu's inner loop where rows are whole numbers (prepared.cuh's units): types of expert_codes.cuh.
//
// Its bound is instructions and what they cost in power, not bytes. So codes are multiplied as bytes, four in a register, and scales,
// whole numbers too, multiply sums or the codes; all of it exactly. A row's 16 bits are two planes of signed bytes: a tile of 4 pairs fills
// an operand, whose columns 2 p and 2 p + 1 are the planes of pair p. Rows have a power for each 32 columns, or (INNER: the model's width)
// for 64.
//
// PARTS 2: columns are summed in two parts, one after the other, or (SPLIT 2) side by side by two groups of warps: with few rows there is
// little to do at once, and it is by more warps that loads and sums hide each other.
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

// A thread's sums of one part, until the other's are there. rest: [2 * kTiles][kThreads], of warps that have the same rows the same place.
__device__ __forceinline__ void keep(const Acc& acc, float* rest) {
#pragma unroll
  for (int i = 0; i < 2 * kTiles; ++i) rest[i * kThreads + threadIdx.x % kThreads] = acc[i / 2][i % 2];
}

__device__ __forceinline__ void add_kept(Acc& acc, const float* rest) {
#pragma unroll
  for (int i = 0; i < 2 * kTiles; ++i) acc[i / 2][i % 2] += rest[i * kThreads + threadIdx.x % kThreads];
}

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

#define KEEPS (SPLIT == 1 && (RESIDENT < 6 || !HAS_MIN))
#include "expert_codes.cuh"

// Where a lane's operands lie in a stage. For places past the `n` pairs the one behind them is read (clear_place).
struct Places {
  u32 right, powers, sums;  // of pair g / 2 a plane; of pair t; of pair g / 2 those of block t (halved: of a plane), behind it t + 4
  int g;
  u32 levels;  // whose fourth, which no code names, is the lane's: what all have in common would be moved to where it is read, each time

  __device__ __forceinline__ explicit Places(int n) {
    const u32 lane = threadIdx.x & 31, t = lane & 3;
    g = kept(lane >> 2);
    levels = kLevels | lane << 24;
    const u32 pair = LISTED && TILES_N == 1 ? min(lane / 8, static_cast<u32>(n)) : lane / 8;
    right = anew(pair * kRowStride + lane / 4 % 2 * 64 + t * 16);
    powers = anew(t * kRowStride + (HALF_MINIMA ? 144 : 136));
    sums = kept(lane / 8 * kRowStride + t / 2 * kOwnUnit + 128 + t % 2 * 4 + (HALF_MINIMA ? lane / 4 % 2 * 8 : 0));
  }
};

template <int kN>  // tiles that have pairs
__device__ __forceinline__ void add_chunk(Acc& acc, const Record& r, const Places& at, u32 rows) {
  float sums[kN][2] = {};
#pragma unroll
  for (int unit = 0; unit < kUnits; ++unit) {
    const Operands w(r, unit, at.g, at.levels);
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

// Chunks of the first part: whole stages.
__device__ __forceinline__ int first_part(int n_chunk) { return min(n_chunk, (n_chunk + 7) / 8 * 4); }

// An item's products. Where a tile has fewer groups than the CTA, the last warps do what the last group's does, and do not store it.
class Line {
  const u8* weights;        // the lane's part of the warp's record
  const u8* row;            // of the lane's pair, or (up to 4 pairs) of the one that the warp copies
  int step;                 // from a record to the next chunk's
  int n_chunk, begin, n_own, n_row_left;  // all; the first and how many of this warp's; of rows, not yet on their way
  int warp, part;
  u32 stages;
  Offsets offsets;
  Record record;

 public:
  __device__ __forceinline__ Line(u32 stages, Records own, int n_group, int n_chunk)
      : step(own.step), n_chunk(n_chunk), begin(0), n_own(n_chunk), part(0), stages(stages) {
    warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x >> 5), 0);  // as one number for all lanes
#if SPLIT > 1
    part = warp / WARPS_M, warp %= WARPS_M;
    const int n_first = first_part(n_chunk);
    begin = part ? n_first : 0, n_own = part ? n_chunk - n_first : n_first;
    this->stages += part * (STAGES * kStage);
#endif
    n_row_left = n_own;
    weights = own.first + min(warp, n_group - 1) * RECORD + threadIdx.x % 32 * 16 + begin * static_cast<i64>(step);
  }

  __device__ __forceinline__ void load_early() {
    if (SPLIT == 1 || n_own > 0) fetch<(__CUDA_ARCH__ >= 900)>(record, weights, offsets);
  }

  // Of the first stages, with a row for the thread's pair.
  __device__ __forceinline__ void load_first(const u8* x, const float*, const float*, int at, int, int, int n) {
    row = x + at * (static_cast<i64>(n_chunk) * kOfRow) + begin * kOfRow;
    if (kPad <= 4) row = row_of(warp);
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) load_rows(i, n);
  }

  __device__ __forceinline__ void multiply(Acc& acc, int n, float* rest) {
    if (kTiles == 1 || n > 4 * 6) {
      multiply_tiles<kTiles>(acc, n, rest);
    } else if (n > 4 * 4) {
      multiply_tiles<kTiles < 6 ? kTiles : 6>(acc, n, rest);
    } else {
      multiply_tiles<kTiles < 4 ? kTiles : 4>(acc, n, rest);
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

  __device__ __forceinline__ void sync_part() const {
#if SPLIT > 1
    asm volatile("bar.sync %0, %1;" ::"r"(part + 1), "n"(kThreads) : "memory");
#else
    __syncthreads();
#endif
  }

  __device__ __forceinline__ const u8* row_of(int pair) const {
    return reinterpret_cast<const u8*>(__shfl_sync(0xffffffffu, reinterpret_cast<u64>(row), pair));
  }

  template <int kN>
  __device__ __forceinline__ void multiply_tiles(Acc& acc, int n, float* rest) {
    const Places at(n);
    Record other;
    Turn turn = {stages, 0};
    u32 chunk = 0, end = PARTS > SPLIT ? first_part(n_chunk) : n_own;
#pragma unroll 1
    for (int i = SPLIT; i <= PARTS; ++i, end = n_own) {  // parts begin with a stage
#pragma unroll 1
      for (; chunk < end; chunk += 2) {
        multiply_chunk<kN, false>(acc, record, other, at, turn, chunk, n);
        if (chunk + 1 < end) multiply_chunk<kN, true>(acc, other, record, at, turn, chunk + 1, n);
      }
      if (i == PARTS) break;
      keep(acc, rest);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) acc[tile][0] = acc[tile][1] = 0.f;
    }
    if (PARTS > SPLIT) add_kept(acc, rest);
  }

  struct Turn {
    u32 rows;   // of the chunk to come
    int stage;  // the next one
  };

  template <int kN, bool kIsOdd>
  __device__ __forceinline__ void multiply_chunk(Acc& acc, const Record& own, Record& next, const Places& at, Turn& turn, u32 chunk, int n) {
    weights += step;
    if (chunk + 1 < static_cast<u32>(n_own)) fetch<false>(next, weights, offsets);
    if (PER_STAGE == 1 || (!kIsOdd && chunk % PER_STAGE == 0)) {
      copies_wait<STAGES - 2>();
      sync_part();
      turn.rows = stages + turn.stage * kStage;
      load_rows((turn.stage + STAGES - 1) % STAGES, n);
      turn.stage = turn.stage + 1 == STAGES ? 0 : turn.stage + 1;
    }
    add_chunk<kN>(acc, own, at, turn.rows);
    turn.rows += kOfRow;
  }
};
