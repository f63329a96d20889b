// Rows of a batch that go into rings of their slots (slots/ring.py). Macro: OP_ID.
#pragma once
#include "bounds.cuh"
#include "types.cuh"

struct Own {  // a row and its sequence
  int seq, slot, start, n;
  i64 at, n_past;
};

__device__ __forceinline__ Own own_of(int row, int n_all, int n_slot, const i64* positions, const int* row_seq, const int* seq_start,
                                      const int* seq_slot, int* fault) {
  Own o = {row_seq[row], 0, 0, 0, 0, 0};
  if (o.seq < 0) return o;
  o.slot = seq_slot[o.seq], o.start = seq_start[o.seq], o.at = positions[row];
  if (clamped(o.start, row + 1, OP_ID, o.seq, fault) != o.start || clamped(o.slot, n_slot, OP_ID, o.seq, fault) != o.slot) return {-1};
  o.n = min(seq_start[o.seq + 1], n_all) - o.start, o.n_past = positions[o.start];
  const bool fits = o.at >= 0 && o.at < 0x7fffffff && o.at - o.n_past == row - o.start;
  if (clamped(fits ? 0 : -1, n_all, OP_ID, o.seq, fault) != (fits ? 0 : -1)) return {-1};
  return o;
}

// Whether a row of a sequence of more than `n_direct` stays in a ring: of more than it has the last ones do.
__device__ __forceinline__ bool stays(const Own& o, int row, int n_ring, int n_direct) {
  return o.seq >= 0 && o.n > n_direct && o.start + o.n - row <= n_ring;
}
