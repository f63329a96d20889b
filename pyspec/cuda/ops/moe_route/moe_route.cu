// moe_route: scores of all experts for each row (moe_scores), then the best of them (moe_choose). Meaning: moe_ref.py.
//
//   x        [row, N_IN]              f32  as they are; normed on the way
//   norm     [N_IN]                   f32
//   matrix   [N_EXPERT + GATED, N_IN] f32
//   logits   [row, N_EXPERT + GATED]  f32  written by the first, read by the second
//   bias     [N_EXPERT]               f32  takes part in the choice alone (BIASED); GIVEN: [row, N_USED] i32 the experts of a row,
//                                          which then are not chosen; SHIFTED: is added to logits, and no bias of the choice
//   ids      [row, N_USED]            i32  best first, of equal ones the lower index; in range whatever the logits are
//   weights  [row, N_USED]            f32
//   gate     [row]                    f32  sigmoid of the last logit (GATED)
//   factors  [N_EXPERT]               f32  weights are multiplied with them at last (FACTORED)
//   blocks, sums, powers                   the rows normed, as rows.cu's LAYOUT 0 (or, if `pad` is 0, 3) has them, for the experts;
//                                          null: not wanted
//
// Sums have an order of their own for each row and score: a row's bits depend neither on the others nor on the grid. Bound
// by latency at few rows, so what is the model's is loaded before the predecessor is over: all of a CTA's matrix. Pointers to
// it are not `const __restrict__`: loads of constants ptxas (13.0) puts behind the wait.
// Set by the launcher: N_IN, N_EXPERT (at most 512), N_USED (at most 32), SIGMOID, RENORM, BIASED, GATED; where wanted
// SQRTSOFTPLUS, GIVEN, SHIFTED, FACTORED; N_GROUP and N_KEPT, where the choice is among the experts of the best groups.
#ifndef SQRTSOFTPLUS
#define SQRTSOFTPLUS 0
#endif
#ifndef GIVEN
#define GIVEN 0
#endif
#ifndef SHIFTED
#define SHIFTED 0
#endif
#ifndef N_GROUP
#define N_GROUP 1
#define N_KEPT 1
#endif
#include "overlap.cuh"
#include "prepared.cuh"

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

// Norms a row for each group of kParts warps, from `first` on, with the sum of squares that scores are divided by.
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
  wait_for_predecessor();
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const bool is_in = is_row && quad + 32 * i < kQuads;
    v[i] = is_in ? x[static_cast<i64>(row) * kQuads + quad + 32 * i] : make_float4(0.f, 0.f, 0.f, 0.f);
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

// A CTA has any whole number of groups of kParts warps; each group makes kKept scores of the CTA's `per_cta` rows. CTAs from
// `n_score` on norm rows, a group one.
extern "C" __global__ void __launch_bounds__(32 * kWarpsMost)
    moe_scores(const float4* x, const float4* norm, const float4* matrix, float* logits, u16* blocks, float* block_sums,
               float* powers, int n_row, int per_cta, int n_score, int pad, float eps, float power) {
  let_successor_start();
  __shared__ float sums[kRowsMost][kWarpsMost][kKept + 1];  // of each warp: its scores, and squares
  const int warp = threadIdx.x >> 5, n_group = blockDim.x / (32 * kParts);
  if (static_cast<int>(blockIdx.x) >= n_score) {
    const int at = (blockIdx.x - n_score) * gridDim.y + blockIdx.y;
    prepare_rows(x, norm, {blocks, block_sums, powers, pad, power}, at * n_group, n_row, eps);
    return;
  }
  const int score = (blockIdx.x * n_group + warp / kParts) * kKept, first = blockIdx.y * per_cta;
  const int quad = warp % kParts * kEach * 32 + (threadIdx.x & 31);  // the lane's first
  const int n = min(per_cta, n_row - first);

  float4 w[kKept][kEach], by[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const bool is_in = quad + 32 * i < kQuads;
    by[i] = is_in ? norm[quad + 32 * i] : make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int k = 0; k < kKept; ++k)  // a score too many is another's, and is not kept
      w[k][i] = is_in ? matrix[static_cast<i64>(min(score + k, kScores - 1)) * kQuads + quad + 32 * i] : by[i];
  }
#pragma unroll
  for (int k = 0; k < kKept; ++k)
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      w[k][i] = make_float4(w[k][i].x * by[i].x, w[k][i].y * by[i].y, w[k][i].z * by[i].z, w[k][i].w * by[i].w);
  wait_for_predecessor();

  for (int r = 0; r < n; ++r) {
    const float4* own = x + static_cast<i64>(first + r) * kQuads + quad;
    float4 v[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) v[i] = quad + 32 * i < kQuads ? own[32 * i] : make_float4(0.f, 0.f, 0.f, 0.f);
    float sum[kKept + 1] = {};
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
#pragma unroll
      for (int k = 0; k < kKept; ++k) sum[k] = dot(w[k][i], v[i], sum[k]);
      sum[kKept] = dot(v[i], v[i], sum[kKept]);
    }
#pragma unroll
    for (int k = 0; k <= kKept; ++k) {
      const float total = warp_sum(sum[k]);
      if ((threadIdx.x & 31) == 0) sums[r][warp][k] = total;
    }
  }
  __syncthreads();
  const int n_own = n_group * kKept;
  for (int i = threadIdx.x; i < n * n_own; i += blockDim.x) {
    const int r = i / n_own, k = i % n_own, at = blockIdx.x * n_own + k;
    float total = 0.f, squares = 0.f;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const float* from = sums[r][k / kKept * kParts + part];
      total += from[k % kKept];
      squares += from[kKept];
    }
    if (at < kScores) logits[static_cast<i64>(first + r) * kScores + at] = total * rsqrtf(squares / N_IN + eps);
  }
}

// ---- choice
//
// Scores are ranked as integers that differ for every expert. Of runs of experts the best are found first: what is below the
// N_USED-th of those can not be chosen, and the few others count how many are better than each.
//
// Groups (N_GROUP) are ranked by the sum of their two best scores. Experts of those that are not kept score minus infinity.

constexpr float kLeastSum = 6.103515625e-5f;
constexpr int kThreads = (N_EXPERT + 31) / 32 * 32, kWarps = kThreads / 32;  // a thread an expert
constexpr int kRun = N_EXPERT > 256 ? 16 : N_EXPERT > 128 ? 8 : N_EXPERT > 64 ? 4 : N_EXPERT > 32 ? 2 : 1;
constexpr int kRuns = kThreads / kRun;
constexpr int kOfGroup = N_EXPERT / N_GROUP;
static_assert(kRuns <= 32 && N_USED <= 32 && N_USED <= N_EXPERT, "a lane a run, a lane a choice");
static_assert(N_EXPERT % N_GROUP == 0 && N_KEPT <= N_GROUP && N_USED <= N_KEPT * kOfGroup, "as many experts in each group");


struct alignas(16) Two {
  u64 a, b;
};

__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

#if SQRTSOFTPLUS
// Neither overflows nor loses what is left of large negative ones; no number stays none.
__device__ __forceinline__ float sqrt_softplus(float x) { return sqrtf((x < 0.f ? 0.f : x) + log1pf(expf(-fabsf(x)))); }
#endif
#define EACH_ALONE (SIGMOID || SQRTSOFTPLUS)  // an expert's score needs no other's
#define BY_P (BIASED || N_GROUP > 1)          // weights choose, not logits

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

#if N_GROUP > 1 && !GIVEN
struct Best {  // of a group; minus infinity where there is none
  float first, second;
};

__device__ __forceinline__ Best better(Best a, Best b) {
  return {fmaxf(a.first, b.first), fmaxf(fminf(a.first, b.first), fmaxf(a.second, b.second))};
}

__device__ __forceinline__ Best over_lanes(Best own, int n) {
#pragma unroll
  for (int hop = n / 2; hop > 0; hop >>= 1)
    own = better(own, {__shfl_xor_sync(kAll, own.first, hop), __shfl_xor_sync(kAll, own.second, hop)});
  return own;
}

// Whether the group of the thread's expert is one of the N_KEPT best, of equal ones the first. No number counts as minus infinity.
__device__ __forceinline__ bool is_kept(float score, bool is_one) {
  __shared__ u64 ranks[N_GROUP];
  const int expert = threadIdx.x, lane = expert & 31;
  const float none = -__uint_as_float(0x7f800000u);
  const float own = is_one && !isnan(score) ? score : none;
  if constexpr (kOfGroup == 1) {
    if (is_one) ranks[expert] = rank_of(own, expert);
  } else if constexpr (32 % kOfGroup == 0) {
    const Best best = over_lanes({own, none}, kOfGroup);
    if (is_one && expert % kOfGroup == 0) ranks[expert / kOfGroup] = rank_of(best.first + best.second, expert / kOfGroup);
  } else {  // a warp a group
    __shared__ float scores[kThreads];
    scores[expert] = own;
    __syncthreads();
    for (int group = expert >> 5; group < N_GROUP; group += kWarps) {
      Best best = {none, none};
      for (int i = lane; i < kOfGroup; i += 32) best = better(best, {scores[group * kOfGroup + i], none});
      best = over_lanes(best, 32);
      if (lane == 0) ranks[group] = rank_of(best.first + best.second, group);
    }
  }
  __syncthreads();
  const u64 mine = ranks[is_one ? expert / kOfGroup : 0];
  int n_better = 0;
#pragma unroll 4
  for (int i = 0; i < N_GROUP; ++i) n_better += ranks[i] > mine;
  return n_better < N_KEPT;
}
#endif

extern "C" __global__ void __launch_bounds__(kThreads)
    moe_choose(const float* logits, const float* bias, int* ids, float* weights, float* gate, const float* factors, float scale) {
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
#ifdef FACTORED
  __shared__ float factor_of[kThreads];
  factor_of[expert] = is_one ? factors[expert] : 0.f;
#endif
  const float shift = ((BIASED && !GIVEN) || SHIFTED) && is_one ? bias[expert] : 0.f;
  wait_for_predecessor();
  // Not before: the experts' CTAs would crowd on the multiprocessors that the products before this are done with first.
  let_successor_start();
  const float* own = logits + static_cast<i64>(blockIdx.x) * kScores;
  const float logit = !is_one ? -__uint_as_float(0x7f800000u) : SHIFTED ? own[expert] + shift : own[expert];
#if GATED
  if (expert == 0) gate[blockIdx.x] = sigmoid(own[N_EXPERT]);
#endif

  float p = 0.f, score = logit;
#if SQRTSOFTPLUS
  p = is_one ? sqrt_softplus(logit) : 0.f;
#elif SIGMOID
  p = sigmoid(logit);
#elif BY_P || GIVEN
  __shared__ float maxima[kWarps];
  p = expf(logit - over_block(logit, false, maxima));
  p /= over_block(is_one ? p : 0.f, true, each);
#endif
#if GIVEN
  p_of[expert] = p;
  __syncthreads();
  if (expert < N_USED) {
    const int id = reinterpret_cast<const int*>(bias)[static_cast<i64>(blockIdx.x) * N_USED + expert];
    chosen[expert] = min(max(id, 0), N_EXPERT - 1);
    picked[expert] = p_of[chosen[expert]];
  }
#else
  if (BY_P) score = BIASED ? p + shift : p;
#if N_GROUP > 1
  if (!is_kept(score, is_one)) score = -__uint_as_float(0x7f800000u);
#endif
  const u64 rank = is_one ? rank_of(score, expert) : 0;

  u64 best = rank;
#pragma unroll
  for (int hop = kRun / 2; hop > 0; hop >>= 1) {
    const u64 other = __shfl_xor_sync(kAll, best, hop);
    best = other > best ? other : best;
  }
  if (expert % kRun == 0) leaders[expert / kRun] = best;
  rivals[expert] = 0;
  if (expert == 0) n_rival = 0, least = 1;  // with fewer runs than choices everyone is a rival
  __syncthreads();

  if (expert < 32) {
    const u64 leader = lane < kRuns ? leaders[lane] : 0;
    int n_better = 0;
#pragma unroll
    for (int i = 0; i < kRuns; i += 2) {
      const Two other = *reinterpret_cast<const Two*>(leaders + i);
      n_better += (other.a > leader) + (other.b > leader);
    }
    if (leader && n_better == N_USED - 1) least = leader;
    if (leader && n_better == 0) first = leader;
  }
  __syncthreads();
#if !EACH_ALONE && !BY_P
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
#if !EACH_ALONE && !BY_P
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
  ids[static_cast<i64>(blockIdx.x) * N_USED + expert] = chosen[expert];
  weight *= scale;
#ifdef FACTORED
  weight *= factor_of[chosen[expert]];
#endif
  weights[static_cast<i64>(blockIdx.x) * N_USED + expert] = weight;
}
