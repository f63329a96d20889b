// moe.cu's stages for f16 rows: where weights and rows come from, and when.
#pragma once
#include "linear_block.cuh"

constexpr int kEarly = INNER && STAGES > 3 ? 2 : STAGES - 1;  // stages whose weights come before their rows are known
constexpr int kSide = 4;  // threads that copy a block of one pair
static_assert(kThreads % (kSide * kPad) == 0, "a thread copies for one pair alone");

__device__ __forceinline__ void copy4(u32 to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

// What a thread copies of each stage's weights, stage by stage. Where a tile has fewer groups than the CTA, the last ones are
// left as they are in shared memory: they are multiplied and not stored.
struct WeightCopies {
  const u8* from;  // the thread's first 16 bytes
  int chunk, n_piece;  // bytes from one chunk's to the next one's; pieces of a chunk that are there

  __device__ __forceinline__ WeightCopies(Records own, int n_group)
      : from(own.first + threadIdx.x * 16), chunk(own.step), n_piece(n_group * (RECORD / 16)) {}

  template <bool kWhole>
  __device__ __forceinline__ void load(u32 stage, int n_left) {
    const u32 to = stage + threadIdx.x * 16;
#pragma unroll
    for (int i = 0; i < PER_STAGE; ++i, from += chunk) {
#pragma unroll
      for (int k = 0; k < (kPieces + kThreads - 1) / kThreads; ++k) {
        const bool is_there = k * kThreads + static_cast<int>(threadIdx.x) < n_piece;
        if (is_there && (kWhole || i < n_left)) copy16_ahead(to + (i * kPieces + k * kThreads) * 16, from + k * (kThreads * 16));
      }
    }
  }
};

// The same of the pair it copies for; none for places past the item's pairs, whose sums are not stored.
struct RowCopies {
  static constexpr int kStep = kThreads / (4 * kPad), kAll = PER_STAGE * CHUNK;
  const u8* x;  // 16 bytes of the pair's row in the thread's first block
  const float *sums, *powers;
  i64 step;  // blocks from one to the next
  bool is_pair;

  template <bool kWhole>
  __device__ __forceinline__ void load(u32 stage, int n_left) {
    const int n = (kWhole ? kAll : min(n_left * CHUNK, kAll)) - static_cast<int>(threadIdx.x / (4 * kPad));
    if (is_pair) {
#pragma unroll
      for (int k = 0; k < (kAll + kStep - 1) / kStep; ++k)
        if ((kWhole && (k + 1) * kStep <= kAll) || k * kStep < n) load_block(stage, k);
    }
    x += kAll * step * 64;
    if (HAS_MIN) sums += kAll * step;
    if (!INNER) powers += kAll * step;
  }

 private:
  __device__ __forceinline__ void load_block(u32 stage, int k) const {
    const u32 at = k * kThreads + threadIdx.x;  // four times the block's place
    copy16(stage + kWeights + at * 16, x + k * kStep * step * 64);
    if (HAS_MIN && threadIdx.x % 4 == 0) copy4(stage + kSums + at, sums + k * kStep * step);
    if (!INNER && threadIdx.x % 4 == 1) copy4(stage + kPowers + at - 1, powers + k * kStep * step);
  }
};

// An item's products.
class Line {
  WeightCopies left;
  RowCopies right;
  u32 base;
  int n_chunk;

 public:
  __device__ __forceinline__ Line(u32 base, Records own, int n_group, int n_chunk)
      : left(own, n_group), base(base), n_chunk(n_chunk) {}

  __device__ __forceinline__ void load_early() {
#pragma unroll
    for (int i = 0; i < kEarly; ++i) left.load<false>(base + i * kStage, n_chunk - i * PER_STAGE);
  }

  // The rest of the first STAGES - 1, with a row for the thread's pair.
  __device__ __forceinline__ void load_first(const u8* x, const float* sums, const float* powers, int row, int step, int pair, int n) {
    const i64 block = threadIdx.x / (kSide * kPad), at = INNER ? block * step + row : static_cast<i64>(row) * step + block;
    right = {x + at * 64 + threadIdx.x % 4 * 16, sums + at, powers + at, INNER ? step : 1, pair < n};
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) {
      if (i >= kEarly) left.load<false>(base + i * kStage, n_chunk - i * PER_STAGE);
      right.load<false>(base + i * kStage, n_chunk - i * PER_STAGE);
      copies_commit();
    }
  }

  __device__ __forceinline__ void multiply(Acc& acc, int n) {
    const Places at(threadIdx.x >> 5, n);
    const u32 end = base + STAGES * kStage;
    u32 stage = base, free = end - kStage;
    for (int chunk = 0; chunk < n_chunk; chunk += PER_STAGE) {
      copies_wait<STAGES - 2>();
      __syncthreads();
      const int n_left = n_chunk - chunk - (STAGES - 1) * PER_STAGE;
      if (n_left >= PER_STAGE) {
        left.load<true>(free, n_left);
        right.load<true>(free, n_left);
      } else if (n_left > 0) {
        left.load<false>(free, n_left);
        right.load<false>(free, n_left);
      }
      copies_commit();
      add_stage(acc, at, stage, n_chunk - chunk);
      free = stage;
      stage = stage + kStage == end ? base : stage + kStage;
    }
  }
};
