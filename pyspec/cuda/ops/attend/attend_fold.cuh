// Partial softmax sums and how two of them become one. Every kernel folds with these, so the bits agree.
//
// A partial is (m, l, o): maximum of the scores in log2 units, sum of exp2(score - m), sum of exp2(score - m) * value.
// One that saw no key is (-inf, 0, 0) and folding it changes nothing.
#pragma once
#include "partial.cuh"

constexpr int SPLIT = 1024;    // keys folded before they meet other splits; fixed, whatever the batch
constexpr int MAX_SEQ = 128;   // sequences per launch

template <int VECS>
struct Running {
  float m, l;
  float4 o[VECS];

  __device__ __forceinline__ Running() { clear(); }

  __device__ __forceinline__ void clear() {
    m = none_seen();
    l = 0.f;
#pragma unroll
    for (int x = 0; x < VECS; x++) o[x] = make_float4(0.f, 0.f, 0.f, 0.f);
  }

  __device__ __forceinline__ void add(float next_m, float next_l, const float4 (&next)[VECS]) {
    const Fold f = fold_of(m, next_m);
    m = f.m;
    l = folded(l, next_l, f);
#pragma unroll
    for (int x = 0; x < VECS; x++)
      o[x] = make_float4(folded(o[x].x, next[x].x, f), folded(o[x].y, next[x].y, f), folded(o[x].z, next[x].z, f),
                         folded(o[x].w, next[x].w, f));
  }
};

struct Seen {
  int lo, hi;
};

// The positions a row sees, cut to the pages there are.
__device__ __forceinline__ Seen seen_by(i64 position, i64 lo, i64 hi, int window, int max_key) {
  if (window > 0 && position - (window - 1) > lo) lo = position - (window - 1);
  if (lo < 0) lo = 0;
  if (hi > max_key) hi = max_key;
  if (lo >= hi) return {0x7fffffff, 0};
  return {static_cast<int>(lo), static_cast<int>(hi)};
}
