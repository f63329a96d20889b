// Rope on the last dims of heads, after an optional norm: cuda/ops/rope_tail/ref.py defines it.
#include "tokens.h"

using namespace pyspec;

namespace {

struct RopeTailArgs {
  const float *x;  // [row, head, dim], heads of a row together
  const int64_t *positions;
  const double *freq;
  const float *weight;
  float *out;
  int64_t n_row, step, n_head, dim, n_rot, normed;
  double eps, sign;
};

}  // namespace

extern "C" void pyspec_rope_tail(const RopeTailArgs *p) {
  const int64_t n = p->n_head * p->dim;
  each_range(p->n_row, 1 + 4096 / (n + 1), [&](int64_t a, int64_t b) {
    for (int64_t r = a; r < b; r++) {
      const float *x = p->x + r * p->step;
      float *out = p->out + r * n;
      if (!p->normed) std::memcpy(out, x, size_t(n) * 4);
      for (int64_t at = 0; at < n && p->normed; at += p->dim) rms_norm(x + at, out + at, p->dim, p->weight, float(p->eps));
      turn_tails(out, p->n_head, p->dim, p->n_rot, p->positions[r], p->freq, p->sign);
    }
  });
}
