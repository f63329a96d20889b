// The token of each row's largest logit: cuda/ops/best/ref.py defines it. The first NaN of a row counts as largest.
#include <vector>

#include "pool.h"
#include "simd.h"

using namespace pyspec;

namespace {

constexpr int64_t PART = 16384, SPAN = 512;  // columns of a thread's part; columns that are looked through once more

struct Args {
  const float *logits;
  int64_t *tokens;  // [row], or null
  double *pairs;    // [2, row], or null
  int64_t n_row, n_vocab, stride;
};

struct Found {
  int64_t at;
  float value;
};

bool beats(float x, float best) { return x > best || (x != x && best == best); }

// The largest of x[0..n-1] by its size; NaN if there is one.
float largest_of(const float *x, int64_t n) {
  f8 most[4] = {all(x[0]), all(x[0]), all(x[0]), all(x[0])};
  i8 is_nan = {};
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    for (int j = 0; j < 4; j++) {
      const f8 v = load(x + i + 8 * j);
      most[j] = max(most[j], v);
      is_nan |= v != v;
    }
  }
  float best = largest(max(max(most[0], most[1]), max(most[2], most[3])));
  for (; i < n; i++) best = beats(x[i], best) ? x[i] : best;
  for (int j = 0; j < 8; j++) best = is_nan[j] ? __builtin_nanf("") : best;
  return best;
}

Found best_of(const float *x, int64_t first, int64_t last) {
  Found best = {first, x[first]};
  for (int64_t i = first; i < last; i += SPAN) {
    const int64_t n = last - i < SPAN ? last - i : SPAN;
    const float most = largest_of(x + i, n);
    if (!beats(most, best.value)) continue;
    int64_t at = i;
    while (!(x[at] == most || (most != most && x[at] != x[at]))) at++;
    best = {at, x[at]};
  }
  return best;
}

}  // namespace

extern "C" void pyspec_best(const Args *p) {
  static thread_local std::vector<Found> kept;
  const int64_t n_part = (p->n_vocab + PART - 1) / PART;
  kept.resize(size_t(p->n_row * n_part));
  Found *const found = kept.data();
  each_range(p->n_row * n_part, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const int64_t row = i / n_part, first = i % n_part * PART;
      found[i] = best_of(p->logits + row * p->stride, first, first + PART < p->n_vocab ? first + PART : p->n_vocab);
    }
  });
  for (int64_t row = 0; row < p->n_row; row++) {
    Found best = found[row * n_part];
    for (int64_t j = 1; j < n_part; j++) {
      if (const Found next = found[row * n_part + j]; beats(next.value, best.value)) best = next;
    }
    if (p->tokens) p->tokens[row] = best.at;
    if (p->pairs) p->pairs[row] = double(best.at), p->pairs[p->n_row + row] = double(best.value);
  }
}
