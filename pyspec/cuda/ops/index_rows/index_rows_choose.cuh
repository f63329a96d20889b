// The best `top_k` of a row's scores, ascending. One CTA a row: three passes count the digits of the scores' order (11, 11 and 10 bits) and
// find the last score that is taken and how many of its equals are, a fourth writes what is above, and the first of those. Up to HELD
// scores stay in registers between the passes, more are read again.
#pragma once

constexpr int CHOOSERS = 1024, HELD_EACH = 16, HELD = CHOOSERS * HELD_EACH, DIGITS = 2048;

struct Counts {
  int of[DIGITS];
  int warp[CHOOSERS / 32], above[CHOOSERS / 32], equal[CHOOSERS / 32];
  int digit, left;
};

// Larger scores have larger numbers; both zeros the same; NaN comes last.
__device__ __forceinline__ u32 order_of(float x) {
  if (x != x) return 0u;
  const u32 bits = __float_as_uint(x);
  if (bits << 1 == 0) return 0x80000000u;
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Of counts from the highest digit down: where the sum reaches `left`, and how many are still wanted of that digit.
__device__ __forceinline__ void find_digit(Counts& c, int n_digit, int left) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, high = n_digit - 1 - 2 * static_cast<int>(threadIdx.x);
  const int a = high > 0 ? c.of[high] : 0, b = high > 0 ? c.of[high - 1] : 0;
  int sum = a + b;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(ALL, sum, d);
    if (lane >= d) sum += other;
  }
  if (lane == 31) c.warp[warp] = sum;
  __syncthreads();
  int before = 0;
  for (int i = 0; i < warp; i++) before += c.warp[i];
  before += sum - a - b;
  if (before < left && before + a + b >= left) {
    const bool first = before + a >= left;
    c.digit = first ? high : high - 1;
    c.left = left - before - (first ? 0 : a);
  }
  __syncthreads();
}

// A thread's scores of a row, in registers where they fit. (A function: NVRTC before 13.1 takes a generic lambda for the host's.)
template <bool kHeld>
struct Scores {
  const float* scores;
  int n, steps, first;
  u32 held[kHeld ? HELD_EACH : 1];

  __device__ __forceinline__ u32 at(int i) const { return i < n ? order_of(__ldcg(scores + i)) : 0u; }

  __device__ __forceinline__ Scores(const float* scores, int n) : scores(scores), n(n), steps((n + CHOOSERS - 1) / CHOOSERS) {
    first = threadIdx.x / 32 * steps * 32 + threadIdx.x % 32;  // a warp's scores lie side by side
    if (kHeld) {
#pragma unroll
      for (int i = 0; i < HELD_EACH; i++) held[i] = i < steps ? at(first + 32 * i) : 0u;
    }
  }

  // f(number, score); every lane of a warp comes along
  template <class F>
  __device__ __forceinline__ void each(F f) const {
    if (kHeld) {
#pragma unroll
      for (int i = 0; i < HELD_EACH; i++)
        if (i < steps) f(first + 32 * i, held[kHeld ? i : 0]);
    } else {
#pragma unroll 4
      for (int i = 0; i < steps; i++) f(first + 32 * i, at(first + 32 * i));
    }
  }
};

template <bool kHeld>
__device__ __forceinline__ void choose(Counts& c, const float* scores, int n, int top_k, int seq, int* out, int* fault) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Scores<kHeld> own(scores, n);
  u32 prefix = 0, mask = 0;
  int left = top_k;
  bool bad = false;
#pragma unroll 1
  for (int pass = 0; pass < 3; pass++) {
    const int shift = pass == 0 ? 21 : pass == 1 ? 10 : 0, n_digit = pass == 2 ? 1024 : 2048;
    for (int i = threadIdx.x; i < n_digit; i += CHOOSERS) c.of[i] = 0;
    __syncthreads();
    own.each([&](int i, u32 x) {
      if (i < n && (x & mask) == prefix) atomicAdd(&c.of[x >> shift & (n_digit - 1)], 1);
      bad = bad || (i < n && x == 0u);
    });
    __syncthreads();
    find_digit(c, n_digit, left);
    prefix |= static_cast<u32>(c.digit) << shift;
    mask |= static_cast<u32>(n_digit - 1) << shift;
    left = c.left;
    __syncthreads();
  }
  if (bad) clamped(-1, n, OP_ID, seq, fault);  // NaN
  int above = 0, equal = 0;
  own.each([&](int i, u32 x) {
    above += __popc(__ballot_sync(ALL, i < n && x > prefix));
    equal += __popc(__ballot_sync(ALL, i < n && x == prefix));
  });
  if (lane == 0) c.above[warp] = above, c.equal[warp] = equal;
  __syncthreads();
  above = equal = 0;
  for (int i = 0; i < warp; i++) above += c.above[i], equal += c.equal[i];
  const u32 lower = (1u << lane) - 1;
  own.each([&](int i, u32 x) {
    const u32 more = __ballot_sync(ALL, i < n && x > prefix), same = __ballot_sync(ALL, i < n && x == prefix);
    const int rank = equal + __popc(same & lower), place = above + __popc(more & lower) + min(rank, left);
    const bool taken = more >> lane & 1 || (same >> lane & 1 && rank < left);
    if (taken) out[place] = i;
    above += __popc(more), equal += __popc(same);
  });
}

// Grid (row), block CHOOSERS.
extern "C" __global__ void __launch_bounds__(CHOOSERS)
index_rows_choose(const float* scores, const i64* table, const i64* positions, const int* row_seq, int* out, int* fault, int n_col,
                  int page_size, int ratio, int per_page, int n_page, int top_k, int first, int stride) {
  let_successor_start();
  __shared__ Counts c;
  const int row = first + blockIdx.x, seq = row_seq[row];
  const Blocks blocks = {table, n_col, page_size, ratio, per_page, n_page};
  const int n = seq < 0 ? 0 : blocks.seen(positions[row], OP_ID, seq, fault);
  int* const to = out + static_cast<i64>(row) * top_k;
  const float* const from = scores + static_cast<i64>(blockIdx.x) * stride;
  wait_for_predecessor();
  if (n <= top_k || clamped(n, stride + 1, OP_ID, seq, fault) != n) {  // all, or nothing that was scored
    for (int i = threadIdx.x; i < top_k; i += CHOOSERS) to[i] = i < n && n <= top_k ? i : -1;
  } else if (n <= HELD) {
    choose<true>(c, from, n, top_k, seq, to, fault);
  } else {
    choose<false>(c, from, n, top_k, seq, to, fault);
  }
}
