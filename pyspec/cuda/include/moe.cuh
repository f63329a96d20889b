// What moe.cu and moe_few.cu share: copies of a stage, sums of it, and activations on their way to the next launch. Both give a
// row the same bits. See moe.cu.
#pragma once
#include "linear.cuh"
#include "overlap.cuh"
#include "prepared.cuh"

#define NONE 0
#define SWIGLU 1  // rows 0-7 of each 16 are gates, 8-15 the ups of the same features
#define RELU2 2

constexpr int kCta = kThreads * SPLIT;          // threads
constexpr int kPieces = WARPS_M * RECORD / 16;  // of 16 bytes: a chunk's weights
constexpr int kWeights = PER_STAGE * kPieces * 16;
constexpr int kHeld = CHUNK * HOLD * 64, kHeldSums = HAS_MIN ? CHUNK * HOLD * 4 : 0;  // rows of a chunk, and their sums
constexpr int kPowerBytes = INNER ? 0 : CHUNK * HOLD * 4;
constexpr int kSums = kWeights + PER_STAGE * kHeld, kPowers = kSums + PER_STAGE * kHeldSums;  // where a stage has them
constexpr int kStage = kPowers + PER_STAGE * kPowerBytes;
constexpr int kDeal = CHUNK > SPLIT ? CHUNK : SPLIT;  // blocks that a group's warps share out evenly, part by part
constexpr int kOwn = kDeal / SPLIT;
static_assert(kDeal % SPLIT == 0 && PER_STAGE * CHUNK % kDeal == 0, "stages have whole turns");
static_assert(kCta % (4 * HOLD) == 0, "a thread copies for one pair alone");
constexpr int kColumns = WARPS_M * (ACT == SWIGLU ? 8 : 16);  // of the activation, a CTA's
static_assert(!INNER || kColumns % 32 == 0, "a CTA has whole blocks of the activation");

__device__ __forceinline__ void copy4(u32 to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

// What a thread copies of each stage's weights, stage by stage. Where a tile has fewer groups than the CTA, the last one's
// pieces come again.
struct WeightCopies {
  const u8* from;  // the stage's first record
  u32 step;        // bytes to the next stage's
  u32 at[(PER_STAGE * kPieces + kCta - 1) / kCta];

  WeightCopies() = default;

  __device__ __forceinline__ WeightCopies(const u8* expert, int column, int n_group, int n_tile16, int n_chunk) {
    const int first = column * WARPS_M, tile = first / kTile, lower = min(kTile, n_tile16 - tile * kTile);
    from = expert + (static_cast<i64>(tile) * kTile * n_chunk + first % kTile) * RECORD;
    step = PER_STAGE * RECORD * lower;
#pragma unroll
    for (int k = 0; k < sizeof(at) / 4; ++k) {
      const int i = k * kCta + threadIdx.x, chunk = i / kPieces, piece = min(i % kPieces, n_group * (RECORD / 16) - 1);
      at[k] = chunk * lower * RECORD + piece * 16;
    }
  }

  __device__ __forceinline__ void load(u32 to, int n_left) {
    const int n = min(n_left, PER_STAGE) * kPieces - static_cast<int>(threadIdx.x);
#pragma unroll
    for (int k = 0; k < sizeof(at) / 4; ++k)
      if (k * kCta < n) copy16(to + threadIdx.x * 16 + k * (kCta * 16), from + at[k]);
    from += step;
  }
};

// The same of the pair it copies for; none for places past the item's pairs, whose sums are not stored.
struct RowCopies {
  const u8* x;  // 16 bytes of the pair's row in the thread's first block
  const float *sums, *powers;
  i64 step;  // blocks from one to the next
  bool is_pair;

  __device__ __forceinline__ void load(u32 stage, int n_left) {
    constexpr int kStep = kCta / (4 * HOLD);
    const int n = is_pair ? min(n_left, PER_STAGE) * CHUNK - static_cast<int>(threadIdx.x / (4 * HOLD)) : 0;
#pragma unroll
    for (int k = 0; k < (PER_STAGE * CHUNK + kStep - 1) / kStep; ++k) {
      if (k * kStep >= n) break;
      copy16(stage + kWeights + (k * kCta + threadIdx.x) * 16, x + k * kStep * step * 64);
      const u32 at = k * kCta + threadIdx.x;  // four times the block's place
      if (HAS_MIN && threadIdx.x % 4 == 0) copy4(stage + kSums + at, sums + k * kStep * step);
      if (!INNER && threadIdx.x % 4 == 1) copy4(stage + kPowers + at - 1, powers + k * kStep * step);
    }
    x += PER_STAGE * CHUNK * step * 64;
    sums += PER_STAGE * CHUNK * step;
    powers += PER_STAGE * CHUNK * step;
  }
};

// Of the first n_chunk chunks.
__device__ __forceinline__ int own_blocks(int n_chunk, int part) {
  const int n_block = n_chunk * CHUNK, rest = n_block % kDeal - part * kOwn;
  return n_block / kDeal * kOwn + min(max(rest, 0), kOwn);
}

__device__ __forceinline__ void add_stage(float (&acc)[TILES_N][4], u32 stage, int group, int part, int n_left) {
  constexpr int kLanes = HOLD < 8 ? 4 * HOLD : 32, kTwos = HOLD < 8 ? HOLD / 2 : 4;  // what others read is not stored
  const int lane = threadIdx.x & 31;
  auto add = [&](int i) {
    const int at = i / kOwn * kDeal + part * kOwn + i % kOwn;
    Weights w;
    unpack(w, stage + at / CHUNK * (kPieces * 16) + group * RECORD, at % CHUNK, lane);
    const u32 right = stage + kWeights + at * (HOLD * 64) + lane % kLanes * 16;
    const u32 mins = stage + kSums + at * (HOLD * 4) + lane % 4 % kTwos * 8;
    const u32 powers = stage + kPowers + at * (HOLD * 4) + lane % 4 % kTwos * 8;
#pragma unroll
    for (int n = 0; n < TILES_N; ++n) {
      uint2 s = make_uint2(0, 0);
      if (HAS_MIN) s = shared_8(mins + n * 32);
#if INNER
      multiply(acc[n], w, shared_16(right + n * 512), __uint_as_float(s.x), __uint_as_float(s.y));
#else
      float block[4] = {};
      multiply(block, w, shared_16(right + n * 512), __uint_as_float(s.x), __uint_as_float(s.y));
      const uint2 by = shared_8(powers + n * 32);
      acc[n][0] = fmaf(block[0], __uint_as_float(by.x), acc[n][0]);
      acc[n][1] = fmaf(block[1], __uint_as_float(by.y), acc[n][1]);
      acc[n][2] = fmaf(block[2], __uint_as_float(by.x), acc[n][2]);
      acc[n][3] = fmaf(block[3], __uint_as_float(by.y), acc[n][3]);
#endif
    }
  };
  if (n_left >= PER_STAGE) {
#pragma unroll (TILES_N == 1 ? 4 : 2)
    for (int i = 0; i < PER_STAGE * CHUNK / SPLIT; ++i) add(i);
  } else {
    const int n = own_blocks(n_left, part);
#pragma unroll 1
    for (int i = 0; i < n; ++i) add(i);
  }
}

// Adds what the warps of a group summed, in the order of their parts; the sums are the first's.
__device__ __forceinline__ void add_parts(float (&acc)[TILES_N][4], float4* shared, int part) {
  float4* own = shared + threadIdx.x % kThreads;
#pragma unroll
  for (int n = 0; n < TILES_N; ++n)
    if (part > 0) own[((part - 1) * TILES_N + n) * kThreads] = make_float4(acc[n][0], acc[n][1], acc[n][2], acc[n][3]);
  __syncthreads();
  if (part > 0) return;
#pragma unroll
  for (int i = 0; i < (SPLIT - 1) * TILES_N; ++i) {
    const float4 v = own[i * kThreads];
    float(&sum)[4] = acc[i % TILES_N];
    sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
  }
}

__device__ __forceinline__ int expert_of(int id, int n_expert) { return min(max(id, 0), n_expert - 1); }

// What warps of part 0 summed, activated, to shared memory; then into blocks, a power of two each. No target, -1: not stored.
template <class PowerOf>
__device__ __forceinline__ void store_blocks(const float (&acc)[TILES_N][4], float* h, PowerOf power, const int* target,
                                             float scale, float scale8, int group, int cta_column, bool has_sums, int n_out,
                                             u16* blocks, float* block_sums, float* block_powers) {
  const int lane = threadIdx.x & 31, row16 = lane >> 2;
#pragma unroll
  for (int tile = 0; tile < TILES_N; ++tile) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int token = tile * 8 + (lane & 3) * 2 + j;
      if (!has_sums || token >= HOLD) continue;
      const float by = power(token), y = acc[tile][j] * scale * by, y8 = acc[tile][j + 2] * scale8 * by;
      float* to = h + token * (kColumns + 4) + row16;
      const float r = fmaxf(y, 0.f), r8 = fmaxf(y8, 0.f);
      if (ACT == SWIGLU) to[group * 8] = silu(y) * y8;
      if (ACT == RELU2) to[group * 16] = r * r, to[group * 16 + 8] = r8 * r8;
    }
  }
  __syncthreads();
  constexpr int kQuads = kColumns / 4;
  const int step = (n_out + 255) / 256 * 8;
#pragma unroll
  for (int i = threadIdx.x; i < HOLD * kQuads; i += kCta) {
    const int token = i / kQuads, column = cta_column * kColumns + i % kQuads * 4;
    const float4 v = *reinterpret_cast<const float4*>(h + token * (kColumns + 4) + i % kQuads * 4);
    float largest = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
#pragma unroll
    for (int hop = 4; hop > 0; hop >>= 1) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, hop));
    const Power own = power_of(largest);
    const bool is_in = target[token] >= 0 && column < n_out;
    put_in_block(blocks, block_sums, 1, target[token] * step, column, halves_of(v, own.factor), is_in);
    if (is_in && column % 32 == 0) block_powers[static_cast<i64>(target[token]) * step + column / 32] = own.power;
  }
}
