// The best `top_k` of a row's scores, ascending. One CTA a row: a pass counts scores by where they lie between the least and the largest, and
// the few that lie where the last one taken does are compared with each other; where they are many (equal ones, or most in a small part),
// three passes count the digits of the scores' order (11, 11 and 10 bits) instead. Then it is known which score is the last one taken and how
// many of its equals are, and a last pass writes what is above, and the first of those. Up to HELD
// scores stay in registers between the passes, more are read again. (Digits alone took twice as long: scores have a few exponents, so
// most of them meet in a few counters.)
#pragma once

constexpr int CHOOSERS = 1024, HELD_EACH = 16, HELD = CHOOSERS * HELD_EACH, DIGITS = 2048;

constexpr int MOST_CLOSE = 256;  // scores that are compared with each other

struct Counts {
  int of[DIGITS];
  u32 close[MOST_CLOSE];
  u32 least[CHOOSERS / 32], most[CHOOSERS / 32];
  u32 last;
  int n_close;
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

__device__ __forceinline__ float score_of(u32 order) {  // order_of's inverse
  return __uint_as_float(order & 0x80000000u ? order & 0x7fffffffu : ~order);
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

struct Taken {  // the last score that is taken, and how many of its equals are; none: it was not found
  u32 last;
  int left;
  bool is_found;
};

// Where scores spread: a place for each 2048th between the least and the largest, those of one place compared with each other.
template <bool kHeld>
__device__ __forceinline__ Taken find_between(Counts& c, const Scores<kHeld>& own, int n, int top_k) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  u32 least = ALL, most = 0;
  own.each([&](int i, u32 x) {
    if (i < n && x != 0u) least = min(least, x), most = max(most, x);
  });
#pragma unroll
  for (int hop = 16; hop > 0; hop /= 2) {
    least = min(least, __shfl_xor_sync(ALL, least, hop));
    most = max(most, __shfl_xor_sync(ALL, most, hop));
  }
  if (lane == 0) c.least[warp] = least, c.most[warp] = most;
  for (int i = threadIdx.x; i < DIGITS; i += CHOOSERS) c.of[i] = 0;
  if (threadIdx.x == 0) c.n_close = 0;
  __syncthreads();
  least = c.least[lane], most = c.most[lane];
#pragma unroll
  for (int hop = 16; hop > 0; hop /= 2) {
    least = min(least, __shfl_xor_sync(ALL, least, hop));
    most = max(most, __shfl_xor_sync(ALL, most, hop));
  }
  const float low = score_of(least), by = (DIGITS - 1) / (score_of(most) - low);
  if (!(by > 0.f && by < 3e38f)) return {0, 0, false};  // all the same, none, or infinite ones
  const auto place = [&](u32 x) {  // greater or the same for greater scores
    return x == 0u ? 0 : min(max(static_cast<int>((score_of(x) - low) * by), 0), DIGITS - 1);
  };
  own.each([&](int i, u32 x) {
    if (i < n) atomicAdd(&c.of[place(x)], 1);
  });
  __syncthreads();
  find_digit(c, DIGITS, top_k);
  const int digit = c.digit, left = c.left, n_close = c.of[digit];
  if (n_close > MOST_CLOSE) return {0, 0, false};
  own.each([&](int i, u32 x) {
    if (i < n && place(x) == digit) c.close[atomicAdd(&c.n_close, 1)] = x;
  });
  __syncthreads();
  if (static_cast<int>(threadIdx.x) < n_close) {
    const u32 mine = c.close[threadIdx.x];
    int above = 0, equal = 0;
    for (int i = 0; i < n_close; i++) above += c.close[i] > mine, equal += c.close[i] == mine;
    if (above < left && above + equal >= left) c.last = mine, c.left = left - above;  // its equals write the same
  }
  __syncthreads();
  return {c.last, c.left, true};
}

template <bool kHeld>
__device__ __forceinline__ void choose(Counts& c, const float* scores, int n, int top_k, int seq, int* out, int* fault) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Scores<kHeld> own(scores, n);
  const Taken found = find_between<kHeld>(c, own, n, top_k);
  u32 prefix = found.last, mask = 0;
  int left = found.is_found ? found.left : top_k;
  bool bad = false;
  own.each([&](int i, u32 x) { bad = bad || (i < n && x == 0u); });
  __syncthreads();
#pragma unroll 1
  for (int pass = 0; pass < 3 && !found.is_found; pass++) {
    const int shift = pass == 0 ? 21 : pass == 1 ? 10 : 0, n_digit = pass == 2 ? 1024 : 2048;
    for (int i = threadIdx.x; i < n_digit; i += CHOOSERS) c.of[i] = 0;
    __syncthreads();
    own.each([&](int i, u32 x) {
      if (i < n && (x & mask) == prefix) atomicAdd(&c.of[x >> shift & (n_digit - 1)], 1);
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
