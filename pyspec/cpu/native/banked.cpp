// Rows of a stream mixed with rows that were kept of it: cuda/ops/banked/ref.py defines them.
#include "pool.h"
#include "prep.h"

using namespace pyspec;

namespace {

constexpr int64_t MOST = 16;

struct BankedArgs {
  const float *rows[MOST + 1];  // [row, n] each; the stream's own last, then null
  const float *weight;
  float *out;
  int64_t n_row, n, n_stream;
  double eps;
};

float dot(const float *x, const float *y, int64_t n) {
  f8 s[2] = {};
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    for (int j = 0; j < 2; j++) s[j] = fma(load(x + i + 8 * j), load(y + i + 8 * j), s[j]);
  }
  by_eights(n - i, [&](int64_t j, auto get, auto) { s[0] = fma(get(x + i + j), get(y + i + j), s[0]); });
  return sum(s[0] + s[1]);
}

void run_row(const BankedArgs &p, int64_t row) {
  const int64_t at = row * p.n;
  float by[MOST + 1], most = -__builtin_inff(), total = 0.0f;
  for (int64_t i = 0; i < p.n_stream; i++) {
    const float *x = p.rows[i] + at;
    by[i] = dot(x, p.weight, p.n) * inverse_rms(x, p.n, float(p.eps));
    most = by[i] > most ? by[i] : most;
  }
  for (int64_t i = 0; i < p.n_stream; i++) by[i] = exp(all(by[i] - most))[0], total += by[i];
  by_eights(p.n, [&](int64_t j, auto get, auto put) {
    f8 y = {};
    for (int64_t i = 0; i < p.n_stream; i++) y = fma(all(by[i] / total), get(p.rows[i] + at + j), y);
    put(p.out + at + j, y);
  });
}

}  // namespace

extern "C" void pyspec_banked(const BankedArgs *p) {
  each_range(p->n_row, 1 + 4096 / (p->n + 1), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++) run_row(*p, row);
  });
}
