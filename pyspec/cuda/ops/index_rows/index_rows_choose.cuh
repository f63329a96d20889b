// The best `top_k` of a row's scores, ascending. One CTA a row: passes over the digits of the scores' order (11, 11 and 10 bits) count, and
// keep what has the digit that the last one taken has. Once no more than FEW are left they are ranked one by one; a last pass writes all
// that are no worse. Up to HELD scores stay in shared memory between the passes, more are read again.
#pragma once

constexpr int CHOOSERS = 1024, HELD = 16 * CHOOSERS, PASSES = 3, FEW = 32;

struct Counts {
  int of[2][2048];  // by digit; the third pass takes the first's again
  int warp[CHOOSERS / 32], other[CHOOSERS / 32];
  u32 rival[FEW];
  int rival_at[FEW];
  int n_rival;
  int digit, left, n;  // of the digit: how many of it are taken, and how many there are
  u32 worst;           // that is taken,
  int last;            // and of its equals the last one
};

__device__ __forceinline__ int digits_of(int pass) { return pass == 2 ? 1024 : 2048; }
__device__ __forceinline__ int shift_of(int pass) { return pass == 0 ? 21 : pass == 1 ? 10 : 0; }

__device__ __forceinline__ void clear(int* counts) {
  for (int i = threadIdx.x; i < 2048; i += CHOOSERS) counts[i] = 0;
}

constexpr u32 NO_SCORE = 0, NO_NUMBER = 1;

// Larger scores have larger numbers; both zeros the same; NaN comes last, and what is no score is less than all.
__device__ __forceinline__ u32 order_of(float x) {
  if (x != x) return NO_NUMBER;
  const u32 bits = __float_as_uint(x);
  if (bits << 1 == 0) return 0x80000000u;
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// What the warps before this one have together; each has its own in `of`.
__device__ __forceinline__ int sum_of_earlier(const int* of) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  return __reduce_add_sync(ALL, lane < warp ? of[lane] : 0);
}

// Of counts from the highest digit down: where the sum reaches `left`, and how many are still wanted of that digit.
__device__ __forceinline__ void find_digit(Counts& c, const int* of, int n_digit, int left) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, high = n_digit - 1 - 2 * static_cast<int>(threadIdx.x);
  const int a = high > 0 ? of[high] : 0, b = high > 0 ? of[high - 1] : 0;
  int sum = a + b;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(ALL, sum, d);
    if (lane >= d) sum += other;
  }
  if (lane == 31) c.warp[warp] = sum;
  __syncthreads();
  const int before = sum_of_earlier(c.warp) + sum - a - b;
  if (before < left && before + a + b >= left) {
    const bool first = before + a >= left;
    c.digit = first ? high : high - 1;
    c.left = left - before - (first ? 0 : a);
    c.n = first ? a : b;
  }
  __syncthreads();
}

// A thread's scores of a row. (A function, for NVRTC before 13.1 takes a generic lambda for the host's; and loops are short, for this runs
// once and its instructions have to come, too.)
template <bool kHeld>
struct Scores {
  const float* scores;
  u32* held;
  int n, steps, first;

  __device__ __forceinline__ Scores(const float* scores, int n, u32* held)
      : scores(scores), held(held), n(n), steps((n + CHOOSERS - 1) / CHOOSERS) {
    constexpr int AT_ONCE = 8;
    first = threadIdx.x / 32 * steps * 32 + threadIdx.x % 32;  // a warp's scores lie side by side
#pragma unroll 1
    for (int k = 0; kHeld && k < steps; k += AT_ONCE) {
      float x[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++)
        if (k + i < steps && at(k + i) < n) x[i] = __ldcg(scores + at(k + i));
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++)
        if (k + i < steps && at(k + i) < n) held[at(k + i)] = order_of(x[i]);
    }
  }

  __device__ __forceinline__ int at(int step) const { return first + 32 * step; }

  // f(number, score); every lane of a warp comes along
  template <class F>
  __device__ __forceinline__ void each(F f) const {
#pragma unroll(kHeld ? 1 : 4)
    for (int k = 0; k < steps; k++) {
      const int i = at(k);
      u32 x = NO_SCORE;
      if (i < n) x = kHeld ? held[i] : order_of(__ldcg(scores + i));
      f(i, x);
    }
  }
};

// Of those that begin as `prefix` does, FEW at most, `left` are taken.
template <bool kHeld>
__device__ __forceinline__ void rank_few(Counts& c, const Scores<kHeld>& own, u32 prefix, u32 mask, int left) {
  own.each([&](int i, u32 x) {
    if (x != NO_SCORE && (x & mask) == prefix) {
      const int to = atomicAdd(&c.n_rival, 1);
      c.rival[to] = x, c.rival_at[to] = i;
    }
  });
  __syncthreads();
  const int n = c.n_rival, lane = threadIdx.x;
  if (lane < n) {  // of the first warp
    const u32 x = c.rival[lane];
    const int i = c.rival_at[lane];
    int rank = 0;
    for (int k = 0; k < n; k++) rank += c.rival[k] > x || (c.rival[k] == x && c.rival_at[k] < i);
    if (rank == left - 1) c.worst = x, c.last = i;
  }
  __syncthreads();
}

// Of all that equal `worst` the first `left` are taken.
template <bool kHeld>
__device__ __forceinline__ void rank_equals(Counts& c, const Scores<kHeld>& own, u32 worst, int left) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int equal = 0;
  own.each([&](int i, u32 x) { equal += __popc(__ballot_sync(ALL, x == worst)); });
  if (lane == 0) c.warp[warp] = equal;
  __syncthreads();
  equal = sum_of_earlier(c.warp);
  own.each([&](int i, u32 x) {
    const u32 same = __ballot_sync(ALL, x == worst);
    if ((same >> lane & 1) && equal + __popc(same & ((1u << lane) - 1)) == left - 1) c.worst = worst, c.last = i;
    equal += __popc(same);
  });
  __syncthreads();
}

// c.of is zero, and c.n_rival.
template <bool kHeld>
__device__ __forceinline__ void choose(Counts& c, const Scores<kHeld>& own, int top_k, int seq, int* out, int* fault) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  u32 prefix = 0, mask = 0;
  int left = top_k, n_left = own.n;
  bool bad = false;
#pragma unroll 1
  for (int pass = 0; pass < PASSES && (pass == 0 || n_left > FEW); pass++) {
    const int shift = shift_of(pass), n_digit = digits_of(pass);
    int* const of = c.of[pass % 2];
    if (pass == 2) {
      clear(of);
      __syncthreads();
    }
    own.each([&](int i, u32 x) {
      if (x != NO_SCORE && (x & mask) == prefix) atomicAdd(&of[x >> shift & (n_digit - 1)], 1);
      bad = bad || x == NO_NUMBER;
    });
    __syncthreads();
    find_digit(c, of, n_digit, left);
    prefix |= static_cast<u32>(c.digit) << shift;
    mask |= static_cast<u32>(n_digit - 1) << shift;
    left = c.left, n_left = c.n;
  }
  if (bad) clamped(-1, own.n, OP_ID, seq, fault);  // NaN
  if (n_left <= FEW)
    rank_few(c, own, prefix, mask, left);
  else
    rank_equals(c, own, prefix, left);
  const u32 worst = c.worst;
  const int last = c.last;
  int taken = 0;
  own.each([&](int i, u32 x) { taken += __popc(__ballot_sync(ALL, x > worst || (x == worst && i <= last))); });
  if (lane == 0) c.other[warp] = taken;
  __syncthreads();
  taken = sum_of_earlier(c.other);
  own.each([&](int i, u32 x) {
    const bool is_taken = x > worst || (x == worst && i <= last);
    const u32 all = __ballot_sync(ALL, is_taken);
    if (is_taken) out[taken + __popc(all & ((1u << lane) - 1))] = i;
    taken += __popc(all);
  });
}

// Grid (row), block CHOOSERS, HELD words of shared memory or as many as a row has scores at most.
extern "C" __global__ void __launch_bounds__(CHOOSERS)
index_rows_choose(const float* scores, const i64* table, const i64* positions, const int* row_seq, int* out, int* fault, int n_col,
                  int page_size, int ratio, int per_page, int n_page, int top_k, int first, int stride) {
  let_successor_start();
  __shared__ Counts c;
  extern __shared__ __align__(16) char raw[];
  u32* const held = reinterpret_cast<u32*>(raw);
  const int row = first + blockIdx.x, seq = row_seq[row];
  const Blocks blocks = {table, n_col, page_size, ratio, per_page, n_page};
  const int n = seq < 0 ? 0 : blocks.seen(positions[row], OP_ID, seq, fault);
  int* const to = out + static_cast<i64>(row) * top_k;
  const float* const from = scores + static_cast<i64>(blockIdx.x) * stride;
  clear(c.of[0]), clear(c.of[1]);
  if (threadIdx.x == 0) c.n_rival = 0;
  __syncthreads();
  wait_for_predecessor();
  if (n <= top_k || clamped(n, stride + 1, OP_ID, seq, fault) != n) {  // all, or nothing that was scored
    for (int i = threadIdx.x; i < top_k; i += CHOOSERS) to[i] = i < n && n <= top_k ? i : -1;
  } else if (n <= HELD) {
    choose(c, Scores<true>(from, n, held), top_k, seq, to, fault);
  } else {
    choose(c, Scores<false>(from, n, held), top_k, seq, to, fault);
  }
}
