// What comes before the parts of rows and behind them: the batch's keys, the sums of parts, the rings.
#pragma once

// Grid (row), block 128, four dims a thread: keys normed, turned and rounded. beside: as in compress.cu.
extern "C" __global__ void __launch_bounds__(128)
sparse_keys(const float* kv, const float* norm, const double* freq, const i64* positions, const int* row_seq, u16* own, i64 kv_step,
            int beside, float eps) {
  let_successor_start();
  __shared__ float squares[4];
  const int row = blockIdx.x, dim = 4 * threadIdx.x;
  const bool wanted = row_seq[row] >= 0 && dim < DIM;
  Turns turns = {};
  float4 w = make_float4(0.f, 0.f, 0.f, 0.f), x = w;
  if (wanted) turns = turns_of(positions[row], freq, dim), w = *reinterpret_cast<const float4*>(norm + dim);
  if (!beside) wait_for_predecessor();
  if (wanted) x = __ldcg(reinterpret_cast<const float4*>(kv + row * kv_step + dim));
  const float sum = warp_sum(square_of(x));
  if (threadIdx.x % 32 == 0) squares[threadIdx.x / 32] = sum;
  __syncthreads();
  const float by = scale_of((squares[0] + squares[1]) + (squares[2] + squares[3]), eps);
  x = make_float4(x.x * by * w.x, x.y * by * w.y, x.z * by * w.z, x.w * by * w.w);
  if (wanted) *reinterpret_cast<uint2*>(own + static_cast<i64>(row) * DIM + dim) = pack4(turned4(x, dim, turns));
  if (beside) wait_for_predecessor();
}

struct RingArgs {
  const u16* own;
  u16* ring;
  const i64* positions;
  const int *row_seq, *seq_start, *seq_slot;
  int* fault;
  int n_slot, n_ring, n_all;
};

// A row's key into its slot's ring: of more rows than the ring has only the last ones stay.
__device__ __forceinline__ void keep_key(const RingArgs& a, int row) {
  const int seq = a.row_seq[row];
  bool wanted = seq >= 0;
  int slot = 0;
  i64 at = 0;
  if (wanted) {
    slot = a.seq_slot[seq], at = a.positions[row];
    wanted = min(a.seq_start[seq + 1], a.n_all) - row <= a.n_ring && at >= 0 && clamped(slot, a.n_slot, OP_ID, seq, a.fault) == slot;
  }
  wait_for_predecessor();
  if (!wanted) return;
  const uint4* const from = reinterpret_cast<const uint4*>(a.own + static_cast<i64>(row) * DIM);
  uint4* const to = reinterpret_cast<uint4*>(a.ring + (static_cast<i64>(slot) * a.n_ring + at % a.n_ring) * DIM);
  for (int i = threadIdx.x; i < DIM / 8; i += blockDim.x) to[i] = __ldcg(from + i);
}

// Grid (row, n_head * PIECES / 4, and one more that keeps the row's key if `keeps`), block 128: a warp has a head's 128 dims, or all that
// it has. Parts are put together in order, the sink counts last, and what values bring of their turn is turned back. With `blocks` it goes,
// over `power`, where the next product reads it (LAYOUT 0 of rows.cu) instead of to `out`.
extern "C" __global__ void __launch_bounds__(128)
sparse_merge(const float* part, const float* part_ml, const double* freq, const u16* own, u16* ring, const i64* table,
             const i64* positions, const int* row_seq, const int* seq_start, const int* seq_slot, const float* sinks, float* out,
             int* fault, u16* blocks, float* sums, float* powers, int n_col, int page_size, int ratio, int per_page, int n_page, int top_k,
             int n_head, int n_slot, int n_ring, int window, int first, int n_all, int max_part, int is_chosen, int keeps, int pad,
             int per_part, float power) {
  constexpr int PIECES = (DIM + 127) / 128;
  let_successor_start();
  const int row = first + blockIdx.x, seq = row_seq[row];
  if (keeps && blockIdx.y == gridDim.y - 1) {
    keep_key({own, ring, positions, row_seq, seq_start, seq_slot, fault, n_slot, n_ring, n_all}, row);
    return;
  }
  const int warp = blockIdx.y * 4 + threadIdx.x / 32, head = warp / PIECES, dim = warp % PIECES * 128 + threadIdx.x % 32 * 4;
  int n_part = 0;
  Turns turns = {};
  if (seq >= 0) {
    const Blocks blocks = {table, n_col, page_size, ratio, per_page, n_page};
    const int seen = ratio == 0 ? 0 : blocks.seen(positions[row], OP_ID, seq, fault);
    const int n_tile = tiles_of(window, is_chosen ? min(seen, top_k) : seen), per = tiles_per_part(n_tile, per_part);
    n_part = (n_tile + per - 1) / per;
    if (n_part > max_part) n_part = 0;
    turns = turns_of(positions[row], freq, dim);
    turns.low.y = -turns.low.y, turns.high.y = -turns.high.y;
  }
  wait_for_predecessor();
  const bool is_in = dim < DIM;
  if (head >= n_head || (!is_in && blocks == nullptr)) return;
  float m = none_seen(), l = 0.f;
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
  const i64 base = static_cast<i64>(blockIdx.x) * max_part * n_head + head;
#pragma unroll 4
  for (int i = 0; i < n_part; i++) {
    const i64 at = base + static_cast<i64>(i) * n_head;
    const float2 ml = __ldcg(reinterpret_cast<const float2*>(part_ml + 2 * at));
    const float4 x = __ldcg(reinterpret_cast<const float4*>(part + at * DIM + (is_in ? dim : 0)));
    const Fold f = fold_of(m, ml.x);
    m = f.m;
    l = folded(l, ml.y, f);
    sum = make_float4(folded(sum.x, x.x, f), folded(sum.y, x.y, f), folded(sum.z, x.z, f), folded(sum.w, x.w, f));
  }
  float4 y = make_float4(0.f, 0.f, 0.f, 0.f);
  if (n_part > 0) {
    const Fold f = fold_of(m, sinks[head] * 1.44269504f);  // log2(e): sums count in log2
    l = folded(l, 1.f, f);
    y = make_float4(__fdiv_rn(sum.x * f.keep, l), __fdiv_rn(sum.y * f.keep, l), __fdiv_rn(sum.z * f.keep, l), __fdiv_rn(sum.w * f.keep, l));
    y = turned4(y, dim, turns);
  }
  if (blocks == nullptr) {
    *reinterpret_cast<float4*>(out + (static_cast<i64>(row) * n_head + head) * DIM + dim) = y;
    return;
  }
  put_in_block(blocks, sums, pad, row, head * DIM + dim, halves_of(y, 1.f / power), is_in);
  if (warp == 0 && threadIdx.x == 0) powers[row] = power;
}

// Grid (row), block 64: the same keys, where rows are attended to by several launches.
extern "C" __global__ void __launch_bounds__(64)
sparse_ring(const u16* own, u16* ring, const i64* positions, const int* row_seq, const int* seq_start, const int* seq_slot, int* fault,
            int n_slot, int n_ring, int n_all) {
  let_successor_start();
  keep_key({own, ring, positions, row_seq, seq_start, seq_slot, fault, n_slot, n_ring, n_all}, blockIdx.x);
}
