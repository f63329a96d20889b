// moe.cu's inner loop where rows are whole numbers (prepared.cuh's units): Q4_K.
//
// Its bound is instructions and what they cost in power, not bytes. So codes are multiplied as they lie, four in a register, and scales,
// whole numbers too, multiply sums; all of it exactly. A row's 16 bits are two planes of signed bytes: a tile of 4 pairs fills an operand,
// whose columns 2 p and 2 p + 1 are the planes of pair p. Rows have a power for each 32 columns, or (INNER: the model's width) for 64:
// what those add up to at most, 64 * 15 * 63 * 32639, is below 2^31. Minima times sums of columns are a product of bf16: minima have
// six bits, and of sums two parts are taken, which are a pair's two columns once more.
//
// Records lie as lanes need them and no two warps share one: they go to registers, a chunk ahead of their products (asking for more of
// them in the second-level cache made all slower). Rows go to shared memory, PER_STAGE chunks at once, and so barriers are few.
#pragma once

constexpr int kUnits = CHUNK / 2;
constexpr int kOfRow = kUnits * kUnitBytes;          // a chunk of a pair's row
constexpr int kRowStride = PER_STAGE * kOfRow + 16;  // in shared memory: four pairs' powers lie in banks of their own
constexpr int kStage = kPad * kRowStride;
constexpr int kSide = 1;
static_assert(kOfRow == kChunkBytes && TILE_ROWS == 4 && kPad <= 32, "a lane has a pair");

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

struct Record {  // a lane's part of 16 rows by 256 columns
  uint4 q[kUnits];  // of two blocks each
  u32 scales[2];    // lane 8 b + g: blocks b and 4 + b of rows g and g + 8
  uint2 d;          // of rows g and g + 8
};

// `from`: the lane's first 16 bytes of the record.
__device__ __forceinline__ void fetch(Record& r, const u8* from) {
  const int lane = threadIdx.x & 31;
  const u8 *words = from - lane * 12, *halves = from - (lane * 16 - (lane >> 2) * 8);
#pragma unroll
  for (int i = 0; i < kUnits; ++i) r.q[i] = stream_16(from + i * 512);
#pragma unroll
  for (int i = 0; i < 2; ++i) r.scales[i] = stream_4(words + kScales + i * 128);
  r.d = stream_8(halves + kScales + CHUNK * 32);
}

// Where a lane's operands lie in a stage. For places past the `n` pairs the one behind them is read (clear_place).
struct Places {
  u32 right, powers, sums;  // of pair g / 2 a plane; of pair t; of pair g / 2 those of block t

  __device__ __forceinline__ explicit Places(int n) {
    const u32 lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const u32 pair = LISTED && TILES_N == 1 ? min(g / 2, static_cast<u32>(n)) : g / 2;
    right = anew(pair * kRowStride + g % 2 * 64 + t * 16);
    powers = anew(t * kRowStride + 136);
    sums = g / 2 * kRowStride + t / 2 * kUnitBytes + 128 + t % 2 * 4;
  }
};

__device__ __forceinline__ int byte_of(u32 word, int i) { return static_cast<int>(__byte_perm(word, 0, 0x4440 + i)); }

__device__ __forceinline__ u32 from_lane(u32 v, int lane) { return __shfl_sync(0xffffffffu, v, lane); }

template <int kN>  // tiles that have pairs
__device__ __forceinline__ void add_chunk(Acc& acc, const Record& r, const Places& at, u32 rows) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  constexpr u32 kLow = 0x0f0f0f0fu;
  float sums[kN][2] = {};
#pragma unroll
  for (int unit = 0; unit < kUnits; ++unit) {
    const uint4 q = r.q[unit];
    const u32 even[4] = {q.x & kLow, q.y & kLow, q.x >> 4 & kLow, q.y >> 4 & kLow};
    const u32 odd[4] = {q.z & kLow, q.w & kLow, q.z >> 4 & kLow, q.w >> 4 & kLow};
    const u32 word = from_lane(r.scales[unit / 2], unit % 2 * 16 + g), next = from_lane(r.scales[unit / 2], unit % 2 * 16 + 8 + g);
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const uint4 x = shared_16(rows + at.right + unit * kUnitBytes + n * (4 * kRowStride));
      const u32 powers = rows + at.powers + unit * kUnitBytes + n * (4 * kRowStride);
      int first[4], second[4];
      mma_u8_s8(first, even, make_uint2(x.x, x.y));
      mma_u8_s8(second, odd, make_uint2(x.z, x.w));
      int own = (first[0] * 256 + first[1]) * byte_of(word, 0), own8 = (first[2] * 256 + first[3]) * byte_of(word, 2);
      const int more = (second[0] * 256 + second[1]) * byte_of(next, 0), more8 = (second[2] * 256 + second[3]) * byte_of(next, 2);
#if INNER
      const float power = __uint_as_float(shared_4(powers));
      own += more, own8 += more8;
#else
      const uint2 both = shared_8(powers);
      const float power = __uint_as_float(both.x);
      sums[n][0] = fmaf(static_cast<float>(more), __uint_as_float(both.y), sums[n][0]);
      sums[n][1] = fmaf(static_cast<float>(more8), __uint_as_float(both.y), sums[n][1]);
#endif
      sums[n][0] = fmaf(static_cast<float>(own), power, sums[n][0]);
      sums[n][1] = fmaf(static_cast<float>(own8), power, sums[n][1]);
    }
  }
  u32 m[2];  // of blocks t and t + 4
  minima_of(m, from_lane(r.scales[0], t * 8 + g), from_lane(r.scales[1], t * 8 + g));
  const float d = low_half(r.d.x), d8 = low_half(r.d.y), by = -high_half(r.d.x), by8 = -high_half(r.d.y);
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    const u32 of = rows + at.sums + n * (4 * kRowStride);
    const float s0 = __uint_as_float(shared_4(of)), s1 = __uint_as_float(shared_4(of + 2 * kUnitBytes));
    const u32 upper = two_bf16(s0, s1), rest = two_bf16(s0 - low_bf16(upper), s1 - high_bf16(upper));
    float less[4];
    mma_bf16_k8(less, m[0], m[1], g % 2 ? rest : upper);
    acc[n][0] = fmaf(sums[n][0], d, fmaf(less[0] + less[1], by, acc[n][0]));
    acc[n][1] = fmaf(sums[n][1], d8, fmaf(less[2] + less[3], by8, acc[n][1]));
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
