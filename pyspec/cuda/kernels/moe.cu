// moe: products of rows with the experts that took them. One launch for all gates and ups, one for all downs.
//
//   weights  [expert][tile][chunk][16 rows][record]  u8   each expert as linear_pack.py packs a matrix
//   scales   [expert][n_scale]   f32  second scales of weight rows (ROW_SCALES)
//   x        [block][pad][32]    f16  rows.cu: rows over a power of two, blocks of 32 columns
//   sums     [block][pad]        f32  (HAS_MIN)
//   powers   [pad]               f32
//   order    [pair]              i32  pairs by expert, pair = row * n_used + choice (moe_lists)
//   items    [gridDim.y]         i32 x 4  {expert, first place in `order`, pairs, 0}
//   out      f32                 INNER: [place, n_out], of the activation; else [pair, n_out]
//
// INNER reads row order[place] / n_used of x, else row `place`: what the first launch wrote. Grid (64 weight rows, item);
// a CTA has SPLIT warps for each 16 weight rows: warp k of them multiplies the k-th part of every chunk's blocks (of
// several chunks' where one has too few) with the item's up to 8 TILES_N pairs, and the parts' sums are added in order.
// That order is the same for all TILES_N, STAGES and PER_STAGE, and so a row's bits depend neither on its place nor on its
// neighbours.
//
// Memory-bound: bytes of the experts in use, once for every 8 TILES_N rows that took one. With few rows a CTA's work is
// short and latency is what there is to hide: weights need the item alone, so their first stages come before it is known
// which rows they meet, and what the stores need is fetched before the sums are made.
//
// Set by the launcher: TYPE, CHUNK, RECORD, TILES_N, SPLIT, PER_STAGE (chunks in a stage), STAGES, RESIDENT (CTAs on a
// multiprocessor that registers must allow), INNER, ACT, and for linear.cuh WARPS_M 4, WARPS_N 1, TILES_M 4, EPILOGUE 0.
#include "linear.cuh"
#include "overlap.cuh"

#define NONE 0
#define SWIGLU 1  // rows 0-7 of each 16 are gates, 8-15 the ups of the same features
#define RELU2 2

constexpr int kCta = kThreads * SPLIT;          // threads
constexpr int kPieces = WARPS_M * RECORD / 16;  // of 16 bytes: a chunk's weights
constexpr int kWeights = PER_STAGE * kPieces * 16;
constexpr int kStage = kWeights + PER_STAGE * (kRowBytes + kSumBytes);
constexpr int kTurn = CHUNK > SPLIT ? CHUNK : SPLIT;  // blocks that a group's warps share out evenly, part by part
constexpr int kOwn = kTurn / SPLIT;
constexpr int kEarly = STAGES - 1 < 2 ? STAGES - 1 : 2;  // stages whose weights come before their rows are known
static_assert(kTurn % SPLIT == 0 && PER_STAGE * CHUNK % kTurn == 0, "stages have whole turns");
static_assert(kCta % (4 * kPad) == 0, "a thread copies for one pair alone");
static_assert((SPLIT - 1) * kThreads * TILES_N * 16 <= STAGES * kStage, "sums meet where stages were");

__device__ __forceinline__ void copy4(u32 to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

// What a thread copies of each stage's weights, stage by stage. Where a tile has fewer groups than the CTA, the last one's
// pieces come again.
struct WeightCopies {
  const u8* from;  // the stage's first record
  i64 step;        // bytes to the next stage's
  u32 at[(PER_STAGE * kPieces + kCta - 1) / kCta];

  __device__ __forceinline__ WeightCopies(const u8* expert, int n_group, int n_tile16, int n_chunk) {
    const int first = blockIdx.x * WARPS_M, tile = first / kTile, lower = min(kTile, n_tile16 - tile * kTile);
    from = expert + (static_cast<i64>(tile) * kTile * n_chunk + first % kTile) * RECORD;
    step = static_cast<i64>(PER_STAGE * RECORD) * lower;
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
  const u8* x;        // 16 bytes of the pair's row in the thread's first block
  const float* sums;  // the same block's
  int pad;
  bool is_pair;

  __device__ __forceinline__ void load(u32 stage, int n_left) {
    constexpr int kStep = kCta / (4 * kPad);
    const int n = is_pair ? min(n_left, PER_STAGE) * CHUNK - static_cast<int>(threadIdx.x / (4 * kPad)) : 0;
#pragma unroll
    for (int k = 0; k < (PER_STAGE * CHUNK + kStep - 1) / kStep; ++k) {
      if (k * kStep >= n) break;
      copy16(stage + kWeights + (k * kCta + threadIdx.x) * 16, x + static_cast<i64>(k * kStep) * pad * 64);
#if HAS_MIN
      if (threadIdx.x % 4 == 0)
        copy4(stage + kWeights + PER_STAGE * kRowBytes + k * kCta + threadIdx.x,
              sums + static_cast<i64>(k * kStep) * pad);
#endif
    }
    x += static_cast<i64>(PER_STAGE * CHUNK) * pad * 64;
    sums += static_cast<i64>(PER_STAGE * CHUNK) * pad;
  }
};

// Of the first n_chunk chunks.
__device__ __forceinline__ int own_blocks(int n_chunk, int part) {
  const int n_block = n_chunk * CHUNK, rest = n_block % kTurn - part * kOwn;
  return n_block / kTurn * kOwn + min(max(rest, 0), kOwn);
}

__device__ __forceinline__ void add_stage(float (&acc)[TILES_N][4], u32 stage, int group, int part, int n_left) {
  const int lane = threadIdx.x & 31;
  auto add = [&](int i) {
    const int at = i / kOwn * kTurn + part * kOwn + i % kOwn;
    Weights w;
    unpack(w, stage + at / CHUNK * (kPieces * 16) + group * RECORD, at % CHUNK, lane);
    const u32 right = stage + kWeights + at * (kPad * 64) + lane * 16;
    const u32 mins = stage + kWeights + PER_STAGE * kRowBytes + at * (kPad * 4) + (lane & 3) * 8;
#pragma unroll
    for (int n = 0; n < TILES_N; ++n) {
      uint2 s = make_uint2(0, 0);
      if (HAS_MIN) s = shared_8(mins + n * 32);
      multiply(acc[n], w, shared_16(right + n * 512), __uint_as_float(s.x), __uint_as_float(s.y));
    }
  };
  if (n_left >= PER_STAGE) {
#pragma unroll 2
    for (int i = 0; i < PER_STAGE * CHUNK / SPLIT; ++i) add(i);
  } else {
    const int n = own_blocks(n_left, part);
#pragma unroll 1
    for (int i = 0; i < n; ++i) add(i);
  }
}

// Adds what the warps of a group summed, in the order of their parts; the sums are the first's.
__device__ __forceinline__ void add_parts(float (&acc)[TILES_N][4], float4* shared, int part) {
  __syncthreads();  // stages are read to the end
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

extern "C" __global__ void __launch_bounds__(kCta, RESIDENT)
    moe(const u8* __restrict__ weights, const float* __restrict__ scales, const u8* x, const float* sums,
        const float* powers, const int* order, const int4* items, float* out, i64 expert_bytes, int n_scale, int n_used,
        int pad, int n_out, int n_tile16, int n_chunk) {
  let_successor_start();
  wait_for_predecessor();
  extern __shared__ uint4 stages[];
  __shared__ float power[kPad];
  __shared__ int target[kPad];  // the row of `out`
  const int4 item = items[blockIdx.y];
  if (item.z == 0) return;
  const int pair = threadIdx.x / 4 % kPad, place = item.y + min(pair, item.z - 1), taken = order[place];
  const u32 base = shared_address(stages);
  const int n_group = min(WARPS_M, n_tile16 - static_cast<int>(blockIdx.x) * WARPS_M);  // of 16 weight rows, the CTA's
  WeightCopies left(weights + item.x * expert_bytes, n_group, n_tile16, n_chunk);
#pragma unroll
  for (int i = 0; i < kEarly; ++i) left.load(base + i * kStage, n_chunk - i * PER_STAGE);

  const int row = INNER ? taken / n_used : place;
  const i64 at = static_cast<i64>(threadIdx.x / (4 * kPad)) * pad + row;
  RowCopies right{x + at * 64 + threadIdx.x % 4 * 16, sums + at, pad, pair < item.z};
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) {
    if (i >= kEarly) left.load(base + i * kStage, n_chunk - i * PER_STAGE);
    right.load(base + i * kStage, n_chunk - i * PER_STAGE);
    copies_commit();
  }
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, group = warp % WARPS_M, part = warp / WARPS_M;
  const int row16 = lane >> 2;
  float scale = kUnit, scale8 = kUnit;
#if ROW_SCALES
  if (group < n_group) {
    const float* own = scales + static_cast<i64>(item.x) * n_scale + (blockIdx.x * WARPS_M + group) * 16 + row16;
    scale *= own[0];
    scale8 *= own[8];
  }
#endif
  if (threadIdx.x < 4 * kPad && threadIdx.x % 4 == 0) {
    power[pair] = powers[row];
    target[pair] = INNER ? place : taken;
  }

  float acc[TILES_N][4] = {};
  for (int chunk = 0, stage = 0, next = STAGES - 1; chunk < n_chunk; chunk += PER_STAGE) {
    copies_wait<STAGES - 2>();
    __syncthreads();
    const int n_left = n_chunk - chunk - (STAGES - 1) * PER_STAGE;
    if (n_left > 0) {
      left.load(base + next * kStage, n_left);
      right.load(base + next * kStage, n_left);
    }
    copies_commit();
    next = next + 1 == STAGES ? 0 : next + 1;
    add_stage(acc, base + stage * kStage, group, part, n_chunk - chunk);
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }
  add_parts(acc, reinterpret_cast<float4*>(stages), part);
  if (part > 0 || group >= n_group) return;

  const int group16 = blockIdx.x * WARPS_M + group;
#pragma unroll
  for (int n = 0; n < TILES_N; ++n) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int token = n * 8 + (lane & 3) * 2 + j;
      if (token >= item.z) continue;
      const float y = acc[n][j] * scale * power[token], y8 = acc[n][j + 2] * scale8 * power[token];
      float* to = out + static_cast<i64>(target[token]) * n_out;
#if ACT == SWIGLU
      const int column = group16 * 8 + row16;
      if (column < n_out) to[column] = silu(y) * y8;
#else
      const int column = group16 * 16 + row16;
      const float r = fmaxf(y, 0.f), r8 = fmaxf(y8, 0.f);
      if (column < n_out) to[column] = ACT == RELU2 ? r * r : y;
      if (column + 8 < n_out) to[column + 8] = ACT == RELU2 ? r8 * r8 : y8;
#endif
    }
  }
}
