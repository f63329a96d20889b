// The work list of attend.cu: every block finds the same items (a run of keys, a KV head, a tile of columns) from the
// batch's layout, and what an item's columns see. Reads nothing that the forward writes.
//
// A thread goes through these loops once, or hardly more often: unrolled, they are 2,000 instructions that each launch fetches anew.
#pragma once

struct Args {
  const float* q;
  const KeyCode* k;
  const ValueCode* v;
  const i64 *page_table, *positions, *lo, *hi;
  const int *row_seq, *seq_start;
  int *plan, *fault;
  int n_row, n_seq, n_head, n_kv, n_page_col, page_size, n_page, window, max_item;
  float scale;  // times log2(e)
};

__device__ __forceinline__ int max_key_of(const Args& a) { return a.n_page_col * a.page_size; }

template <class A>
__device__ __forceinline__ int tiles_of(const A& a, int width) {
  return (width * (a.n_head / a.n_kv) + COLS - 1) / COLS;
}

template <class A>
__device__ __forceinline__ int width_of(const A& a, int n_row, int seq) {
  const int start = a.seq_start[seq], end = a.seq_start[seq + 1];
  return start >= 0 && end <= n_row && start < end ? end - start : 0;
}

// The span of positions each sequence's rows see, then how many items that makes: the same numbers in every block, of N threads, of
// attend_split (n_block of them) and of those who put partials together.
template <int N, class A>
__device__ void find_items(Items& s, const A& a, int n_row, int n_block) {
#pragma unroll 1
  for (int i = threadIdx.x; i < a.n_seq; i += N) {
    s.seq_lo[i] = 0x7fffffff;
    s.seq_hi[i] = 0;
    s.width[i] = width_of(a, n_row, i);
  }
  __syncthreads();
#pragma unroll 1
  for (int row = threadIdx.x; row < n_row; row += N) {
    const Seen seen = seen_by(a.positions[row], a.lo[row], a.hi[row], a.window, max_key_of(a));
    const int of = a.row_seq[row];
    if (of < 0 || seen.lo >= seen.hi) continue;
    const int seq = clamped(of, a.n_seq, OP_ID, -1, a.fault);
    atomicMin(&s.seq_lo[seq], seen.lo);
    atomicMax(&s.seq_hi[seq], seen.hi);
  }
  __syncthreads();
  if (threadIdx.x >= 32) return;
  int fine = 0, coarse = 0;
#pragma unroll 1
  for (int i = threadIdx.x; i < a.n_seq; i += 32) {
    const int n = tiles_of(a, s.width[i]) * a.n_kv;
    if (s.seq_lo[i] >= s.seq_hi[i]) continue;
    fine += n * ((s.seq_hi[i] - 1) / RANGE - s.seq_lo[i] / RANGE + 1);
    coarse += n * ((s.seq_hi[i] - 1) / SPLIT - s.seq_lo[i] / SPLIT + 1);
  }
  coarse = __reduce_add_sync(ALL, coarse);
  fine = __reduce_add_sync(ALL, fine);
  // Splits as items write less; ranges as items are FOLD times as many, for when splits would leave the machine idle.
  const int keys = 4 * coarse <= 3 * n_block && fine <= a.max_item ? RANGE : SPLIT;
  int before = 0;
#pragma unroll 1
  for (int i0 = 0; i0 < a.n_seq; i0 += 32) {
    const int i = i0 + threadIdx.x;
    int n = 0, tiles = 0, from = 0;
    if (i < a.n_seq && s.seq_lo[i] < s.seq_hi[i]) {
      tiles = tiles_of(a, s.width[i]);
      from = s.seq_lo[i] / keys;
      n = tiles * a.n_kv * ((s.seq_hi[i] - 1) / keys - from + 1);
    }
    int upto = n;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
      const int left = __shfl_up_sync(ALL, upto, d);
      if (threadIdx.x >= d) upto += left;
    }
    if (i < a.n_seq) {
      s.first[i] = before + upto - n;
      s.seq_lo[i] = from;
      s.seq_hi[i] = tiles;
    }
    before += __shfl_sync(ALL, upto, 31);
  }
  if (threadIdx.x == 0) {
    s.per_item = keys / RANGE;
    s.first[a.n_seq] = clamped(before, a.max_item + 1, OP_ID, -1, a.fault);
  }
}

// For those who put partials together: one block tells what all know.
__device__ __forceinline__ void tell_items(const Items& s, const Args& a) {
  if (threadIdx.x == 0) a.plan[0] = s.per_item;
#pragma unroll 1
  for (int i = threadIdx.x; i < a.n_seq; i += THREADS) {
    a.plan[1 + i] = s.first[i];
    a.plan[1 + MAX_SEQ + i] = s.seq_lo[i];
    a.plan[1 + 2 * MAX_SEQ + i] = s.seq_hi[i];
  }
}

struct Item {
  int seq, head, split, tile, start, n_col;
};

__device__ __forceinline__ Item item_of(const Items& s, const Args& a, int index) {
  Item item;
  item.seq = 0;
  while (s.first[item.seq + 1] <= index) item.seq++;
  const int tiles = s.seq_hi[item.seq], i = index - s.first[item.seq];
  item.tile = i % tiles;
  item.head = i / tiles % a.n_kv;
  item.split = i / tiles / a.n_kv + s.seq_lo[item.seq];
  item.start = a.seq_start[item.seq];
  item.n_col = s.width[item.seq] * (a.n_head / a.n_kv) - item.tile * COLS;
  return item;
}

// The key ranges of the tile's columns, and where the item's pages lie.
__device__ __forceinline__ void find_columns(Shared& s, const Args& a, const Item& item, int base, int n_key) {
  const int group = a.n_head / a.n_kv;
#pragma unroll 1
  for (int c = threadIdx.x; c < ROOM; c += THREADS) {
    Seen seen = {0x7fffffff, 0};
    int q_row = -1;
    if (c < min(COLS, item.n_col)) {
      const int col = item.tile * COLS + c, row = item.start + col / group;
      const Seen own = seen_by(a.positions[row], a.lo[row], a.hi[row], a.window, a.n_page_col * a.page_size);
      if (a.row_seq[row] == item.seq && own.hi > 0) {
        seen = own;
        q_row = row * a.n_head + item.head * group + col % group;
      }
    }
    s.q_row[c] = q_row;
    s.lo[c] = seen.lo;
    s.hi[c] = seen.hi;
    s.run_m[c] = none_seen();
    s.run_l[c] = 0.f;
  }
#pragma unroll 1
  for (int i = THREADS - 1 - threadIdx.x; i < n_key / 16; i += THREADS) {  // other threads than the columns'
    const int p = base + 16 * i, col = min(p / a.page_size, a.n_page_col - 1);
    const i64 page = a.page_table[static_cast<i64>(item.seq) * a.n_page_col + col];
    const int safe = clamped(page < 0 || page > 0x7fffffff ? -1 : static_cast<int>(page), a.n_page, OP_ID, item.seq, a.fault);
    s.row16[i] = safe * a.page_size + p % a.page_size;
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    int min_lo = 0x7fffffff, max_hi = 0, max_lo = 0, min_hi = 0x7fffffff;
#pragma unroll 1
    for (int c = threadIdx.x; c < min(COLS, item.n_col); c += 32) {
      min_lo = min(min_lo, s.lo[c]), max_lo = max(max_lo, s.lo[c]);
      min_hi = min(min_hi, s.hi[c]), max_hi = max(max_hi, s.hi[c]);
    }
    const int hull[4] = {__reduce_min_sync(ALL, min_lo), __reduce_max_sync(ALL, max_hi), __reduce_max_sync(ALL, max_lo),
                         __reduce_min_sync(ALL, min_hi)};
    if (threadIdx.x == 0)
      for (int i = 0; i < 4; i++) s.hull[i] = hull[i];
  }
  __syncthreads();
}
