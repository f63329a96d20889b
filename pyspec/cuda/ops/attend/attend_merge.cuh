// The second launch of attend.cu: partial sums of a row's items become the row, in an order that is its own, whatever ran beside it.
#pragma once

struct MergeArgs {
  const float *part, *part_ml;
  const int* plan;
  const i64 *positions, *lo, *hi;
  const int *row_seq, *seq_start;
#if HAS_SINKS
  const float* sinks;
#endif
  float* out;
  int n_seq, n_head, n_kv, max_key, window, max_item;
  int* fault;
  int n_block;  // of attend_split
};

__device__ __forceinline__ int max_key_of(const MergeArgs& a) { return a.max_key; }

// Adds partials i0 to i0 + n - 1, of up to 32 splits, to the row's sum, in order. What each counts for hangs on maxima alone: a lane finds
// that for one of them, so that a chain of as many products and sums is left, where maxima and exponentials were one as well.
template <int BATCH, int OWN>
__device__ __forceinline__ void add_splits(Running<OWN>& sum, const MergeArgs& a, int at0, int stride, int n, int col, int dim, int seq) {
  const int lane = threadIdx.x % 32;
  const int own = lane < n ? clamped(at0 + lane * stride, a.max_item, OP_ID, seq, a.fault) : 0;
  float2 ml = make_float2(none_seen(), 0.f);
  if (lane < n) ml = *reinterpret_cast<const float2*>(a.part_ml + 2 * (static_cast<i64>(own) * COLS + col % COLS));
  float upto = ml.x;
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) {
    const float before = __shfl_up_sync(ALL, upto, d);
    if (lane >= d) upto = fmaxf(before, upto);
  }
  const float below = __shfl_up_sync(ALL, upto, 1);
  const Fold fold = fold_of(lane == 0 ? sum.m : fmaxf(sum.m, below), ml.x);
  sum.m = fmaxf(sum.m, __shfl_sync(ALL, upto, 31));
#pragma unroll 1
  for (int j0 = 0; j0 < n; j0 += BATCH) {
    float o[BATCH][OWN];
#pragma unroll
    for (int j = 0; j < BATCH; j++) {
      if (j0 + j >= n) break;
      const i64 at = static_cast<i64>(__shfl_sync(ALL, own, j0 + j)) * COLS + col % COLS;
      if (dim < DIM) load<OWN>(o[j], a.part + at * DIM + dim);
    }
#pragma unroll
    for (int j = 0; j < BATCH; j++) {
      if (j0 + j >= n) break;
      const Fold f = {0.f, __shfl_sync(ALL, fold.keep, j0 + j), __shfl_sync(ALL, fold.take, j0 + j)};
      const float l = __shfl_sync(ALL, ml.y, j0 + j);
      sum.l = folded(sum.l, l, f);
#pragma unroll
      for (int x = 0; x < OWN; x++) sum.o[x] = folded(sum.o[x], o[j][x], f);
    }
  }
}

// Ranges fold into splits, splits into the row, in order. One warp per row, head and 32 * OWN dims, BATCH partials in flight.
// Grid (row, head * PIECES / 4), block 128. FINDS: a block finds the items itself while attend_split runs, which leaves one read of L2
// behind the wait in place of two; for few rows and blocks, as finding takes a look at each row.
template <int BATCH, int OWN, bool FINDS>
__device__ __forceinline__ void merge(const MergeArgs& a) {
  constexpr int PIECES = (DIM + 32 * OWN - 1) / (32 * OWN);
  const int row = blockIdx.x, warp = blockIdx.y * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
  const int head = warp / PIECES, dim = (warp % PIECES * 32 + lane) * OWN;
  let_successor_start();
  __shared__ Items items;
  if constexpr (FINDS) {
    find_items<128>(items, a, gridDim.x, a.n_block);
    __syncthreads();  // the first warp has found them
  }
  if (head >= a.n_head) return;
  Seen seen = seen_by(a.positions[row], a.lo[row], a.hi[row], a.window, a.max_key);
  const int of = a.row_seq[row], seq = of < 0 ? 0 : clamped(of, a.n_seq, OP_ID, -1, a.fault);
  if (of < 0) seen = {0, 0};
  const int group = a.n_head / a.n_kv, col = (row - a.seq_start[seq]) * group + head % group;
  if (!FINDS) wait_for_predecessor();
  const int per_item = FINDS ? items.per_item : a.plan[0], keys = per_item * RANGE;
  const int tiles = FINDS ? items.seq_hi[seq] : a.plan[1 + 2 * MAX_SEQ + seq];
  const int from = FINDS ? items.seq_lo[seq] : a.plan[1 + MAX_SEQ + seq];
  const int stride = tiles * a.n_kv;  // items from one split to the next
  const int at0 = (FINDS ? items.first[seq] : a.plan[1 + seq]) + (head / group) * tiles + col / COLS - from * stride;
  const int first = seen.lo / keys, end = seen.hi > seen.lo ? (seen.hi - 1) / keys + 1 : first;
  if (FINDS) wait_for_predecessor();

  Running<OWN> row_sum, split_sum;
  const bool are_splits = per_item == FOLD;
  for (int i0 = first; are_splits && i0 < end; i0 += 32)
    add_splits<BATCH>(row_sum, a, at0 + i0 * stride, stride, min(32, end - i0), col, dim, seq);
  for (int i0 = first; !are_splits && i0 < end; i0 += BATCH) {
    float2 ml[BATCH];
    float o[BATCH][OWN];
#pragma unroll
    for (int j = 0; j < BATCH; j++) {
      if (i0 + j >= end) break;  // few keys have few partials: the others' instructions would be fetched, too
      const i64 at = static_cast<i64>(clamped(at0 + (i0 + j) * stride, a.max_item, OP_ID, seq, a.fault)) * COLS + col % COLS;
      ml[j] = make_float2(none_seen(), 0.f);
      if (dim < DIM) {
        ml[j] = *reinterpret_cast<const float2*>(a.part_ml + 2 * at);
        load<OWN>(o[j], a.part + at * DIM + dim);
      }
    }
#pragma unroll
    for (int j = 0; j < BATCH; j++) {
      if (i0 + j >= end) break;
      split_sum.add(ml[j].x, ml[j].y, o[j]);
      if ((i0 + j + 1) % FOLD == 0 || i0 + j + 1 == end) {
        row_sum.add(split_sum.m, split_sum.l, split_sum.o);
        split_sum.clear();
      }
    }
  }
#if HAS_SINKS
  row_sum.add(a.sinks[head] * 1.44269504f, 1.f, {});  // log2(e): partials count in log2
#endif
  const float one_over = row_sum.l > 0.f ? __frcp_rn(row_sum.l) : 0.f;
  float* to = a.out + (static_cast<i64>(row) * a.n_head + head) * DIM + dim;
  if (dim >= DIM) return;
  if (OWN == 4) {
    const float* y = row_sum.o;
    *reinterpret_cast<float4*>(to) = make_float4(y[0] * one_over, y[1 % OWN] * one_over, y[2 % OWN] * one_over, y[3 % OWN] * one_over);
  } else {
    for (int x = 0; x < OWN; x++) to[x] = row_sum.o[x] * one_over;
  }
}

#if HAS_SINKS
#define SINKS_ARG const float *sinks,
#define SINKS_VALUE sinks,
#else
#define SINKS_ARG
#define SINKS_VALUE
#endif
#define MERGE_ARGS                                                                                                  \
  const float *part, const float *part_ml, const int *plan, const i64 *positions, const i64 *lo, const i64 *hi,     \
      const int *row_seq, const int *seq_start, SINKS_ARG float *out, int n_seq, int n_head, int n_kv, int max_key, \
      int window, int max_item, int *fault, int n_block
#define MERGE_VALUES \
  {part, part_ml, plan, positions, lo, hi, row_seq, seq_start, SINKS_VALUE out, n_seq, n_head, n_kv, max_key, window, max_item, fault, n_block}

// Few rows with many partials each want loads in flight, many rows want many warps, and the fewest rows both: the same sums.
extern "C" __global__ void __launch_bounds__(128) attend_merge_thin(MERGE_ARGS) { merge<32, 1, (MERGE_FINDS & 1) != 0>(MERGE_VALUES); }
extern "C" __global__ void __launch_bounds__(128) attend_merge_long(MERGE_ARGS) { merge<16, 4, (MERGE_FINDS & 2) != 0>(MERGE_VALUES); }
extern "C" __global__ void __launch_bounds__(128, 8) attend_merge_wide(MERGE_ARGS) { merge<4, 4, (MERGE_FINDS & 4) != 0>(MERGE_VALUES); }
