// Items of index_rows_scores: a tile of a sequence's keys for some of its rows, as many rows as leave every CTA about one item. Lengths
// are read on the device, the grid hangs on none of them.
#pragma once
#include "blocks.cuh"

constexpr int MAX_SEQ = 128;  // of a launch

struct Items {
  int start[MAX_SEQ], rows[MAX_SEQ], keys[MAX_SEQ];  // of each sequence, cut to the rows of this launch
  int first[MAX_SEQ];                                // its first item
  int warp_sum[MAX_SEQ / 32];
  int total, per, tile;  // items; rows of an item, keys of its tile
};

struct Item {
  int seq, row, n, base, n_key;  // row: in this launch; base: the first of its keys; n_key: all that the sequence's last row sees
};

struct Group {  // rows of this launch, and of the batch; its sequences
  int first, n, n_all, first_seq, n_seq;
};

// Sum over the threads before this one, of MAX_SEQ; `all` of everybody's.
__device__ __forceinline__ int sum_before(Items& s, int mine, int& all) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = mine;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(ALL, sum, d);
    if (lane >= d) sum += other;
  }
  if (lane == 31 && warp < MAX_SEQ / 32) s.warp_sum[warp] = sum;
  __syncthreads();
  int before = 0;
  all = 0;
#pragma unroll
  for (int i = 0; i < MAX_SEQ / 32; i++) {
    before += i < warp ? s.warp_sum[i] : 0;
    all += s.warp_sum[i];
  }
  __syncthreads();
  return before + sum - mine;
}

// Tiles have `most` keys, or half as many down to `least` while all of them together leave CTAs idle. By a block of MAX_SEQ threads or more.
__device__ __forceinline__ void find_items(Items& s, const Blocks& blocks, const i64* positions, const int* seq_start,
                                           const Group& group, int top_k, int stride, int least, int most, int* fault) {
  const int mine = threadIdx.x, seq = group.first_seq + mine, n_cta = static_cast<int>(gridDim.x);
  int rows = 0, keys = 0;
  if (mine < group.n_seq && mine < MAX_SEQ) {
    const int start = max(seq_start[seq], group.first);
    rows = min(min(seq_start[seq + 1], group.first + group.n), group.n_all) - start;
    if (rows > 0) keys = blocks.seen(positions[start + rows - 1], OP_ID, seq, fault);
    if (rows <= 0 || keys <= top_k || clamped(keys, stride + 1, OP_ID, seq, fault) != keys) rows = keys = 0;
    s.start[mine] = start, s.rows[mine] = rows, s.keys[mine] = keys;
  }
  int work, total, tile = least;
  sum_before(s, rows * ((keys + least - 1) / least), work);
  while (tile < most && work > n_cta) tile *= 2, work = (work + 1) / 2;
  const int per = max(1, (work + n_cta - 1) / n_cta);
  const int before = sum_before(s, (keys + tile - 1) / tile * ((rows + per - 1) / per), total);
  if (mine < group.n_seq && mine < MAX_SEQ) s.first[mine] = before;
  if (mine == 0) s.total = total, s.per = per, s.tile = tile;
  __syncthreads();
}

__device__ __forceinline__ Item item_of(const Items& s, const Group& group, int index) {
  int seq = 0;
  for (int step = MAX_SEQ / 2; step > 0; step /= 2)  // the last sequence that begins at or before the item
    if (seq + step < group.n_seq && s.first[seq + step] <= index) seq += step;
  const int n_key = s.keys[seq], tiles = (n_key + s.tile - 1) / s.tile, i = index - s.first[seq], begin = i / tiles * s.per;
  return {seq, s.start[seq] + begin - group.first, min(s.per, s.rows[seq] - begin), i % tiles * s.tile, n_key};
}
