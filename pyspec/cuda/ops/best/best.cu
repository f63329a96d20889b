// best: the largest logit of each row, and where it is. Meaning: best_ref.py.
//
//   logits   [row, n_vocab]  f32   a row may begin wherever a float may
//   shares   [row, part]           value (its bits) and column that a part found; means nothing between launches
//   tickets  [row]           i32   zero before and after
//   tokens   [row]           i64   or null
//   pairs    [2, n_all]      f64   tokens and their logits, of these rows and of other launches'; or null
//
// A CTA looks at one part of one row; the last of a row to arrive looks at what all found. Parts may be of any number, up to
// the threads of a CTA: which is best depends on values and columns alone, never on who came first. For one row this is
// bound by latency: a few loads under way at once in every thread, one trip through shared memory, one ticket.
// Set by the launcher: THREADS, and per_part, the whole quads of a part.
#include "types.cuh"
#include "overlap.cuh"
#include "ticket.cuh"

constexpr u32 kAll = 0xffffffffu;
constexpr int kMost = 0x7fffffff, kLeast = -kMost - 1;
constexpr int kNowhere = kMost;  // the column of nothing
constexpr int kWarps = THREADS / 32;
constexpr int kAtOnce = 8;  // quads of a thread that are under way
static_assert(THREADS % 32 == 0 && kWarps <= 32, "a lane a warp");

struct Found {
  float value;
  int column;
};

// Columns of a thread come in ascending order: only what is better takes the place. No branches, which short cuts would be.
__device__ __forceinline__ void see(Found& best, float value, int column) {
  const bool is_above = !(value <= best.value) & !isnan(best.value);  // a NaN is not below anything
  best.value = is_above ? value : best.value;
  best.column = is_above ? column : best.column;
}

// In the order of values, as integers: both zeros are one, NaNs are one above all others, nothing is below all.
__device__ __forceinline__ int rank_of(Found f) {
  const int bits = __float_as_int(f.value + 0.f);
  const int rank = bits ^ (bits >> 31 & kMost);
  return f.column == kNowhere ? kLeast : isnan(f.value) ? kMost : rank;
}

// True for the one lane of a warp that has the best.
__device__ __forceinline__ bool has_best(Found mine) {
  const int rank = rank_of(mine), most = __reduce_max_sync(kAll, rank);
  const int first = __reduce_min_sync(kAll, rank == most ? mine.column : kNowhere);
  const u32 who = __ballot_sync(kAll, rank == most && mine.column == first);  // several only where all have nothing
  return __ffs(who) - 1 == static_cast<int>(threadIdx.x & 31);
}

// True for the one thread of a CTA whose `mine` is the best of all afterwards; it is of the first warp.
__device__ __forceinline__ bool has_best(Found& mine, Found (&each)[kWarps]) {
  if (has_best(mine)) each[threadIdx.x >> 5] = mine;
  __syncthreads();
  if (threadIdx.x >= 32) return false;
  mine = threadIdx.x < kWarps ? each[threadIdx.x] : Found{0.f, kNowhere};
  return has_best(mine);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    best(const float* logits, int2* shares, int* tickets, i64* tokens, double* pairs, int n_vocab, int per_part, int n_all) {
  __shared__ Found each[kWarps];
  __shared__ int is_last;
  const int part = blockIdx.x, n_part = gridDim.x, row = blockIdx.y;
  let_successor_start();
  const float* const own = logits + static_cast<i64>(row) * n_vocab;
  // Whole quads begin at multiples of 16 bytes. What of the row is before or behind them, up to 3 columns each, is the
  // first part's.
  const int n_before = min((4 - static_cast<int>(reinterpret_cast<u64>(own) >> 2 & 3)) & 3, n_vocab);
  const int n_quad = (n_vocab - n_before) / 4, behind = n_before + 4 * n_quad;
  const int begin = per_part * part + threadIdx.x, end = min(per_part * (part + 1), n_quad);
  const int before = part == 0 && threadIdx.x < n_before ? threadIdx.x : kNowhere;
  const int after = part == 0 && threadIdx.x < n_vocab - behind ? behind + threadIdx.x : kNowhere;
  const float4* const quads = reinterpret_cast<const float4*>(own + n_before);
  const int first = before != kNowhere ? before : begin < end ? n_before + 4 * begin : after;
  wait_for_predecessor();

  Found mine = {-__uint_as_float(0x7f800000u), first};  // the best there is where nothing is above it
  if (before != kNowhere) see(mine, own[before], before);
#pragma unroll 1
  for (int quad = begin; quad < end; quad += kAtOnce * THREADS) {
    float4 v[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k)
      if (quad + k * THREADS < end) v[k] = quads[quad + k * THREADS];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (quad + k * THREADS >= end) break;
      const int column = n_before + 4 * (quad + k * THREADS);
      see(mine, v[k].x, column);
      see(mine, v[k].y, column + 1);
      see(mine, v[k].z, column + 2);
      see(mine, v[k].w, column + 3);
    }
  }
  if (after != kNowhere) see(mine, own[after], after);

  int2* const found = shares + row * n_part;
  if (has_best(mine, each)) {
    __stcg(found + part, make_int2(__float_as_int(mine.value), mine.column));
    is_last = arrive(tickets + row) == n_part - 1;
    if (is_last) tickets[row] = 0;
  }
  __syncthreads();
  if (!is_last) return;
  const int2 theirs = threadIdx.x < n_part ? __ldcg(found + threadIdx.x) : make_int2(0, kNowhere);
  mine = {__int_as_float(theirs.x), theirs.y};
  if (has_best(mine, each)) {
    if (tokens) tokens[row] = mine.column;
    if (pairs) pairs[row] = mine.column, pairs[n_all + row] = mine.value;
  }
}
