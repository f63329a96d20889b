// Partial softmax sums and how two of them become one. Every kernel folds with these, so the bits agree.
//
// A partial is (m, l, o): maximum of the scores in log2 units, sum of exp2(score - m), sum of exp2(score - m) * value.
// One that saw no key is (-inf, 0, 0) and folding it changes nothing.
#pragma once
#include "partial.cuh"

constexpr int SPLIT = 1024;    // keys folded before they meet other splits; fixed, whatever the batch
constexpr int MAX_SEQ = 128;   // sequences per launch

template <int OWN>  // dims of a lane
struct Running {
  float m, l;
  float o[OWN];

  __device__ __forceinline__ Running() { clear(); }

  __device__ __forceinline__ void clear() {
    m = none_seen();
    l = 0.f;
#pragma unroll
    for (int x = 0; x < OWN; x++) o[x] = 0.f;
  }

  __device__ __forceinline__ void add(float next_m, float next_l, const float (&next)[OWN]) {
    const Fold f = fold_of(m, next_m);
    m = f.m;
    l = folded(l, next_l, f);
#pragma unroll
    for (int x = 0; x < OWN; x++) o[x] = folded(o[x], next[x], f);
  }
};

template <int OWN>
__device__ __forceinline__ void load(float (&to)[OWN], const float* from) {
  static_assert(OWN == 1 || OWN == 4, "one load");
  if (OWN == 1) {
    to[0] = *from;
  } else {
    const float4 v = *reinterpret_cast<const float4*>(from);
    to[0] = v.x, to[1 % OWN] = v.y, to[2 % OWN] = v.z, to[3 % OWN] = v.w;
  }
}

// cap * tanh(score / cap) of a score in log2 units. Its error is 1e-5, where that of the GPU's own tanh would be 1e-2 with a cap of 50.
__device__ __forceinline__ float capped(float score, float cap) {
  const float most = cap * 1.44269504f;  // log2(e)
  return most - __fdividef(2.f * most, 1.f + exp2_fast(score * (2.f / cap)));
}

struct Seen {
  int lo, hi;
};

// The positions a row sees, cut to the pages there are.
__device__ __forceinline__ Seen seen_by(i64 position, i64 lo, i64 hi, int window, int max_key) {
  if (window != 0) {  // negative: of chunks of as many positions
    const u32 chunk = static_cast<u32>(-window);
    const i64 first = window > 0 ? position - (window - 1) : position - static_cast<u32>(position) % chunk;
    if (first > lo) lo = first;
  }
  if (lo < 0) lo = 0;
  if (hi > max_key) hi = max_key;
  if (lo >= hi) return {0x7fffffff, 0};
  return {static_cast<int>(lo), static_cast<int>(hi)};
}
