// linear_wgmma: up to 128 rows of activations times packed weights, on the warpgroup products of sm_90a.
//
//   weights   [tile][chunk][16 rows]   packed        see linear_pack.py; then a scale for each row, types that have one
//   x         [64 columns][PAD][64]    f16           see linear_wgmma.py
//   powers    [PAD]                    f32           a row is its f16 values times its power
//   residual  [n_row, n_out]           f32           read when EPILOGUE is RESIDUAL; may be out
//   out       [n_row, n_out]           f32
//   partial   [2 gridDim][256 * PAD]   f32           shares of cut tiles
//   counts    [n_tile]                 int32         zero before and after
//   states    [gridDim]                int32         zero before and after
//
// A CTA of four warpgroups owns tiles of 256 weight rows. Codes become f16, times their scale, in registers (operand A);
// activations are operand B. One warp copies both in bulk, ahead of the others; a group unpacks while the others multiply.
//
// The CTAs of a cluster have neighbouring tiles and the same columns, and each fetches its part of the rows for all of them.
//
// Bands of CLUSTER tiles times chunks are one line that the clusters cut into equal runs. A tile that is cut is summed from its
// shares in the order of its columns, whoever arrives first, so bits depend on matrix and device only. Clusters have not to wait
// for each other: who waits too long leaves its part to the last to arrive (wgmma_shares.cuh).
//
// Set by the launcher: TYPE, CHUNK, RECORD (quants.cuh), PAD (8 to 128; 256: two groups, tiles of 128 weight rows), EPILOGUE, WEIGHT_STAGES, ROW_STAGES, CLUSTER (CTAs of one),
// PATIENCE (clocks to wait for others), WINDOW (weight stages under way at most before the predecessor is over).
// MANY (most rows, for a prompt; 0 for a round): the rows are parts of PAD, all of them in one launch. x is then [64 columns][parts * PAD][64],
// and an item is a band times a part. The clusters take items in turn, those that run together have few bands and all parts, so weights come from
// memory once. What fills no turn of all clusters (items from `first` on) is the line that is cut.
#ifndef MANY
#define MANY 0
#endif
#include "cut.cuh"
#include "quants.cuh"
#include "wgmma.cuh"
#include "bulk.cuh"
#include "cluster.cuh"
#include "overlap.cuh"

#define PLAIN 0
#define RESIDUAL 1
#define GATED 2  // rows 0-7 of each 16 are gates, 8-15 the ups of the same features: writes silu(gate) * up

constexpr int kWarps = PAD > 128 ? 8 : 16, kThreads = 32 * kWarps, kBlock = kThreads + 128;
constexpr int kTile = kWarps;       // 16-row records of a tile: all of a tile of linear_pack.py, or half of one
constexpr int kPacked = 16;         // of one of those
constexpr int kSteps = CHUNK / 2;   // of 64 columns, in a chunk
constexpr int kWeightBytes = kTile * RECORD, kRowBytes = PAD * 128;
constexpr int kOwnRows = kRowBytes / CLUSTER;  // bytes of a stage that this CTA fetches, for all of its cluster
constexpr int kParts = kTile * PAD / 8;  // of a tile: 16 weight rows by 8 rows, a float4 of each lane
constexpr int kMaxGrid = 256;
// Scales become f16 too: those of MXFP4 are shifted, so that 2^-17 to 2^7 are exact.
constexpr float kLift = TYPE == MXFP4 ? 128.f : 1.f;
#ifndef AT_ONCE
#define AT_ONCE (PAD <= 16 ? 1 : 2)
#endif
#ifndef LOADS
#define LOADS (PAD <= 16 || PAD == 96 || PAD == 112 ? 8 : 4)
#endif
constexpr int kAtOnce = AT_ONCE, kLoads = LOADS;  // parts, and shares of each, under way; with more the compiler spills in the products' loop
// Registers of a thread that multiplies, where 20 warps start with kStart: 16 * kOwn + 4 * 24 of 20 * kStart at most, for to ask for more is to
// wait for ever. Of few rows so few that a CTA finds room beside one that prepares them: its first weights come meanwhile.
#if PAD <= 16
constexpr int kOwnRegisters = 64;
#define BOUNDS __maxnreg__(56)
#elif PAD > 128
constexpr int kOwnRegisters = 208;
#define BOUNDS __launch_bounds__(kBlock, 1)
#elif PAD <= 64
constexpr int kOwnRegisters = 72;
#define BOUNDS __maxnreg__(64)
#else
constexpr int kOwnRegisters = 112;
#define BOUNDS __launch_bounds__(kBlock, 1)
#endif
enum State { kNothing = 0, kGo = 1, kGone = 2 };

struct Matrix {
  int n_row, n_out, n_record, n_chunk, n_cluster;
  int total;  // units of the line: bands times chunks; times the clusters it fits 32 bits
  int rank;   // of this CTA in its cluster
  int n_part, first;  // parts of the rows; the line's first item, where they are bands times parts

  __device__ __forceinline__ int run_start(int cluster) const {
    return static_cast<int>(static_cast<u32>(total) * static_cast<u32>(cluster) / static_cast<u32>(n_cluster));
  }

  __device__ __forceinline__ int owner(int unit) const {  // the cluster whose run has it
    return static_cast<int>((static_cast<u32>(unit + 1) * static_cast<u32>(n_cluster) - 1) / static_cast<u32>(total));
  }

  __device__ __forceinline__ int tile(int item) const {  // the last may lie behind the matrix
    return (MANY ? item / n_part : item) * CLUSTER + rank;
  }

  __device__ __forceinline__ int part(int item) const { return MANY ? item % n_part : 0; }
};

struct Ring {  // of stages: where it lies, its barriers, and the next stage
  u32 data, full, empty;
  int stage;
  u32 parity;

  template <int kStages>
  __device__ __forceinline__ void step() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

struct Unit {
  int item, chunk;

  // The first of a cluster whose run of the line begins with `begin`.
  __device__ __forceinline__ Unit(const Matrix& m, int begin, int cluster) : item(cluster), chunk(0) {
    if (!MANY || m.first == 0) to_line(m, begin);
  }

  __device__ __forceinline__ void to_line(const Matrix& m, int begin) {
    item = m.first + begin / m.n_chunk;
    chunk = begin % m.n_chunk;
  }

  __device__ __forceinline__ void step(const Matrix& m, int begin) {
    if (++chunk == m.n_chunk) next(m, begin);
  }

  __device__ __forceinline__ void next(const Matrix& m, int begin) {
    chunk = 0;
    if (!MANY || item >= m.first) {
      ++item;
    } else if ((item += m.n_cluster) >= m.first) {
      to_line(m, begin);
    }
  }
};

// ---- copying

__device__ __forceinline__ void load_weights(Ring& ring, const u8* weights, const Matrix& m, Unit at, u64 policy) {
  const int first = m.tile(at.item) * kTile, tile = first / kPacked, within = first % kPacked;
  const int n_packed = min(kPacked, m.n_record - tile * kPacked), n16 = max(0, min(kTile, n_packed - within));
  const i64 record = static_cast<i64>(tile) * kPacked * m.n_chunk + static_cast<i64>(at.chunk) * n_packed + within;
  const u32 barrier = ring.full + ring.stage * 8;
  barrier_wait(ring.empty + ring.stage * 8, ring.parity ^ 1);
  barrier_expect(barrier, n16 * RECORD);
  const u32 to = ring.data + ring.stage * kWeightBytes;
  if (n16 > 0 && MANY) bulk_copy(to, weights + record * RECORD, n16 * RECORD, barrier);
  if (n16 > 0 && !MANY) bulk_copy_once(to, weights + record * RECORD, n16 * RECORD, barrier, policy);
  ring.step<WEIGHT_STAGES>();
}

// This CTA's part, for all of its cluster, each of which waits for all parts.
__device__ __forceinline__ void load_rows(Ring& ring, const u8* x, i64 step, int rank) {
  const u32 barrier = ring.full + ring.stage * 8, own = rank * kOwnRows;
  barrier_wait(ring.empty + ring.stage * 8, ring.parity ^ 1);
  barrier_expect(barrier, kRowBytes);
  bulk_copy_to_all<CLUSTER>(ring.data + ring.stage * kRowBytes + own, x + step * kRowBytes + own, kOwnRows, barrier);
  ring.step<ROW_STAGES>();
}

// By one thread, but that all of its warp wait. Weights do not depend on the predecessor: as many as fit stream in while it ends.
__device__ __forceinline__ void copy_all(Ring& w, Ring& b, const u8* weights, const u8* x, const Matrix& m, int begin,
                                         int n_unit, Unit at) {
  const bool copies = threadIdx.x == kThreads;
  const u64 policy = evict_first();
  Unit ahead = at;
  int n_ahead = copies ? min(WEIGHT_STAGES, n_unit) : 0;
  for (int i = 0; i < n_ahead; ++i, ahead.step(m, begin)) {
    if (i >= WINDOW) barrier_wait(w.full + (i - WINDOW) * 8, 0);
    load_weights(w, weights, m, ahead, policy);
  }
  __syncwarp();
  wait_for_cluster();
  wait_for_predecessor();
  if (!copies) n_unit = 0;
  for (int unit = 0; unit < n_unit; ++unit, at.step(m, begin)) {
    if (n_ahead > 0) {
      --n_ahead;
    } else {
      load_weights(w, weights, m, at, policy);
    }
    const i64 step = static_cast<i64>(at.chunk) * kSteps * m.n_part + m.part(at.item);
    for (int s = 0; s < kSteps; ++s) load_rows(b, x, step + s * m.n_part, m.rank);
  }
  if (!copies) return;
  for (int s = 0; s < ROW_STAGES; ++s) {  // a CTA may not end before all of its cluster have told it that they read
    barrier_wait(b.empty + b.stage * 8, b.parity ^ 1);
    b.step<ROW_STAGES>();
  }
}

// ---- multiplying

__device__ __forceinline__ u32 both_halves(float x) {
  u32 out;
  asm("cvt.rn.f16x2.f32 %0, %1, %1;" : "=r"(out) : "f"(x));
  return out;
}

// Values of 16 rows by 32 columns, rounded to f16 once (twice where the scale itself is a product).
__device__ __forceinline__ void weights_f16(u32 (&a)[8], u32 record, int block, int lane) {
  Weights w;
  unpack(w, record, block, lane);
#if !SCALED && !HALVES
  const u32 scale = both_halves(w.scale * kLift), scale8 = both_halves(w.scale8 * kLift);
#endif
#if HAS_MIN
  const u32 low = both_halves(-w.more), low8 = both_halves(-w.more8);
#elif HALF_SCALES
  const u32 more = both_halves(w.more * kLift), more8 = both_halves(w.more8 * kLift);
#elif !SCALED && !HALVES
  const u32 more = scale, more8 = scale8;
#endif
#if HALF_MINIMA
  const u32 less[4] = {both_halves(-w.low[0]), both_halves(-w.low[1]), both_halves(-w.low[2]), both_halves(-w.low[3])};
#endif
#pragma unroll
  for (int i = 0; i < 8; ++i) {
#if SCALED || HALVES
    a[i] = w.a[i];
#elif HAS_MIN
    a[i] = fma_f16x2(w.a[i], i & 1 ? scale8 : scale, i & 1 ? low8 : low);
#elif HALF_MINIMA
    a[i] = fma_f16x2(w.a[i], i < 4 ? (i & 1 ? scale8 : scale) : (i & 1 ? more8 : more), less[i / 4 * 2 + (i & 1)]);
#else
    a[i] = mul_f16x2(w.a[i], i < 4 ? (i & 1 ? scale8 : scale) : (i & 1 ? more8 : more));
#endif
  }
}

__device__ __forceinline__ void release(u32 barrier) {
  if ((threadIdx.x & 31) == 0) barrier_arrive(barrier);
}

__device__ __forceinline__ void release_rows(u32 barrier) {  // each of the first lanes to a CTA of the cluster
  if ((threadIdx.x & 31) < CLUSTER) barrier_arrive_cluster(barrier);
}

// Adds n_unit chunks. One product of 32 columns is under way while the next block is unpacked; stages are given back
// when the product after their last has started.
__device__ __forceinline__ void multiply(float (&acc)[kSums], Ring& w, Ring& b, int n_unit) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  u32 old_w = 0, old_b = 0;
#pragma unroll 1
  for (int unit = 0; unit < n_unit; ++unit) {
    const u32 record = w.data + w.stage * kWeightBytes + warp * RECORD;
    barrier_wait(w.full + w.stage * 8, w.parity);
#pragma unroll(kSteps <= 2 ? kSteps : 1)
    for (int s = 0; s < kSteps; ++s) {
      const u64 rows = wgmma_operand(b.data + b.stage * kRowBytes);
      u32 a[2][8];
      weights_f16(a[0], record, 2 * s, lane);
      barrier_wait(b.full + b.stage * 8, b.parity);
      wgmma_fence();
      wgmma(acc, a[0][0], a[0][1], a[0][2], a[0][3], rows);
      wgmma(acc, a[0][4], a[0][5], a[0][6], a[0][7], rows + 2);
      wgmma_commit();
      wgmma_wait<1>();
      if (old_b) release_rows(old_b);
      if (s == 0 && old_w) release(old_w);
      weights_f16(a[1], record, 2 * s + 1, lane);
      wgmma_fence();
      wgmma(acc, a[1][0], a[1][1], a[1][2], a[1][3], rows + 4);
      wgmma(acc, a[1][4], a[1][5], a[1][6], a[1][7], rows + 6);
      wgmma_commit();
      wgmma_wait<1>();
      old_b = b.empty + b.stage * 8;
      b.step<ROW_STAGES>();
    }
    old_w = w.empty + w.stage * 8;
    w.step<WEIGHT_STAGES>();
  }
  wgmma_wait<0>();
  release_rows(old_b);
  release(old_w);
}

// ---- storing

__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.f + __expf(-x)); }

// A value the compiler takes for new: what follows from it is not computed ahead, in registers the products need.
__device__ __forceinline__ int anew(int x) {
  int v;
  asm volatile("mov.u32 %0, %1;" : "=r"(v) : "r"(x));
  return v;
}

// Where a lane's sums go: rows 8 j + 2 t and the next, weight rows g and g + 8 of a record. Four at a time; loads and
// stores are apart, because the compiler may not move a load over a store that may be to its place.
struct Place {
  int row, column, n_row, n_out;
  u32 at;  // floats from the start: 32 bits are enough for 128 rows, and registers are few

  __device__ __forceinline__ Place(const Matrix& m, int record, int j) : n_row(anew(m.n_row)), n_out(anew(m.n_out)) {
    const int lane = anew(threadIdx.x) & 31;
    row = j * 8 + (lane & 3) * 2;
    column = record * (EPILOGUE == GATED ? 8 : 16) + (lane >> 2);
    at = static_cast<u32>(row) * static_cast<u32>(n_out) + column;
  }

  __device__ __forceinline__ void next() { row += 8, at += 8u * n_out; }  // j

  __device__ __forceinline__ float4 load(const float* from) const {
    float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
    if (row < n_row && column < n_out) v.x = from[at];
    if (row < n_row && column + 8 < n_out) v.z = from[at + 8];
    if (row + 1 < n_row && column < n_out) v.y = from[at + n_out];
    if (row + 1 < n_row && column + 8 < n_out) v.w = from[at + n_out + 8];
    return v;
  }

  __device__ __forceinline__ void store(float4 sum, float2 power, float2 scale, float4 old, float* out) const {
    sum = make_float4(sum.x * scale.x, sum.y * scale.x, sum.z * scale.y, sum.w * scale.y);
    float4 y = make_float4(sum.x * power.x, sum.y * power.y, sum.z * power.x, sum.w * power.y);
#if EPILOGUE == GATED
    if (row < n_row && column < n_out) out[at] = silu(cut_gate(y.x)) * cut_up(y.z);
    if (row + 1 < n_row && column < n_out) out[at + n_out] = silu(cut_gate(y.y)) * cut_up(y.w);
#else
    if (EPILOGUE == RESIDUAL) y = make_float4(old.x + y.x, old.y + y.y, old.z + y.z, old.w + y.w);
    if (row < n_row && column < n_out) out[at] = y.x;
    if (row < n_row && column + 8 < n_out) out[at + 8] = y.z;
    if (row + 1 < n_row && column < n_out) out[at + n_out] = y.y;
    if (row + 1 < n_row && column + 8 < n_out) out[at + n_out + 8] = y.w;
#endif
  }
};

struct Finish {  // what the sums of a tile need on their way out
  const Matrix& m;
  const u8* weights;
  const float* powers;  // in shared memory
  const float* residual;
  float* out;
  float* partial;
  int* counts;
  int* states;

  __device__ __forceinline__ float2 power(int row) const { return *reinterpret_cast<const float2*>(powers + row); }

  __device__ __forceinline__ float2 scale(int record) const {  // of its rows g and g + 8
#if ROW_SCALES
    const u8* const behind = weights + static_cast<i64>(m.n_record) * m.n_chunk * RECORD;
    const float* const scales = reinterpret_cast<const float*>(behind) + min(record, m.n_record - 1) * 16 + ((anew(threadIdx.x) & 31) >> 2);
    return make_float2(scales[0], scales[8]);
#else
    return make_float2(1.f, 1.f);
#endif
  }

  __device__ __forceinline__ void store_all(const float (&acc)[kSums], int tile) const {
    constexpr int kGroup = PAD == 8 ? 1 : 2;  // loads of the residual under way: registers are few
    const int record = tile * kTile + (anew(threadIdx.x) >> 5);
    const float2 of_rows = scale(record);
    Place place(m, record, 0);
#pragma unroll
    for (int j = 0; j < PAD / 8; j += kGroup) {
      float4 old[kGroup];
      Place ahead = place;
#pragma unroll
      for (int i = 0; i < kGroup; ++i, ahead.next())
        if (EPILOGUE == RESIDUAL) old[i] = ahead.load(residual);
#pragma unroll
      for (int i = 0; i < kGroup; ++i, place.next()) {
        const float* v = acc + 4 * (j + i);
        place.store(make_float4(v[0], v[1], v[2], v[3]), power(place.row), of_rows, old[i], out);
      }
    }
  }
};

#include "wgmma_shares.cuh"

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) BOUNDS
    linear_wgmma(const u8* __restrict__ weights, const u8* __restrict__ x, const float* __restrict__ powers,
                 const float* residual, float* out, float* partial, int* counts, int* states, int n_row, int n_out,
                 int n_record, int n_chunk
#if MANY
                 , int n_whole  // items that each cluster has to itself
#endif
    ) {
  extern __shared__ __align__(1024) uint4 stages[];
  __shared__ u64 barriers[2 * (WEIGHT_STAGES + ROW_STAGES)];
  constexpr int kPowers = MANY ? MANY : PAD;
  __shared__ __align__(8) float row_powers[kPowers];
  constexpr int kBand = kTile * CLUSTER;
  const int n_cluster = gridDim.x / CLUSTER, cluster = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER;
#if MANY
  const int n_part = (n_row + PAD - 1) / PAD, first = n_whole * n_cluster;
#else
  constexpr int n_part = 1, first = 0, n_whole = 0;
#endif
  const int n_item = (n_record + kBand - 1) / kBand * n_part;
  const Matrix m{n_row, n_out, n_record, n_chunk, n_cluster, (n_item - first) * n_chunk, rank, n_part, first};
  const u32 data = shared_address(stages), full = shared_address(barriers);
  Ring b{data, full, full + ROW_STAGES * 8, 0, 0};
  Ring w{data + ROW_STAGES * kRowBytes, b.empty + ROW_STAGES * 8, b.empty + (ROW_STAGES + WEIGHT_STAGES) * 8, 0, 0};
  if (threadIdx.x == 0) {
    for (int i = 0; i < ROW_STAGES; ++i) barrier_init(b.full + i * 8, 1), barrier_init(b.empty + i * 8, kWarps * CLUSTER);
    for (int i = 0; i < WEIGHT_STAGES; ++i) barrier_init(w.full + i * 8, 1), barrier_init(w.empty + i * 8, kWarps);
    barriers_visible();
  }
  __syncthreads();
  arrive_at_cluster();
  let_successor_start();  // it finds room as CTAs end, and waits for their results itself

  const int begin = m.run_start(cluster), end = m.run_start(cluster + 1);
  Unit at(m, begin, cluster);
  if (threadIdx.x >= kThreads) {  // four warps, because registers change hands by warpgroups
    registers_down<24>();
    copy_all(w, b, weights, x, m, begin, n_whole * n_chunk + end - begin, at);
    return;
  }
  registers_up<kOwnRegisters>();
  wait_for_cluster();
  b.empty = in_cluster(b.empty, min(threadIdx.x & 31, CLUSTER - 1u));  // each lane's, see release_rows
  wait_for_predecessor();
  for (int i = threadIdx.x; i < n_part * PAD; i += kThreads) row_powers[i] = i < n_row ? powers[i] * (kUnit / kLift) : 0.f;
  sync_computing();
#if MANY
  for (int left = n_whole * n_chunk + end - begin; left > 0;) {
    const int n_unit = min(left, n_chunk - at.chunk), row = m.part(at.item) * PAD;
    Matrix own = m;
    own.n_row -= row;
    const i64 before = static_cast<i64>(row) * n_out;
    const Finish finish{own, weights, row_powers + row, residual + before, out + before, partial, counts, states};
    float acc[kSums];
#pragma unroll
    for (float& v : acc) v = 0.f;
    multiply(acc, w, b, n_unit);
    if (n_unit == n_chunk || settle(acc, finish, at.item - first)) finish.store_all(acc, m.tile(at.item));
    at.next(m, begin);
    left -= n_unit;
  }
#else
  const Finish finish{m, weights, row_powers, residual, out, partial, counts, states};
  for (int unit = begin; unit < end;) {
    const int band = unit / n_chunk, stop = min(end, (band + 1) * n_chunk);
    float acc[kSums];
#pragma unroll
    for (float& v : acc) v = 0.f;
    multiply(acc, w, b, stop - unit);
    if (stop - unit == n_chunk || settle(acc, finish, band)) finish.store_all(acc, m.tile(band));
    unit = stop;
  }
#endif
}
