// Tiles of attention: scores of a few queries with a few keys, and weighted sums of values. Which tiles a row meets changes no bit of it: a score
// is one chain of sums over the columns, and a sum of values one chain over the keys, in order.
#pragma once
#include "kv.h"

namespace pyspec {

#if defined(__clang__) || __GNUC__ >= 12
#define PYSPEC_PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PYSPEC_PICK(a, b, ...) __builtin_shuffle(a, b, i8{__VA_ARGS__})
#endif

// {sum(x[0]), ..., sum(x[7])}, each in the order of simd.h's sum.
inline f8 sums(const f8 *x) {
  f8 two[4], four[2];
  for (int i = 0; i < 4; i++) {
    const f8 a = x[2 * i], b = x[2 * i + 1];
    two[i] = PYSPEC_PICK(a, b, 0, 1, 2, 3, 8, 9, 10, 11) + PYSPEC_PICK(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
  }
  for (int i = 0; i < 2; i++) {  // lanes of x[4 i], x[4 i + 2], then of x[4 i + 1], x[4 i + 3]
    const f8 a = two[2 * i], b = two[2 * i + 1];
    four[i] = PYSPEC_PICK(a, b, 0, 1, 8, 9, 4, 5, 12, 13) + PYSPEC_PICK(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
  }
  const f8 a = four[0], b = four[1];
  const f8 y = PYSPEC_PICK(a, b, 0, 2, 8, 10, 4, 6, 12, 14) + PYSPEC_PICK(a, b, 1, 3, 9, 11, 5, 7, 13, 15);
  return PYSPEC_PICK(y, y, 0, 4, 1, 5, 2, 6, 3, 7);
}

// Scores of NQ queries with 8 / NQ keys. q [NQ, width]; scores [NQ, step].
template <int NQ, typename T>
inline void score(const float *q, const T *const *keys, int64_t width, float *scores, int64_t step) {
  constexpr int NK = 8 / NQ;
  f8 s[8] = {};
  for (int64_t d = 0; d < width; d += 8) {
    f8 k[NK];
    for (int j = 0; j < NK; j++) k[j] = fetch(keys[j] + d);
    for (int i = 0; i < NQ; i++) {
      const f8 x = load(q + i * width + d);
      for (int j = 0; j < NK; j++) s[i * NK + j] = fma(x, k[j], s[i * NK + j]);
    }
  }
  float found[8];
  store(found, sums(s));
  for (int i = 0; i < NQ; i++) std::memcpy(scores + i * step, found + i * NK, NK * 4);
}

// acc += weight times value for the keys first..last-1, for NQ queries and 8 NV columns. weights [NQ, step]; acc [NQ, width].
template <int NQ, int NV, typename T>
inline void weigh(const float *weights, int64_t step, const T *const *values, int64_t first, int64_t last, float *acc,
                  int64_t width, int64_t d) {
  f8 s[NQ * NV];
  for (int i = 0; i < NQ; i++) {
    for (int v = 0; v < NV; v++) s[i * NV + v] = load(acc + i * width + d + 8 * v);
  }
  for (int64_t j = first; j < last; j++) {
    f8 x[NV];
    for (int v = 0; v < NV; v++) x[v] = fetch(values[j] + d + 8 * v);
    for (int i = 0; i < NQ; i++) {
      const f8 w = all(weights[i * step + j]);
      for (int v = 0; v < NV; v++) s[i * NV + v] = fma(w, x[v], s[i * NV + v]);
    }
  }
  for (int i = 0; i < NQ; i++) {
    for (int v = 0; v < NV; v++) store(acc + i * width + d + 8 * v, s[i * NV + v]);
  }
}

// The same for all columns.
template <int NQ, typename T>
inline void weigh_all(const float *weights, int64_t step, const T *const *values, int64_t first, int64_t last, float *acc,
                      int64_t width) {
  constexpr int NV = 8 / NQ;
  int64_t d = 0;
  for (; d + 8 * NV <= width; d += 8 * NV) weigh<NQ, NV>(weights, step, values, first, last, acc, width, d);
  for (; d < width; d += 8) weigh<NQ, 1>(weights, step, values, first, last, acc, width, d);
}

}  // namespace pyspec
