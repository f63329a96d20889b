// linear_pair: products of few rows, from sm_90 on; arguments as linear.cu's, but sums in an order of its own.
//
// Where a product ends, memory waits for the slowest multiprocessor. linear_sm90.cu cuts tiles of 256 weight rows among CTAs
// that meet in memory: shares, a fence and a ticket, trips of 1 to 3 us each while weights stream. Here two CTAs, a cluster, own
// 16-row groups of weights, and each takes half of the columns: what they have to tell each other goes from shared memory to
// shared memory, once, and nobody else is waited for.
//
// A pair's groups are taken in bands of GROUPS at most. A slot of the ring holds a chunk of a band and of the rows, filled by bulk
// copies: weights come before the predecessor is over, too. WAYS_K warps go through the pieces (two blocks) of a band in turn,
// WAYS_M share its groups. At its end each sends its sums to the CTA that owns the group; that one adds eight shares in the order
// of CTAs and warps. The order of sums depends on the columns alone, not on bands, pairs or rows.
// One thread takes 200 to 300 ns for a copy, and addresses are most of it: LANES of each of COPIERS warps fetch weights,
// ROW_LANES of another rows, a slot each. Who waits for a slot must be who filled it before: n_slot is a multiple of
// LANES * COPIERS, and no less than ROW_LANES.
//
// late: the successor starts when what came before this launch is over, not as soon as this one has begun: it may use that without a wait.
//
// Macros beside quants.cuh's: GROUPS, WAYS_M, TILES_N, EPILOGUE, COPIERS, LANES, ROW_LANES, MAX_SLOTS.
#define WARPS_N 1
#include "linear_block.cuh"
#include "bulk.cuh"
#include "cluster.cuh"
#include "overlap.cuh"

constexpr int WAYS_K = 4, kWarps = WAYS_M * WAYS_K, kThreads = 32 * kWarps;
constexpr int kMine = GROUPS / WAYS_M;                   // groups of a warp
constexpr int kOwned = GROUPS / 2;                       // groups of a band that a CTA adds up
constexpr int kShares = 2 * WAYS_K;                      // of a sum
constexpr int kShareBytes = TILES_N * 512;               // a group's, from one warp
constexpr int kMeetBytes = kShares * kOwned * kShareBytes;  // of a band
constexpr int BLOCKS = TILES_N <= 4 ? 2 : 1;             // of a piece at once: what registers allow
constexpr int FETCHERS = COPIERS * LANES;
constexpr int PARTS = CHUNK / 2;                         // pieces of a chunk
constexpr int kItems = (kOwned * TILES_N * 32 + kThreads - 1) / kThreads;  // fours of sums that a thread adds up
static_assert(GROUPS % WAYS_M == 0 && WAYS_K % PARTS == 0 && CHUNK % 2 == 0, "whole pieces, whole turns");

struct Sizes {
  int n_row, n_out, n_group, n_chunk;
  int n_slot, slot_bytes, slot_weights;  // of the ring; bytes for a slot's weights, behind which its rows lie
  int window, steady;                    // slots on their way at most, before the predecessor is over and after
};

// The groups of a pair, cut into bands (the first `n_higher` have a group more), and the columns of one of its CTAs.
struct Share {
  u32 first_group, n_band, height, n_higher;
  int first_chunk, n_chunk;

  __device__ __forceinline__ Share(const Sizes& s, u32 pair, u32 n_pair, int rank) {
    first_group = s.n_group * pair / n_pair;
    const u32 n_group = s.n_group * (pair + 1) / n_pair - first_group;
    n_band = (n_group + GROUPS - 1) / GROUPS;
    height = n_group / n_band;
    n_higher = n_group - height * n_band;
    first_chunk = s.n_chunk * rank / 2;
    n_chunk = s.n_chunk * (rank + 1) / 2 - first_chunk;
  }

  __device__ __forceinline__ u32 height_of(u32 band) const { return height + (band < n_higher); }
};

// Where groups from `first` on begin in a slot: copies are fastest between addresses that are alike modulo 128.
__device__ __forceinline__ u32 shift_of(u32 first) { return first % 16 * RECORD % 128; }

struct Place {  // in the ring, for who steps from slot to slot
  int slot;
  u32 parity;

  __device__ __forceinline__ void step(int by, int n_slot) {
    for (slot += by; slot >= n_slot; slot -= n_slot) parity ^= 1;
  }
};

// Neighbouring groups of one tile of 256 rows, chunk after chunk.
struct Strip {
  const u8* from;
  u32 step;

  __device__ __forceinline__ Strip(const u8* weights, const Sizes& s, u32 first, u32 chunk) {
    const u32 tile = first / 16 * 16, height = min(16, s.n_group - tile);
    from = weights + static_cast<u64>(tile * s.n_chunk + chunk * height + first - tile) * RECORD;
    step = height * RECORD;
  }
};

// The weights of every FETCHERS-th slot, from slot `own` on: never more than `window` slots of the first round of the ring at once
// (what the predecessor still has to read would queue behind them), and `steady` later.
__device__ __forceinline__ void copy_weights(const u8* weights, const Sizes& s, const Share& mine, u32 slots, u32 full,
                                             u32 empty, int own) {
  const u64 policy = evict_first();
  Place at{0, 0}, behind{0, 0};
  at.step(own, s.n_slot);
  behind.step(own, s.n_slot);
  int unit = own, waited = own, chunk = own;
  for (u32 band = 0, first = mine.first_group, end; band < mine.n_band; ++band, first = end, chunk -= mine.n_chunk) {
    end = first + mine.height_of(band);
    const u32 cut = min(end, first / 16 * 16 + 16);
    Strip low(weights, s, first, mine.first_chunk + chunk), high(weights, s, cut, mine.first_chunk + chunk);
    const u32 n_low = (cut - first) * RECORD, n_high = (end - cut) * RECORD;
#pragma unroll 1
    for (; chunk < mine.n_chunk; chunk += FETCHERS, unit += FETCHERS) {
      const bool again = unit >= s.n_slot;
      const u32 to = slots + at.slot * s.slot_bytes + shift_of(first), barrier = full + at.slot * 8;
      if (again) barrier_wait(empty + at.slot * 8, at.parity ^ 1);
      for (; waited + (again ? s.steady : s.window) <= unit; waited += FETCHERS, behind.step(FETCHERS, s.n_slot))
        barrier_wait(full + behind.slot * 8, behind.parity);
      barrier_expect(barrier, n_low + n_high);
      bulk_copy_once(to, low.from, n_low, barrier, policy);
      if (n_high > 0) bulk_copy_once(to + n_low, high.from, n_high, barrier, policy);
      low.from += FETCHERS * low.step;
      high.from += FETCHERS * high.step;
      at.step(FETCHERS, s.n_slot);
    }
  }
}

// The rows of every ROW_LANES-th slot.
__device__ __forceinline__ void copy_rows(const u8* x, const u8* sums, const Sizes& s, const Share& mine, u32 slots,
                                          u32 full, u32 empty, int own) {
  wait_for_predecessor();
  Place at{0, 0};
  at.step(own, s.n_slot);
  const int n_unit = mine.n_band * mine.n_chunk;
#pragma unroll 1
  for (int unit = own, chunk = own; unit < n_unit; unit += ROW_LANES, chunk += ROW_LANES, at.step(ROW_LANES, s.n_slot)) {
    while (chunk >= mine.n_chunk) chunk -= mine.n_chunk;
    const i64 from = mine.first_chunk + chunk;
    const u32 to = slots + at.slot * s.slot_bytes + s.slot_weights, barrier = full + at.slot * 8;
    if (unit >= s.n_slot) barrier_wait(empty + at.slot * 8, at.parity ^ 1);
    barrier_expect(barrier, kRowBytes + kSumBytes);
    bulk_copy(to, x + from * kRowBytes, kRowBytes, barrier);
    if (HAS_MIN) bulk_copy(to + kRowBytes, sums + from * kSumBytes, kSumBytes, barrier);
  }
}

__device__ __forceinline__ void all_meet() {  // of the warps that compute
  asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
}

struct Sums {
  float v[kMine][TILES_N][4];
};

#if INT_SCALES

#include "int_scales.cuh"

// The same with whole numbers (int_scales.cuh): one chain of products, scaled at its end. `has_minima`: for all of the chunk, whose warps
// take turns.
__device__ __forceinline__ float sum_blocks(Sums& acc, u32 weights, u32 rows, int block, int m, int n, bool has_minima) {
  const int lane = threadIdx.x & 31;
  const u32 k16384 = anew(0x74747474u);
  Codes codes[2][BLOCKS];
  uint4 x[BLOCKS][TILES_N];
  u32 upper[TILES_N], middle[TILES_N], lower[TILES_N];
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b) fetch(codes[0][b], at_record(weights + m * RECORD, lane), block + b);
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
    for (int t = 0; t < TILES_N; ++t) x[b][t] = shared_16(rows + (block + b) * (kPad * 64) + t * 512 + lane * 16);
  constexpr bool kKeeps = TILES_N <= 4;  // what is multiplied with minima: else registers do not hold it, and it is made for each group
  if (has_minima && kKeeps) {
#pragma unroll
    for (int t = 0; t < TILES_N; ++t) {
      const Parts parts = fetch_parts(rows + kRowBytes + t * 32);
      upper[t] = parts.upper, middle[t] = parts.middle, lower[t] = parts.lower;
    }
  }
  float seen = 0.f;
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    if (i >= n) break;
    Scales scales;
    fetch(scales, weights + (m + i * WAYS_M) * RECORD);
    if (i + 1 < kMine && i + 1 < n)
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b)
        fetch(codes[(i + 1) % 2][b], at_record(weights + (m + (i + 1) * WAYS_M) * RECORD, lane), block + b);
    float sums[TILES_N][4] = {};
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
      u32 a[8];
      unpack_ints(a, codes[i % 2][b], k16384);
#pragma unroll
      for (int t = 0; t < TILES_N; ++t) multiply_whole(sums[t], a, x[b][t]);
    }
    const Factors factors(scales);
#pragma unroll
    for (int t = 0; t < TILES_N; ++t) add_whole(acc.v[i][t], sums[t], factors);
    if (has_minima) {
      u32 minima[2];
      minima_of(minima, scales.word, scales.next);
#pragma unroll
      for (int t = 0; t < TILES_N; ++t) {
        const Parts parts = kKeeps ? Parts(upper[t], middle[t], lower[t]) : fetch_parts(rows + kRowBytes + t * 32);
        add_minima(acc.v[i][t], minima, parts, factors);
      }
    }
    seen = acc.v[i][TILES_N - 1][3];
  }
  return seen;
}

#else

// Adds BLOCKS of a piece's blocks, for `n` groups of a warp (its first is group `m` of the slot, the others follow in steps of
// WAYS_M). Returns a value that is there when all of them have been read.
__device__ __forceinline__ float sum_blocks(Sums& acc, u32 weights, u32 rows, int block, int m, int n, bool) {
  const int lane = threadIdx.x & 31;
  Codes codes[2][BLOCKS];
  Right right[BLOCKS];
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b) fetch(codes[0][b], weights + m * RECORD, block + b, lane);
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b)
    fetch(right[b], rows + (block + b) * (kPad * 64), rows + kRowBytes + (block + b) * (kPad * 4));
  float seen = 0.f;
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    if (i >= n) break;
    if (i + 1 < kMine && i + 1 < n)
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b)
        fetch(codes[(i + 1) % 2][b], weights + (m + (i + 1) * WAYS_M) * RECORD, block + b, lane);
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
      Weights w;
      unpack(w, codes[i % 2][b]);
#pragma unroll
      for (int t = 0; t < TILES_N; ++t)
        multiply(acc.v[i][t], w, right[b].x[t], __uint_as_float(right[b].sums[t].x), __uint_as_float(right[b].sums[t].y));
    }
    seen = acc.v[i][TILES_N - 1][3];
  }
  return seen;
}

#endif

// A warp's shares of a band of `n` groups: what this CTA owns to its places, or what the other does (kSent) to its.
template <bool kSent>
__device__ __forceinline__ void hand_over(const Sums& acc, int n, int rank, float4* shares, u32 here, u32 barrier) {
  const int lane = threadIdx.x & 31, m = threadIdx.x / 32 / WAYS_K, k = threadIdx.x / 32 % WAYS_K, half = (n + 1) / 2;
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    const int group = m + i * WAYS_M;
    if (group >= n) break;
    const int owner = group >= half;
    if ((owner != rank) != kSent) continue;
    const int to = ((rank * WAYS_K + k) * kOwned + group - owner * half) * (kShareBytes / 16) + lane;
#pragma unroll
    for (int t = 0; t < TILES_N; ++t) {
      const float(&v)[4] = acc.v[i][t];
      const float4 sum = make_float4(v[0], v[1], v[2], v[3]);
      if (kSent)
        send(here + (to + t * 32) * 16, sum, barrier, owner);
      else
        shares[to + t * 32] = sum;
    }
  }
}

// What four sums meet on their way out: rows `row` and the next, columns g and g + 8 of a group.
struct Beside {
  float power[2], old[2][2], scale[2];
  int row, column;  // of a thread's first sum

  __device__ __forceinline__ void load(const Sizes& s, int group, int tile, const u8* weights, const float* powers,
                                       const float* residual) {
    const int lane = threadIdx.x & 31, g = lane >> 2;
    row = tile * 8 + (lane & 3) * 2;
    column = group * (EPILOGUE == GATED ? 8 : 16) + g;
    scale[0] = scale[1] = kUnit;
#if ROW_SCALES
    const float* row_scales = reinterpret_cast<const float*>(weights + static_cast<i64>(s.n_group) * s.n_chunk * RECORD);
    scale[0] *= row_scales[group * 16 + g];
    scale[1] *= row_scales[group * 16 + g + 8];
#endif
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const bool is_row = row + j < s.n_row;
      power[j] = is_row ? powers[row + j] : 0.f;
      if (EPILOGUE != RESIDUAL) continue;
      const float* from = residual + static_cast<i64>(row + j) * s.n_out + column;
      old[j][0] = is_row && column < s.n_out ? from[0] : 0.f;
      old[j][1] = is_row && column + 8 < s.n_out ? from[8] : 0.f;
    }
  }

  __device__ __forceinline__ void store(const Sizes& s, float4 sum, float* out, float* by) const {
    const float v[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (row + j >= s.n_row) continue;
      const float y = v[j] * scale[0] * power[j], y8 = v[j + 2] * scale[1] * power[j];
#if EPILOGUE == GATED
      if (column < s.n_out) put(out, by, s.n_out, row + j, column, silu(cut_gate(y)) * cut_up(y8));
#else
      if (column < s.n_out) put(out, by, s.n_out, row + j, column, EPILOGUE == RESIDUAL ? old[j][0] + y : y);
      if (column + 8 < s.n_out) put(out, by, s.n_out, row + j, column + 8, EPILOGUE == RESIDUAL ? old[j][1] + y8 : y8);
#endif
    }
  }
};

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads + 32 * COPIERS + 32, 1)
    linear_pair(const u8* __restrict__ weights, const u8* x, const u8* sums, const float* powers, const float* residual,
                float* out, int n_row, int n_out, int n_group, int n_chunk, int n_slot, int slot_weights, int window,
                int steady, int late) {
  extern __shared__ __align__(128) uint4 memory[];
  __shared__ u64 barriers[3 * MAX_SLOTS + 2];
  const Sizes s{n_row, n_out, n_group, n_chunk, n_slot, slot_weights + kRowBytes + kSumBytes, slot_weights, window, steady};
  const u32 meet = shared_address(memory), slots = meet + 2 * kMeetBytes;
  const u32 full = shared_address(barriers), rows_full = full + MAX_SLOTS * 8, empty = rows_full + MAX_SLOTS * 8,
            met = empty + MAX_SLOTS * 8;
  const int rank = blockIdx.x & 1, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const Share mine(s, blockIdx.x >> 1, gridDim.x >> 1, rank);
  if (threadIdx.x == 0) {
    for (int i = 0; i < n_slot; ++i) {
      barrier_init(full + i * 8, 1);
      barrier_init(rows_full + i * 8, 1);
      barrier_init(empty + i * 8, WAYS_M * PARTS);
    }
    barrier_init(met, 1);
    barrier_init(met + 8, 1);
    barriers_visible();
  }
  __syncthreads();
  arrive_at_cluster();
  if (!late) let_successor_start();  // it finds room as CTAs end, and waits for their results itself

  if (warp >= kWarps) {
    const int own = (warp - kWarps) * LANES + lane;
    if (lane < LANES && own < FETCHERS) copy_weights(weights, s, mine, slots, full, empty, own);
    if (lane < ROW_LANES && warp == kWarps + COPIERS) copy_rows(x, sums, s, mine, slots, rows_full, empty, lane);
    __syncwarp();
    wait_for_cluster();
    return;
  }
  wait_for_predecessor();
  if (late) let_successor_start();
  wait_for_cluster();

  const int m = warp / WAYS_K, k = warp % WAYS_K;  // a scheduler's warps share the groups of its pieces
  const int n_piece = mine.n_chunk * PARTS;
  Place begin{0, 0};
  int first = mine.first_group;
  for (u32 band = 0; band < mine.n_band; ++band) {
    const int n = mine.height_of(band), half = (n + 1) / 2;
    Sums acc;
#pragma unroll
    for (int i = 0; i < kMine; ++i)
#pragma unroll
      for (int t = 0; t < TILES_N; ++t) acc.v[i][t][0] = acc.v[i][t][1] = acc.v[i][t][2] = acc.v[i][t][3] = 0.f;
    const int n_mine = (n - m + WAYS_M - 1) / WAYS_M;
    Place at = begin;
    at.step(k / PARTS, n_slot);
    begin.step(mine.n_chunk, n_slot);
    for (int piece = k; piece < n_piece; piece += WAYS_K, at.step(WAYS_K / PARTS, n_slot)) {
      const u32 slot = slots + at.slot * s.slot_bytes;
      barrier_wait(full + at.slot * 8, at.parity);
      barrier_wait(rows_full + at.slot * 8, at.parity);
      float seen;
#pragma unroll
      for (int b = 0; b < 2; b += BLOCKS)
        seen = sum_blocks(acc, slot + shift_of(first), slot + slot_weights, piece % PARTS * 2 + b, m, n_mine,
                          b == 0 && piece / PARTS % WAYS_K == k);
      __syncwarp();  // an arrival alone does not wait for loads: see linear_sm90.cu
      if (lane == 0 && __float_as_uint(seen) != 0xffffffffu) barrier_arrive(empty + at.slot * 8);
    }

    // The places of this band are those of two bands ago. They are free: this CTA's warps have met since they read them, and the
    // other's met before they sent what came for the last band. Who meets here has stored what stays, and goes on to read it.
    const u32 here = meet + (band & 1) * kMeetBytes, barrier = met + (band & 1) * 8;
    float4* const shares = reinterpret_cast<float4*>(memory) + (band & 1) * (kMeetBytes / 16);
    const int n_own = rank == 0 ? half : n - half;
    hand_over<false>(acc, n, rank, shares, here, barrier);
    all_meet();
    if (threadIdx.x == 0) barrier_expect(barrier, WAYS_K * n_own * kShareBytes);
    hand_over<true>(acc, n, rank, shares, here, barrier);
    const int n_item = n_own * TILES_N, base = rank == 0 ? 0 : half;
    Beside beside[kItems];
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int item = warp + i * kWarps;
      if (item < n_item) beside[i].load(s, first + base + item / TILES_N, item % TILES_N, weights, powers, residual);
    }
    barrier_wait_cluster(barrier, band >> 1 & 1);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int item = warp + i * kWarps;
      if (item >= n_item) break;
      const float4* from = shares + item * 32 + lane;
      float4 sum = from[0];
#pragma unroll
      for (int j = 1; j < kShares; ++j) {
        const float4 v = from[j * kOwned * (kShareBytes / 16)];
        sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
      }
      beside[i].store(s, sum, out, powers_of(residual));
    }
    first += n;
  }
}
