// linear_sm90: linear.cu with the copy engine of sm_90 and later; same arguments, and but for Q4_K and Q5_K (int_scales.cuh) same sums in
// the same order.
//
// A warp of its own keeps the stages filled by bulk copies, each completing on a barrier; computing warps wait for
// stages one by one and leave them one by one, so nothing holds all warps together. A warp fetches a block's codes while
// it multiplies the block before, across stages too: with two warps a scheduler, latency is what there is to hide.
// Weights do not depend on the predecessor: with a programmatic launch the first stages stream in while it ends.
// late: the successor starts when what came before this launch is over, not as soon as this one has begun (linear_pair.cu).
// Beside linear.cu's macros: WINDOW and STEADY, stages under way at most before the predecessor is over, and after.
#include "linear.cuh"
#include "bulk.cuh"
#include "overlap.cuh"

// Registers hold a block's rows while the next stage is waited for. From sm_120 on the compiler needs more: fewer spills.
constexpr bool kHolds = TILES_M * TILES_N <= (__CUDA_ARCH__ < 1200 ? 8 : 4);
static_assert(CHUNK % 2 == 0, "blocks go in pairs");

// With few rows, few enough registers to start beside the kernel that prepares them; where that costs no spills.
#define CHEAP (TYPE == Q8_0 || TYPE == Q4_0 || TYPE == Q6_K || TYPE == MXFP4 || TYPE == F16)
#if TILES_N == 1 && CHEAP && __CUDA_ARCH__ < 1200
#define BOUNDS __maxnreg__(96)
#else
#define BOUNDS __launch_bounds__(kThreads + 32, 1)
#endif

struct Ring {  // a place in the stages
  int stage;
  u32 parity;

  __device__ __forceinline__ void step() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

struct Source {  // a unit of a CTA's run
  const u8* weights;
  const u8* x;
  const u8* sums;
  int n_tile16, n_chunk, tile, chunk;

  __device__ __forceinline__ void step() {
    if (++chunk == n_chunk) chunk = 0, ++tile;
  }

  __device__ __forceinline__ void load_weights(u32 to, u32 barrier, u32 n_more, u64 policy) const {
    const int n16 = min(kTile, n_tile16 - tile * kTile);
    const i64 record = static_cast<i64>(tile) * kTile * n_chunk + static_cast<i64>(chunk) * n16;
    barrier_expect(barrier, n16 * RECORD + n_more);
    bulk_copy_once(to, weights + record * RECORD, n16 * RECORD, barrier, policy);
  }

  __device__ __forceinline__ void load_rows(u32 to, u32 full) const {
    const int own = chunk_of_rows(tile, chunk, n_chunk);
    bulk_copy(to + kWeightBytes, x + static_cast<i64>(own) * kRowBytes, kRowBytes, full);
#if HAS_MIN
    bulk_copy(to + kWeightBytes + kRowBytes, sums + static_cast<i64>(own) * kSumBytes, kSumBytes, full);
#endif
  }
};

// One thread's work: all copies of a CTA's run. Before the predecessor is over only weights come, each stage on a barrier
// of its own, and never more than WINDOW at once: what the predecessor still has to read would queue behind them.
__device__ __forceinline__ void copy_units(Source from, u32 base, u32 full, u32 empty, u32 early, int n_unit) {
  const u64 policy = evict_first();
  const int n_first = min(STAGES, n_unit);
  Source rows = from;
  for (int i = 0; i < n_first; ++i, from.step()) {
    if (i >= WINDOW) barrier_wait(early + (i - WINDOW) * 8, 0);
    from.load_weights(base + i * kStageBytes, early + i * 8, 0, policy);
  }
  wait_for_predecessor();
  for (int i = 0; i < n_first; ++i, rows.step()) {
    barrier_expect_more(full + i * 8, kRowBytes + kSumBytes);
    rows.load_rows(base + i * kStageBytes, full + i * 8);
  }
  for (int i = 0; i < n_first; ++i) {
    barrier_wait(early + i * 8, 0);
    barrier_arrive(full + i * 8);
  }
  Ring at{0, 0};
#if STEADY < STAGES
  Ring behind{STAGES - STEADY, 0};
#endif
  for (int unit = n_first; unit < n_unit; ++unit, at.step(), from.step()) {
    const u32 to = base + at.stage * kStageBytes, barrier = full + at.stage * 8;
    barrier_wait(empty + at.stage * 8, at.parity);
#if STEADY < STAGES
    barrier_wait(full + behind.stage * 8, behind.parity);
    behind.step();
#endif
    from.load_weights(to, barrier, kRowBytes + kSumBytes, policy);
    from.load_rows(to, barrier);
  }
}

// A warp is done with a stage once what it loaded has come, as sums made of it show. An arrival alone seems not to wait for loads
// that are under way: where others' loads stood before them, a copy into the stage was there first (docs/log.md).
__device__ __forceinline__ void leave(u32 empty, const Accumulator& acc) {
  const u32 none = 0xffffffffu;  // a NaN that no arithmetic makes
  const bool is_summed =
      __float_as_uint(acc.v[0][0][0]) != none && __float_as_uint(acc.v[TILES_M - 1][TILES_N - 1][3]) != none;
  __syncwarp();
  if ((threadIdx.x & 31) == 0 && is_summed) barrier_arrive(empty);
}

#if INT_SCALES

#include "int_scales.cuh"

__device__ __forceinline__ u32 first_record(u32 stage) {  // the warp's
  return stage + (threadIdx.x >> 5) / WARPS_N * TILES_M * RECORD;
}

__device__ __forceinline__ u32 rows_of(u32 stage, int block, int n) {
  const int tile = (threadIdx.x >> 5) % WARPS_N * TILES_N + n;
  return stage + kWeightBytes + block * (kPad * 64) + tile * 512 + (threadIdx.x & 31) * 16;
}

__device__ __forceinline__ Parts parts_of(u32 stage, int n) {
  return fetch_parts(stage + kWeightBytes + kRowBytes + ((threadIdx.x >> 5) % WARPS_N * TILES_N + n) * 32);
}

#if TILES_M * TILES_N <= 12

struct Block {
  Codes codes[TILES_M];
};

__device__ __forceinline__ void fetch_codes(Block& b, u32 stage, int block) {
#pragma unroll
  for (int m = 0; m < TILES_M; ++m) fetch(b.codes[m], at_record(first_record(stage) + m * RECORD, threadIdx.x & 31), block);
}

__device__ __forceinline__ void fetch_rows(uint4 (&x)[TILES_N], u32 stage, int block) {
#pragma unroll
  for (int n = 0; n < TILES_N; ++n) x[n] = shared_16(rows_of(stage, block, n));
}

__device__ __forceinline__ void multiply(Accumulator& sums, const Block& left, const uint4 (&x)[TILES_N], u32 k16384) {
  u32 a[TILES_M][8];
#pragma unroll
  for (int m = 0; m < TILES_M; ++m) unpack_ints(a[m], left.codes[m], k16384);
#pragma unroll
  for (int n = 0; n < TILES_N; ++n)
#pragma unroll
    for (int m = 0; m < TILES_M; ++m) multiply_whole(sums.v[m][n], a[m], x[n]);
}

// Adds n > 0 units of one tile.
__device__ __forceinline__ void sum_units(Accumulator& acc, Ring& at, int n, u32 base, u32 full, u32 empty) {
  Block even, odd;
  uint4 x[TILES_N];
  const u32 k16384 = anew(0x74747474u);
  barrier_wait(full + at.stage * 8, at.parity);
  fetch_codes(even, base + at.stage * kStageBytes, 0);
#pragma unroll 1
  while (n-- > 0) {
    const u32 stage = base + at.stage * kStageBytes;
    Accumulator sums;
    clear(sums);
#pragma unroll 1
    for (int block = 0; block < CHUNK - 2; block += 2) {
      fetch_rows(x, stage, block);
      fetch_codes(odd, stage, block + 1);
      multiply(sums, even, x, k16384);
      fetch_rows(x, stage, block + 1);
      fetch_codes(even, stage, block + 2);
      multiply(sums, odd, x, k16384);
    }
    fetch_rows(x, stage, CHUNK - 2);
    fetch_codes(odd, stage, CHUNK - 1);
    multiply(sums, even, x, k16384);
    fetch_rows(x, stage, CHUNK - 1);
    Scales scales[TILES_M];
#pragma unroll
    for (int m = 0; m < TILES_M; ++m) fetch(scales[m], first_record(stage) + m * RECORD);
    multiply(sums, odd, x, k16384);
    u32 minima[TILES_M][2];
#pragma unroll
    for (int m = 0; m < TILES_M; ++m) minima_of(minima[m], scales[m].word, scales[m].next);
#pragma unroll
    for (int k = 0; k < TILES_N; ++k) {
      const Parts parts = parts_of(stage, k);
#pragma unroll
      for (int m = 0; m < TILES_M; ++m) {
        const Factors factors(scales[m]);
        add_whole(acc.v[m][k], sums.v[m][k], factors);
        add_minima(acc.v[m][k], minima[m], parts, factors);
      }
    }
    leave(empty + at.stage * 8, acc);
    at.step();
    if (n > 0) {
      barrier_wait(full + at.stage * 8, at.parity);
      fetch_codes(even, base + at.stage * kStageBytes, 0);
    }
  }
}

#else  // registers do not hold a chunk's sums of both tiles beside the others: one after the other, the same sums

__device__ __forceinline__ void sum_units(Accumulator& acc, Ring& at, int n, u32 base, u32 full, u32 empty) {
  const u32 k16384 = anew(0x74747474u);
#pragma unroll 1
  while (n-- > 0) {
    const u32 stage = base + at.stage * kStageBytes;
    barrier_wait(full + at.stage * 8, at.parity);
#pragma unroll
    for (int m = 0; m < TILES_M; ++m) {
      const u32 record = first_record(stage) + m * RECORD;
      float sums[TILES_N][4] = {};
#pragma unroll 1
      for (int block = 0; block < CHUNK; ++block) {
        Codes codes;
        u32 a[8];
        fetch(codes, at_record(record, threadIdx.x & 31), block);
        unpack_ints(a, codes, k16384);
#pragma unroll
        for (int k = 0; k < TILES_N; ++k) multiply_whole(sums[k], a, shared_16(rows_of(stage, block, k)));
      }
      Scales scales;
      fetch(scales, record);
      u32 minima[2];
      minima_of(minima, scales.word, scales.next);
      const Factors factors(scales);
#pragma unroll
      for (int k = 0; k < TILES_N; ++k) {
        add_whole(acc.v[m][k], sums[k], factors);
        add_minima(acc.v[m][k], minima, parts_of(stage, k), factors);
      }
    }
    leave(empty + at.stage * 8, acc);
    at.step();
  }
}

#endif

#else

// Adds n > 0 units of one tile.
__device__ __forceinline__ void sum_units(Accumulator& acc, Ring& at, int n, u32 base, u32 full, u32 empty) {
  Left even, odd;
  Right right;
  barrier_wait(full + at.stage * 8, at.parity);
  fetch(even, base + at.stage * kStageBytes, 0);
#pragma unroll 1
  while (n-- > 0) {
    const u32 stage = base + at.stage * kStageBytes;
#pragma unroll 1
    for (int block = 0; block < CHUNK - 2; block += 2) {
      fetch(right, stage, block);
      fetch(odd, stage, block + 1);
      multiply(acc, even, right);
      fetch(right, stage, block + 1);
      fetch(even, stage, block + 2);
      multiply(acc, odd, right);
    }
    fetch(right, stage, CHUNK - 2);
    fetch(odd, stage, CHUNK - 1);
    multiply(acc, even, right);
    fetch(right, stage, CHUNK - 1);
    const u32 behind = empty + at.stage * 8;
    if (!kHolds) {
      multiply(acc, odd, right);
      leave(behind, acc);
    }
    at.step();
    if (n > 0) {
      barrier_wait(full + at.stage * 8, at.parity);
      fetch(even, base + at.stage * kStageBytes, 0);
    }
    if (kHolds) {
      multiply(acc, odd, right);
      leave(behind, acc);
    }
  }
}

#endif

extern "C" __global__ void BOUNDS
    linear(const u8* __restrict__ weights, const u16* __restrict__ x, const float* __restrict__ sums,
           const float* __restrict__ powers, const float* residual, float* out, float* partial, int* tickets, int n_row,
           int n_out, int n_tile16, int n_chunk, int late) {
  extern __shared__ __align__(128) uint4 stages[];
  __shared__ u64 barriers[3 * STAGES];
  const u32 base = shared_address(stages), full = shared_address(barriers), empty = full + STAGES * 8,
            early = empty + STAGES * 8;
  const i64 total = static_cast<i64>((n_tile16 + kTile - 1) / kTile) * n_chunk;
  const int grid = gridDim.x, cta = blockIdx.x;
  const int begin = static_cast<int>(total * cta / grid), end = static_cast<int>(total * (cta + 1) / grid);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(full + i * 8, 1);
      barrier_init(early + i * 8, 1);
      barrier_init(empty + i * 8, kWarps);
    }
    barriers_visible();
  }
  __syncthreads();
  if (!late) let_successor_start();  // it finds room as CTAs end, and waits for their results itself

  if (threadIdx.x >= kThreads) {
    const Source from{weights, reinterpret_cast<const u8*>(x), reinterpret_cast<const u8*>(sums),
                      n_tile16, n_chunk, begin / n_chunk, begin % n_chunk};
    if (threadIdx.x == kThreads) copy_units(from, base, full, empty, early, end - begin);
    return;
  }
  wait_for_predecessor();
  if (late) let_successor_start();

  const Shape s{n_row, n_out, n_tile16, n_chunk};
  Ring at{0, 0};
  for (int unit = begin; unit < end;) {
    const int tile = unit / n_chunk, next = min(end, (tile + 1) * n_chunk);
    Accumulator acc;
    clear(acc);
    sum_units(acc, at, next - unit, base, full, empty);
    const Sharers who = sharers(tile, n_chunk, total, grid);
    finish(acc, s, tile, who, 2 * cta + (unit != begin), weights, powers, residual, out, partial, tickets);
    unit = next;
  }
}
