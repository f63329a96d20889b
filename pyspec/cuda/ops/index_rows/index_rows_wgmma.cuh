// Scores by products of a warpgroup (sm_90a): 64 keys a group, four groups a CTA, one warp that copies queries some rows ahead of them.
//
//   packed: [64 dims][PAD heads][64], as wgmma.cuh has operand B
//
// While one group sums over its heads the others multiply. Groups that a short tile has no keys for only keep step. f16 alone: bf16 goes
// by index_rows_mma.cuh.
//
// Macros: PAD (8 to 64), RING (rows of queries in shared memory).
#pragma once
#include "bulk.cuh"
#include "wgmma.cuh"

constexpr int GROUPS = 4, GROUP_KEYS = 64, SCORERS = 128 * GROUPS;
constexpr int PADDED = PAD, QUERY_BYTES = PAD * DIM * 2, RECORD = QUERY_BYTES + PAD * 4;
constexpr int ROW_BYTES = (RECORD + 1023) / 1024 * 1024;
static_assert(KV_KIND == 1 && DIM % 64 == 0 && PAD <= 64, "see above");

__device__ __forceinline__ Chunk chunk_of(int i) {
  const int head = i / (DIM / 8), part = i % (DIM / 8);  // 8 columns of products: lane t has two of them from 2 t on
  return {head, part / 4 * 32 + part % 4 * 2, 8, part / 8 * PAD * 8 + head * 8 + (part % 8 ^ head % 8)};
}

struct Ring {
  u32 data, barriers;  // of a stage: full, empty
  int stage;
  u32 parity;

  __device__ __forceinline__ u32 full() const { return barriers + 16 * stage; }
  __device__ __forceinline__ u32 empty() const { return barriers + 16 * stage + 8; }
  __device__ __forceinline__ u32 row() const { return data + stage * ROW_BYTES; }

  __device__ __forceinline__ void step() {
    if (++stage == RING) stage = 0, parity ^= 1;
  }
};

__device__ __forceinline__ void copy_rows(Ring ring, const Items& items, const Group& group, const u8* packed) {
  for (int index = blockIdx.x; index < items.total; index += gridDim.x) {
    const Item it = item_of(items, group, index);
    for (int r = 0; r < it.n; r++, ring.step()) {
      barrier_wait(ring.empty(), ring.parity ^ 1);
      barrier_expect(ring.full(), RECORD);
      bulk_copy(ring.row(), packed + static_cast<i64>(it.row + r) * RECORD, RECORD, ring.full());
    }
  }
}

// A lane's keys: 8 of every 32 dims of keys g and g + 8 of the warp's 16.
struct Keys {
  u32 a[2 * STEPS][4];
};

// Most keys are from rounds before: they come to L2 while the predecessor ends. What it writes is read later all the same.
__device__ __forceinline__ void ask_for_keys(const u16* keys, const Blocks& blocks, int seq, int first, int n_key, int* fault) {
  const int lane = threadIdx.x % 32, key = first + lane;
  if (lane < 16 && key < n_key) bulk_prefetch(keys + blocks.row(seq, key, OP_ID, fault) * DIM, DIM * 2);
}

// Scores of a warp's 16 keys for the row in the ring's stage, which is given back; lane l < 16 gets that of key l.
__device__ __forceinline__ float score(const Keys& k, const Ring& ring) {
  const int lane = threadIdx.x % 32, t = lane % 4;
  const u64 rows = wgmma_operand(ring.row());
  float acc[kSums];
#pragma unroll
  for (int i = 0; i < kSums; i++) acc[i] = 0.f;
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < 2 * STEPS; i++) {
    const auto& a = k.a[i];
    wgmma(acc, a[0], a[1], a[2], a[3], rows + i / 4 * (PAD * 128 / 16) + i % 4 * 2);
  }
  wgmma_commit();
  wgmma_wait<0>();
  float sum[2] = {};
#pragma unroll
  for (int j = 0; j < PAD / 8; j++) {
    const uint2 both = shared_8(ring.row() + QUERY_BYTES + 32 * j + 8 * t);
    const float w[2] = {__uint_as_float(both.x), __uint_as_float(both.y)};
#pragma unroll
    for (int e = 0; e < 2; e++)
#pragma unroll
      for (int half = 0; half < 2; half++) sum[half] = fmaf(positive(acc[4 * j + 2 * half + e]), w[e], sum[half]);
  }
#pragma unroll
  for (int half = 0; half < 2; half++) {
    sum[half] += __shfl_xor_sync(ALL, sum[half], 1);
    sum[half] += __shfl_xor_sync(ALL, sum[half], 2);
  }
  const float low = __shfl_sync(ALL, sum[0], lane % 8 * 4), high = __shfl_sync(ALL, sum[1], lane % 8 * 4);
  if (lane == 0) barrier_arrive(ring.empty());
  return lane & 8 ? high : low;
}

extern "C" __global__ void __launch_bounds__(SCORERS + 32, 1)
index_rows_scores(const u8* packed, const u16* keys, const i64* table, const i64* positions, const int* seq_start, float* scores,
                  int* fault, int n_col, int page_size, int ratio, int per_page, int n_page, int top_k, int first, int n_row,
                  int n_all, int first_seq, int n_seq, int stride) {
  let_successor_start();
  extern __shared__ __align__(1024) char raw[];
  __shared__ Items items;
  __shared__ __align__(8) u64 barriers[2 * RING];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, own = 16 * warp;
  Ring ring = {(shared_address(raw) + 1023) & ~1023u, shared_address(barriers), 0, 0};
  if (threadIdx.x < RING) {
    barrier_init(ring.barriers + 16 * threadIdx.x, 1);
    barrier_init(ring.barriers + 16 * threadIdx.x + 8, SCORERS / 32);
    barriers_visible();
  }
  const Blocks blocks = {table, n_col, page_size, ratio, per_page, n_page};
  const Group group = {first, n_row, n_all, first_seq, n_seq};
  find_items(items, blocks, positions, seq_start, group, top_k, stride, GROUP_KEYS, GROUPS * GROUP_KEYS, fault);
  const int total = items.total, tile = items.tile;
  const bool has_keys = own < tile;
  if (blockIdx.x < total && has_keys && warp < SCORERS / 32) {
    const Item it = item_of(items, group, blockIdx.x);
    ask_for_keys(keys, blocks, first_seq + it.seq, it.base + own, it.n_key, fault);
  }
  wait_for_predecessor();  // the layout was there before; keys and operands were not
  if (warp == SCORERS / 32) {
    if (lane == 0) copy_rows(ring, items, group, packed);
    return;
  }
  for (int index = blockIdx.x; index < total; index += gridDim.x) {
    const Item it = item_of(items, group, index);
    const int first_key = it.base + own, key = first_key + lane;
    Keys k;
    if (has_keys) load_sixteen(k.a, keys, blocks, first_seq + it.seq, first_key, it.n_key, fault);
#pragma unroll 1
    for (int r = 0; r < it.n; r++, ring.step()) {
      barrier_wait(ring.full(), ring.parity);
      if (has_keys) {
        const float x = score(k, ring);
        if (lane < 16 && key < it.n_key) scores[static_cast<i64>(it.row + r) * stride + key] = x;
      } else {
        __syncwarp();
        if (lane == 0) barrier_arrive(ring.empty());
      }
    }
  }
}
