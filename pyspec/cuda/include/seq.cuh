// Sequences of a recurrent layer's batch: the one reader of their metadata. A bad index is reported, and its sequence
// is skipped: clamping it to a real slot would spoil that slot's state.
#pragma once
#include "types.cuh"
#include "bounds.cuh"

struct Seq {
  int slot, start, n, fold;  // n == 0: nothing to do
  int first;                 // its rows are recorded behind so many, of which then nothing is stored or passed over
  bool keep;
  bool chunked;     // rows go through a kernel for chunks; here they are only folded
  bool fold_only;  // there are no rows: the state is brought to its committed length

  // Its records are read where they are, for its rows take nobody's place.
  __device__ __forceinline__ bool in_place() const { return keep || first > 0; }
};

// In seq_keep: rows are kept; there are none (any other sequence without rows is padding); rows are recorded behind those to be folded.
constexpr int KEEP = 1, FOLD_ONLY = 2, LATE = 3;

struct Meta {
  const int *slot, *start, *fold, *keep;
  int n_slot, width, n_row;
  int chunked;  // kept sequences of at least as many rows are chunked
};

__device__ __forceinline__ Seq read_seq(const Meta& meta, int s, int op, int* fault) {
  const Seq none = {0, 0, 0, 0, 0, false, false, false};
  const int keep = meta.keep[s];
  Seq seq = {meta.slot[s], meta.start[s], 0, meta.fold[s], 0, keep == KEEP || keep == FOLD_ONLY, false, false};
  const int n = meta.start[s + 1] - seq.start, last = seq.start + n - 1;
  seq.fold_only = n == 0 && keep == FOLD_ONLY;
  if (n <= 0 && !seq.fold_only) return none;
  if (clamped(seq.slot, meta.n_slot, op, seq.slot, fault) != seq.slot) return none;
  if (clamped(seq.fold, meta.width + 1, op, seq.slot, fault) != seq.fold) return none;
  if (seq.fold_only) return seq;
  if (clamped(seq.start, meta.n_row, op, seq.slot, fault) != seq.start) return none;
  if (clamped(last, meta.n_row, op, seq.slot, fault) != last) return none;
  if (keep == LATE) seq.first = seq.fold;
  if (!seq.keep && clamped(seq.first + n, meta.width + 1, op, seq.slot, fault) != seq.first + n) return none;
  seq.n = n;
  seq.chunked = seq.keep && n >= meta.chunked;
  return seq;
}

// Rows behind the last sequence's, a graph's padding, are nobody's. The next kernel reads them all the same: who has the last
// sequence makes them zeros. `out` is at the block's first of `kColumns` columns; rows are kStride apart.
template <int kColumns, int kStride, int kThreads>
__device__ __forceinline__ void clear_rest(const Meta& meta, float* out) {
  if (blockIdx.z != gridDim.z - 1) return;
  const int first = max(meta.start[gridDim.z], 0);
#pragma unroll 1
  for (int row = first; row < meta.n_row; ++row)
    for (int i = threadIdx.x; i < kColumns; i += kThreads) out[static_cast<i64>(row) * kStride + i] = 0.f;
}

__device__ __forceinline__ float4& quad(float* p) { return *reinterpret_cast<float4*>(p); }
__device__ __forceinline__ float4 quad(const float* p) { return *reinterpret_cast<const float4*>(p); }
