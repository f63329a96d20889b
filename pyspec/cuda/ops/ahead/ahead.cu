// ahead: how many rows of a verify are kept, and a layout moved behind them. Meaning: ahead_ref.py; fields: slots/batch.py.
//
// Both are bound by latency: a few numbers each, one trip to memory for the sequence and one for its rows. A warp has a sequence
// of the verify, a thread has a row of the layout. Rows of no sequence (padding) stay as they are.
#include "types.cuh"
#include "bounds.cuh"
#include "overlap.cuh"
#include "seq.cuh"

#define OP_AHEAD 10

constexpr int kEnds = 16;
constexpr u32 kAll = 0xffffffffu;

// Grid (sequences), 32 threads.
//   best [row] f64, tokens [row], starts [seq + 1], ends [seq, kEnds] or null, forced [seq] or null;
//   n [seq], next [row], last [seq], goes [seq] written
extern "C" __global__ void __launch_bounds__(32)
    ahead_accept(const double* best, const i64* tokens, const int* starts, const int* ends, const int* forced, int* n, i64* next,
               i64* last, int* goes, int n_row) {
  const int s = blockIdx.x, lane = threadIdx.x;
  const int start = min(max(starts[s], 0), n_row), end = min(max(starts[s + 1], start), n_row);
  const i64 stop = ends && lane < kEnds ? ends[s * kEnds + lane] : -1;
  const int most = forced ? forced[s] : -1;
  int n_right = 0;  // drafts, from the first on
  bool goes_on = true;
  for (int first = start; first < end; first += 32) {
    const int row = first + lane;
    const bool has_draft = row + 1 < end;
    const i64 draft = has_draft ? tokens[row + 1] : -1, found = row < end ? static_cast<i64>(best[row]) : 0;
    bool is_right = has_draft && (forced ? row - start < most : draft == found);
    if (ends) {
#pragma unroll
      for (int k = 0; k < kEnds; ++k) is_right &= __shfl_sync(kAll, stop, k) != draft;
    }
    const u32 right = __ballot_sync(kAll, is_right);
    const int here = goes_on ? __ffs(~right) - 1 : 0;  // 32 without a wrong one: ~right is 0, and so is what __ffs finds
    const int count = goes_on && right == kAll ? 32 : here;
    if (row < end) next[row] = lane < count ? draft : found;
    n_right += count;
    goes_on = goes_on && right == kAll;
  }
  const int row = min(start + n_right, n_row - 1);
  const bool is_end = ends && lane < kEnds && stop == static_cast<i64>(best[row]);
  const bool ends_here = __any_sync(kAll, is_end);
  if (lane == 0) {
    n[s] = n_right + 1;
    last[s] = row;
    goes[s] = !ends_here;
  }
}


// Grid (rows / 128), 128 threads.
//   is_moved   rows go on by n [seq], or by 1 if there is none; else they get next [row], and sequences last [seq] as out_rows
//   next, last, goes, n: of ahead_accept; drafts [seq, ..], their steps in numbers; null: the first rows' tokens alone, or none of them
extern "C" __global__ void __launch_bounds__(128)
    ahead_move(i64* tokens, i64* positions, i64* rope_at, i64* kv_rows, i64* hi, i64* out_rows, int* fold, int* keep,
               const int* starts, const int* row_seq, const i64* page_table, const int* n, const i64* next, const i64* last,
               const int* goes, const i64* drafts,
               i64 seq_step, i64 draft_step, int n_draft, int n_row, int n_seq, int n_next, int n_page, int page_size,
               int is_moved, int* fault) {
  let_successor_start();
  const int row = blockIdx.x * 128 + threadIdx.x;
  wait_for_predecessor();
  if (row >= n_row) return;
  const int s = row_seq[row];
  if (s < 0 || s >= n_seq) return;
  const int place = row - starts[s];
  if (!is_moved) {
    if (row < n_next) tokens[row] = next[row];
    if (place == 0) out_rows[s] = last[s];
    return;
  }
  const int by = n ? n[s] : 1;
  const i64 position = positions[row] + by;
  const int page = clamped(static_cast<int>(position / page_size), n_page, OP_AHEAD, s, fault);
  positions[row] = position;
  rope_at[row] += by;
  hi[row] += by;
  kv_rows[row] = page_table[static_cast<i64>(s) * n_page + page] * page_size + position % page_size;
  if (!n) return;
  if (place == 0) {
    tokens[row] = next[last[s]];
    fold[s] *= by;
    if (keep[s] == KEEP) keep[s] = goes[s];
  } else if (drafts) {
    tokens[row] = drafts[s * seq_step + min(place - 1, n_draft - 1) * draft_step];
  }
}
