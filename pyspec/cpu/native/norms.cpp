// Norms of rows that stay f32: cuda/ops/norms/ref.py defines them.
#include "pool.h"
#include "prep.h"

using namespace pyspec;

namespace {

struct Args {
  const float *x, *weight;
  float *out;
  const int64_t *rows;  // of x, or null for all in order
  int64_t n_row, n_x, n, x_stride, out_stride, layer;
  double eps;
};

float sum_of(const float *x, int64_t n) {
  f8 s[4] = {};
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    for (int j = 0; j < 4; j++) s[j] += load(x + i + 8 * j);
  }
  by_eights(n - i, [&](int64_t j, auto get, auto) { s[0] += get(x + i + j); });
  return sum((s[0] + s[1]) + (s[2] + s[3]));
}

// LayerNorm without a bias.
void layer_norm(const float *x, float *out, int64_t n, const float *weight, float eps) {
  const f8 mean = all(sum_of(x, n) / float(n));
  by_eights(n, [&](int64_t i, auto get, auto put) { put(out + i, get(x + i) - mean); });
  rms_norm(out, out, n, weight, eps);
}

}  // namespace

extern "C" void pyspec_norms(const Args *p) {
  each_range(p->n_row, 1 + 8192 / (p->n + 1), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++) {
      int64_t from = p->rows ? p->rows[row] : row;
      if (from < 0 || from >= p->n_x) from = 0;  // the host checks rows before
      const float *x = p->x + from * p->x_stride;
      float *out = p->out + row * p->out_stride;
      if (p->layer) layer_norm(x, out, p->n, p->weight, float(p->eps));
      else rms_norm(x, out, p->n, p->weight, float(p->eps));
    }
  });
}
