// moe_route: scores of all experts for each row (moe_scores), then the best of them (moe_choose). Of the fewest rows one launch does
// both, beside a product (moe_both). Meaning: moe_ref.py.
//
//   x        [row, N_IN]              f32  as they are; normed on the way
//   norm     [N_IN]                   f32
//   matrix   [N_EXPERT + GATED, N_IN] f32
//   logits   [row, N_EXPERT + GATED]  f32  written by the first, read by the second
//   bias     [N_EXPERT]               f32  takes part in the choice alone (BIASED); GIVEN: [row, N_USED] i32 the experts of a row,
//                                          which then are not chosen
//   ids      [row, N_USED]            i32  best first, of equal ones the lower index; in range whatever the logits are
//   weights  [row, N_USED]            f32
//   gate     [row]                    f32  sigmoid of the last logit (GATED)
//   blocks, sums, powers                   the rows normed, as rows.cu's LAYOUT 0 (or, if `pad` is 0, 3) has them, for the experts;
//                                          null: not wanted
//   tickets  [row]                    i32  moe_both: zero before and after
//
// Sums have an order of their own for each row and score: a row's bits depend neither on the others nor on the grid. Bound
// by latency at few rows, so what is the model's is loaded before the predecessor is over: all of a CTA's matrix. Pointers to
// it are not `const __restrict__`: loads of constants ptxas (13.0) puts behind the wait.
// Set by the launcher: N_IN, N_EXPERT (at most 512), N_USED (at most 32), SIGMOID, RENORM, BIASED, GATED; where wanted
// SQRTSOFTPLUS, GIVEN.
#ifndef SQRTSOFTPLUS
#define SQRTSOFTPLUS 0
#endif
#ifndef GIVEN
#define GIVEN 0
#endif
#include "overlap.cuh"
#include "prepared.cuh"
#include "ticket.cuh"

constexpr u32 kAll = 0xffffffffu;

// ---- scores

constexpr int kScores = N_EXPERT + GATED;
constexpr int kKept = 2;  // scores of a warp
constexpr int kQuads = N_IN / 4;
constexpr int kParts = (kQuads + 255) / 256;                       // warps that share the columns of a score
constexpr int kEach = ((kQuads + kParts - 1) / kParts + 31) / 32;  // quads of a lane, at most 8
constexpr int kWarpsMost = 16;
constexpr int kRowsMost = 32;  // of a CTA
static_assert(N_IN % 4 == 0 && kParts <= kWarpsMost, "whole quads, and a CTA has all columns");

__device__ __forceinline__ float dot(float4 a, float4 b, float sum) {
  return fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, fmaf(a.w, b.w, sum))));
}

struct Blocks {  // where normed rows go
  u16* blocks;
  float *sums, *powers;
  int pad;  // 0: in planes
  float power;

  __device__ __forceinline__ void put(int row, int column, float4 v, float factor, bool is_in) const {
    if (pad == 0) {
      u8* to = reinterpret_cast<u8*>(blocks) + row * static_cast<i64>(plane_bytes(N_IN));
      put_in_planes<16>(to, column, times(v, factor), is_in);
    } else {
      put_in_block(blocks, sums, pad, row, column, halves_of(v, factor), is_in);
    }
  }
};

// kBeside: who wrote it was not waited for, so it is not looked for in L1.
template <bool kBeside>
__device__ __forceinline__ float4 load_row(const float4* from, bool is_in) {
  if (!is_in) return make_float4(0.f, 0.f, 0.f, 0.f);
  return kBeside ? __ldcg(from) : *from;
}

// Norms a row for each group of kParts warps, from `first` on, with the sum of squares that scores are divided by.
template <bool kBeside>
__device__ __forceinline__ void prepare_rows(const float4* x, const float4* norm, Blocks to, int first, int n_row, float eps) {
  __shared__ float squares[kWarpsMost];
  constexpr int kAll256 = (N_IN + 255) / 256 * 64;  // quads of whole blocks of 256 columns
  constexpr int kSpare = (kAll256 - kParts * kEach * 32 + 31) / 32;  // beyond what warps share: zeros, the last warp's
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, part = warp % kParts, row = first + warp / kParts;
  const int quad = part * kEach * 32 + lane;
  const bool is_row = row < n_row;
  float4 by[kEach], v[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) by[i] = quad + 32 * i < kQuads ? norm[quad + 32 * i] : make_float4(0.f, 0.f, 0.f, 0.f);
  if (!kBeside) wait_for_predecessor();
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    v[i] = load_row<kBeside>(x + static_cast<i64>(row) * kQuads + quad + 32 * i, is_row && quad + 32 * i < kQuads);
    sum = dot(v[i], v[i], sum);
  }
  sum = warp_sum(sum);
  if (lane == 0) squares[warp] = sum;
  __syncthreads();
  if (!is_row) return;
  float all = 0.f;
#pragma unroll
  for (int k = 0; k < kParts; ++k) all += squares[warp - part + k];
  const float factor = rsqrtf(all / N_IN + eps) / (to.pad ? to.power : 1.f);
  if (part == 0 && lane == 0 && to.pad) to.powers[row] = to.power;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const float4 y = make_float4(v[i].x * by[i].x, v[i].y * by[i].y, v[i].z * by[i].z, v[i].w * by[i].w);
    to.put(row, (quad + 32 * i) * 4, y, factor, quad + 32 * i < kAll256);
  }
  if (part != kParts - 1) return;
#pragma unroll
  for (int i = 0; i < kSpare; ++i)
    to.put(row, (quad + 32 * (kEach + i)) * 4, make_float4(0.f, 0.f, 0.f, 0.f), 1.f, quad + 32 * (kEach + i) < kAll256);
}

// Each group of kParts warps makes kOwn scores of `n` rows, kRows at most, from `first` on: those of `column` groups before it come first.
// kBeside: of one row, which is there already.
template <int kOwn, int kRows, bool kBeside>
__device__ __forceinline__ void make_scores(const float4* x, const float4* norm, const float4* matrix, float* logits, int column,
                                            int first, int n, float eps) {
  __shared__ float sums[kRows][kWarpsMost][kOwn + 1];  // of each warp: its scores, and squares
  const int warp = threadIdx.x >> 5, n_group = blockDim.x / (32 * kParts);
  const int score = (column * n_group + warp / kParts) * kOwn;
  const int quad = warp % kParts * kEach * 32 + (threadIdx.x & 31);  // the lane's first
  const float4* own = x + static_cast<i64>(first) * kQuads + quad;

  float4 w[kOwn][kEach], by[kEach], v[kEach];
  if (kBeside) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) v[i] = load_row<true>(own + 32 * i, quad + 32 * i < kQuads);
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const bool is_in = quad + 32 * i < kQuads;
    by[i] = is_in ? norm[quad + 32 * i] : make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int k = 0; k < kOwn; ++k)  // a score too many is another's, and is not kept
      w[k][i] = is_in ? matrix[static_cast<i64>(min(score + k, kScores - 1)) * kQuads + quad + 32 * i] : by[i];
  }
#pragma unroll
  for (int k = 0; k < kOwn; ++k)
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      w[k][i] = make_float4(w[k][i].x * by[i].x, w[k][i].y * by[i].y, w[k][i].z * by[i].z, w[k][i].w * by[i].w);
  if (!kBeside) wait_for_predecessor();

  for (int r = 0; r < n; ++r, own += kQuads) {
    if (!kBeside) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) v[i] = load_row<false>(own + 32 * i, quad + 32 * i < kQuads);
    }
    float sum[kOwn + 1] = {};
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
#pragma unroll
      for (int k = 0; k < kOwn; ++k) sum[k] = dot(w[k][i], v[i], sum[k]);
      sum[kOwn] = dot(v[i], v[i], sum[kOwn]);
    }
#pragma unroll
    for (int k = 0; k <= kOwn; ++k) {
      const float total = warp_sum(sum[k]);
      if ((threadIdx.x & 31) == 0) sums[r][warp][k] = total;
    }
  }
  __syncthreads();
  const int n_own = n_group * kOwn;
  for (int i = threadIdx.x; i < n * n_own; i += blockDim.x) {
    const int r = i / n_own, k = i % n_own, at = column * n_own + k;
    float total = 0.f, squares = 0.f;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const float* from = sums[r][k / kOwn * kParts + part];
      total += from[k % kOwn];
      squares += from[kOwn];
    }
    if (at < kScores) logits[static_cast<i64>(first + r) * kScores + at] = total * rsqrtf(squares / N_IN + eps);
  }
}

// A CTA has any whole number of groups of kParts warps; each group makes kKept scores of the CTA's `per_cta` rows. CTAs from
// `n_score` on norm rows, a group one.
extern "C" __global__ void __launch_bounds__(32 * kWarpsMost)
    moe_scores(const float4* x, const float4* norm, const float4* matrix, float* logits, u16* blocks, float* block_sums,
               float* powers, int n_row, int per_cta, int n_score, int pad, float eps, float power) {
  let_successor_start();
  if (static_cast<int>(blockIdx.x) >= n_score) {
    const int at = (blockIdx.x - n_score) * gridDim.y + blockIdx.y, n_group = blockDim.x / (32 * kParts);
    prepare_rows<false>(x, norm, {blocks, block_sums, powers, pad, power}, at * n_group, n_row, eps);
    return;
  }
  const int first = blockIdx.y * per_cta;
  make_scores<kKept, kRowsMost, false>(x, norm, matrix, logits, blockIdx.x, first, min(per_cta, n_row - first), eps);
}

// ---- choice
//
// Scores are ranked as integers that differ for every expert. Of groups of experts the best are found first: what is below the
// N_USED-th of those can not be chosen, and the few others count how many are better than each.

constexpr float kLeastSum = 6.103515625e-5f;
constexpr int kThreads = (N_EXPERT + 31) / 32 * 32, kWarps = kThreads / 32;  // a thread an expert
constexpr int kGroup = N_EXPERT > 256 ? 16 : N_EXPERT > 128 ? 8 : N_EXPERT > 64 ? 4 : N_EXPERT > 32 ? 2 : 1;
constexpr int kGroups = kThreads / kGroup;
static_assert(kGroups <= 32 && N_USED <= 32 && N_USED <= N_EXPERT, "a lane a group, a lane a choice");

struct alignas(16) Two {
  u64 a, b;
};

__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

#if SQRTSOFTPLUS
// Neither overflows nor loses what is left of large negative ones; no number stays none.
__device__ __forceinline__ float sqrt_softplus(float x) { return sqrtf((x < 0.f ? 0.f : x) + log1pf(expf(-fabsf(x)))); }
#endif
#define EACH_ALONE (SIGMOID || SQRTSOFTPLUS)  // an expert's score needs no other's

// Greater for the greater score, of equal ones for the lower index; no numbers are the least. Never 0.
__device__ __forceinline__ u64 rank_of(float score, int expert) {
  const u32 bits = __float_as_uint(score + 0.f);  // both zeros are one
  const u32 upper = isnan(score) ? 0u : bits >> 31 ? ~bits : bits | 0x80000000u;
  return static_cast<u64>(upper) << 32 | (kAll - static_cast<u32>(expert));
}

__device__ __forceinline__ float score_of(u64 rank) {
  const u32 upper = static_cast<u32>(rank >> 32);
  return __uint_as_float(upper >> 31 ? upper & 0x7fffffffu : ~upper);
}

__device__ __forceinline__ float over_block(float mine, bool is_sum, float (&each)[kWarps]) {
  mine = is_sum ? warp_sum(mine) : warp_max(mine);
  if ((threadIdx.x & 31) == 0) each[threadIdx.x >> 5] = mine;
  __syncthreads();
  float all = each[0];
#pragma unroll
  for (int i = 1; i < kWarps; ++i) all = is_sum ? all + each[i] : fmaxf(all, each[i]);
  return all;
}

// Chooses for row `row`, a thread an expert: `shift` is its bias, `named` (GIVEN) of the first threads an expert of the row.
template <bool kBeside>
__device__ __forceinline__ void choose(const float* logits, float shift, int named, int row, int* ids, float* weights, float* gate,
                                       float scale) {
  __shared__ __align__(16) u64 leaders[32];
  __shared__ __align__(16) u64 rivals[kThreads];
  __shared__ float p_of[kThreads];
  __shared__ float each[kWarps];
  __shared__ float picked[N_USED];
  __shared__ int chosen[N_USED];
  __shared__ u64 least, first;
  __shared__ int n_rival;
  const int expert = threadIdx.x, lane = expert & 31;
  const bool is_one = expert < N_EXPERT;
  const float* own = logits + static_cast<i64>(row) * kScores;
  const float logit = !is_one ? -__uint_as_float(0x7f800000u) : kBeside ? __ldcg(own + expert) : own[expert];
#if GATED
  if (expert == 0) gate[row] = sigmoid(kBeside ? __ldcg(own + N_EXPERT) : own[N_EXPERT]);
#endif

  float p = 0.f, score = logit;
#if SQRTSOFTPLUS
  p = is_one ? sqrt_softplus(logit) : 0.f;
#elif SIGMOID
  p = sigmoid(logit);
#elif BIASED || GIVEN
  __shared__ float maxima[kWarps];
  p = expf(logit - over_block(logit, false, maxima));
  p /= over_block(is_one ? p : 0.f, true, each);
#endif
#if GIVEN
  p_of[expert] = p;
  __syncthreads();
  if (expert < N_USED) {
    chosen[expert] = min(max(named, 0), N_EXPERT - 1);
    picked[expert] = p_of[chosen[expert]];
  }
#else
  if (BIASED) score = p + shift;
  const u64 rank = is_one ? rank_of(score, expert) : 0;

  u64 best = rank;
#pragma unroll
  for (int hop = kGroup / 2; hop > 0; hop >>= 1) {
    const u64 other = __shfl_xor_sync(kAll, best, hop);
    best = other > best ? other : best;
  }
  if (expert % kGroup == 0) leaders[expert / kGroup] = best;
  rivals[expert] = 0;
  if (expert == 0) n_rival = 0, least = 1;  // with fewer groups than choices everyone is a rival
  __syncthreads();

  if (expert < 32) {
    const u64 leader = lane < kGroups ? leaders[lane] : 0;
    int n_better = 0;
#pragma unroll
    for (int i = 0; i < kGroups; i += 2) {
      const Two other = *reinterpret_cast<const Two*>(leaders + i);
      n_better += (other.a > leader) + (other.b > leader);
    }
    if (leader && n_better == N_USED - 1) least = leader;
    if (leader && n_better == 0) first = leader;
  }
  __syncthreads();
#if !EACH_ALONE && !BIASED
  p = is_one ? expf(logit - score_of(first)) : 0.f;
  const float sum = warp_sum(p);
  if (lane == 0) each[expert >> 5] = sum;
#endif
  p_of[expert] = p;
  const u32 here = __ballot_sync(kAll, rank >= least);
  int place = 0;
  if (lane == 0 && here) place = atomicAdd(&n_rival, __popc(here));
  place = __shfl_sync(kAll, place, 0) + __popc(here & ((1u << lane) - 1));
  if (rank >= least) rivals[place] = rank;
  __syncthreads();

  if (expert < n_rival) {
    const u64 mine = rivals[expert];
    int at = 0;
#pragma unroll 4
    for (int i = 0; i < n_rival; i += 2) {
      const Two other = *reinterpret_cast<const Two*>(rivals + i);  // beyond the last stands 0
      at += (other.a > mine) + (other.b > mine);
    }
    if (at < N_USED) {
      chosen[at] = static_cast<int>(kAll - static_cast<u32>(mine));
      picked[at] = p_of[chosen[at]];
#if !EACH_ALONE && !BIASED
      float all = each[0];
#pragma unroll
      for (int i = 1; i < kWarps; ++i) all += each[i];
      picked[at] /= all;
#endif
    }
  }
#endif
  __syncthreads();
  if (expert >= N_USED) return;
  float weight = picked[expert];
#if RENORM
  float total = picked[0];
#pragma unroll
  for (int j = 1; j < N_USED; ++j) total += picked[j];
  weight /= fmaxf(total, kLeastSum);
#endif
  ids[static_cast<i64>(row) * N_USED + expert] = chosen[expert];
  weights[static_cast<i64>(row) * N_USED + expert] = weight * scale;
}

__device__ __forceinline__ float shift_of(const float* bias) {
  return BIASED && !GIVEN && threadIdx.x < N_EXPERT ? bias[threadIdx.x] : 0.f;
}

__device__ __forceinline__ int named_in(const float* given, int row) {
  if (!GIVEN || threadIdx.x >= N_USED) return 0;
  return reinterpret_cast<const int*>(given)[static_cast<i64>(row) * N_USED + threadIdx.x];
}

extern "C" __global__ void __launch_bounds__(kThreads)
    moe_choose(const float* logits, const float* bias, int* ids, float* weights, float* gate, float scale) {
  const float shift = shift_of(bias);
  wait_for_predecessor();
  // Not before: the experts' CTAs would crowd on the multiprocessors that the products before this are done with first.
  let_successor_start();
  choose<false>(logits, shift, named_in(bias, blockIdx.x), blockIdx.x, ids, weights, gate, scale);
}

// ---- both, beside a product
//
// The product before this starts it when all before that is over (linear_pair.cu, `late`), so rows are read at once and the product
// goes on meanwhile. A line of CTAs makes the scores of a row, and who comes last of them chooses. That one starts the experts: then, if
// they are `early`, who read the choice (past L1) before they wait; else before, and they wait first. It stays until the product is over,
// too: so will who waits for this launch find it.
// What is written here must have been taken before the product was launched: memory that was let go of since may be what it reads.
#define BOTH (N_EXPERT <= 256 && (N_EXPERT + 31) / 32 % ((N_IN + 1023) / 1024) == 0)
#if BOTH

template <int kOwn>
__device__ __forceinline__ void both(const float4* x, const float4* norm, const float4* matrix, float* logits, Blocks to,
                                     const float* bias, int* ids, float* weights, float* gate, int* tickets, int n_score, int early,
                                     float eps, float scale) {
  __shared__ bool is_last;
  const int row = blockIdx.y;
  if (static_cast<int>(blockIdx.x) >= n_score) {
    const int at = (blockIdx.x - n_score) * gridDim.y + row, n_group = kWarps / kParts;
    prepare_rows<true>(x, norm, to, at * n_group, gridDim.y, eps);
    return;
  }
  const float shift = shift_of(bias);
  const int named = named_in(bias, row);
  make_scores<kOwn, 1, true>(x, norm, matrix, logits, blockIdx.x, row, 1, eps);
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last = arrive(tickets + row) == n_score - 1;
    if (is_last) tickets[row] = 0;
  }
  __syncthreads();
  if (!is_last) return;
  if (!early) let_successor_start();
  choose<true>(logits, shift, named, row, ids, weights, gate, scale);
  if (threadIdx.x >= 32) return;  // what was chosen is written by the first warp
  if (early) {
    __threadfence();
    __syncwarp();
    let_successor_start();
  }
  wait_for_predecessor();
}

// So many registers, beside 352 threads of 96 (linear_pair of up to 8 rows).
#define BOTH_ARGS                                                                                                             \
  const float4 *x, const float4 *norm, const float4 *matrix, float *logits, u16 *blocks, float *block_sums, float *powers,    \
      const float *bias, int *ids, float *weights, float *gate, int *tickets, int n_score, int pad, int early, float eps,     \
      float power, float scale

extern "C" __global__ void __maxnreg__(120) moe_both_1(BOTH_ARGS) {
  both<1>(x, norm, matrix, logits, {blocks, block_sums, powers, pad, power}, bias, ids, weights, gate, tickets, n_score, early, eps, scale);
}

extern "C" __global__ void __maxnreg__(120) moe_both_2(BOTH_ARGS) {
  both<2>(x, norm, matrix, logits, {blocks, block_sums, powers, pad, power}, bias, ids, weights, gate, tickets, n_score, early, eps, scale);
}
#endif

