// The parts of a row become its heads, in order, and the sink counts last; and the batch's keys go into the rings.
#pragma once

// Grid (row, n_head * PIECES / 4), block 128: a warp has a head's 128 dims, or all that it has.
extern "C" __global__ void __launch_bounds__(128)
sparse_merge(const float* part, const float* part_ml, const i64* table, const i64* positions, const int* row_seq, const float* sinks,
             float* out, int* fault, int n_col, int page_size, int ratio, int per_page, int n_page, int top_k, int n_head, int window,
             int first, int max_part, int is_chosen) {
  constexpr int PIECES = (DIM + 127) / 128;
  let_successor_start();
  const int warp = blockIdx.y * 4 + threadIdx.x / 32, head = warp / PIECES, dim = warp % PIECES * 128 + threadIdx.x % 32 * 4;
  const int row = first + blockIdx.x, seq = row_seq[row];
  int n_part = 0;
  if (seq >= 0) {
    const Blocks blocks = {table, n_col, page_size, ratio, per_page, n_page};
    const int seen = ratio == 0 ? 0 : blocks.seen(positions[row], OP_ID, seq, fault);
    const int n_tile = tiles_of(window, is_chosen ? min(seen, top_k) : seen), per = tiles_per_part(n_tile);
    n_part = (n_tile + per - 1) / per;
    if (n_part > max_part) n_part = 0;
  }
  wait_for_predecessor();
  if (head >= n_head || dim >= DIM) return;
  float m = none_seen(), l = 0.f;
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
  const i64 base = static_cast<i64>(blockIdx.x) * max_part * n_head + head;
#pragma unroll 4
  for (int i = 0; i < n_part; i++) {
    const i64 at = base + static_cast<i64>(i) * n_head;
    const float2 ml = __ldcg(reinterpret_cast<const float2*>(part_ml + 2 * at));
    const float4 x = __ldcg(reinterpret_cast<const float4*>(part + at * DIM + dim));
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
  }
  *reinterpret_cast<float4*>(out + (static_cast<i64>(row) * n_head + head) * DIM + dim) = y;
}

// Grid (row), block 64 (8 dims a thread): of more rows than the ring has only the last ones stay.
extern "C" __global__ void __launch_bounds__(64)
sparse_ring(const float* kv, u16* ring, const i64* positions, const int* row_seq, const int* seq_start, const int* seq_slot, int* fault,
            int n_slot, int n_ring, int n_all) {
  let_successor_start();
  const int row = blockIdx.x, seq = row_seq[row];
  bool wanted = seq >= 0;
  int slot = 0;
  i64 at = 0;
  if (wanted) {
    slot = seq_slot[seq], at = positions[row];
    wanted = min(seq_start[seq + 1], n_all) - row <= n_ring && at >= 0 && clamped(slot, n_slot, OP_ID, seq, fault) == slot;
  }
  wait_for_predecessor();
  if (!wanted) return;
  u16* const to = ring + (static_cast<i64>(slot) * n_ring + at % n_ring) * DIM;
  for (int i = threadIdx.x; i < DIM / 8; i += 64)
    reinterpret_cast<uint4*>(to)[i] = pack8(kv + static_cast<i64>(row) * DIM + 8 * i);
}
