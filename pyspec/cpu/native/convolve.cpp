// Rows mixed with the rows before them in their sequence: cuda/ops/convolve/ref.py defines it.
#include "pool.h"
#include "prep.h"

using namespace pyspec;

namespace {

struct Args {
  const float *x, *given, *base, *residual;  // given, base: of the side
  float *out;
  const int32_t *row_seq;
  int64_t n_row, n, n_tap, group, given_stride;
};

void mix(const Args *p, int64_t row, int64_t first, int64_t n, const float *given) {
  const int64_t n_group = p->n / p->group;
  float *out = p->out + row * p->n + first;
  for (int64_t t = 0; t < p->n_tap && t <= row && p->row_seq[row - t] == p->row_seq[row]; t++) {
    const f8 own = all(given[t * n_group]);
    const float *x = p->x + (row - t) * p->n + first, *base = p->base + t * p->n + first;
    by_eights(n, [&](int64_t i, auto get, auto put) {
      const f8 y = (get(base + i) + own) * get(x + i);
      put(out + i, t ? get(out + i) + y : y);
    });
  }
  if (p->residual == nullptr) return;
  const float *residual = p->residual + row * p->n + first;
  by_eights(n, [&](int64_t i, auto get, auto put) { put(out + i, get(residual + i) + get(out + i)); });
}

}  // namespace

extern "C" void pyspec_convolve(const Args *p) {
  each_range(p->n_row, 1 + 4096 / (p->n + 1), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++) {
      const float *given = p->given + row * p->given_stride;
      for (int64_t g = 0; g * p->group < p->n; g++) mix(p, row, g * p->group, p->group, given + g);
    }
  });
}
