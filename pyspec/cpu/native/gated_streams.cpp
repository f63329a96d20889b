// Streams that are read and written by gates of low rank: cuda/ops/gated_streams/ref.py defines them.
#include "pool.h"
#include "prep.h"

using namespace pyspec;

namespace {

struct NormArgs {
  const float *x, *weight;
  float *out;
  int64_t n_row, n_stream, n;
  double eps;
};

struct BendArgs {
  const float *low;
  float *out;
  int64_t n_row, n, step, n_stream;
};

struct ReadArgs {
  const float *normed, *gates;
  float *out;
  int64_t n_row, n_stream, n;
};

struct MergeArgs {
  const float *x, *y, *inject;
  float *out;
  int64_t n_row, n_stream, n, step;
};

constexpr int64_t GRAIN = 8192;  // columns of a task at least

template <typename F>
void each_part(int64_t n_part, int64_t n, F &&body) {
  each_range(n_part, 1 + GRAIN / n, [&](int64_t a, int64_t b) {
    for (int64_t i = a; i < b; i++) body(i);
  });
}

}  // namespace

extern "C" void pyspec_streams_norm(const NormArgs *p) {
  each_part(p->n_row * p->n_stream, p->n, [&](int64_t i) {
    rms_norm(p->x + i * p->n, p->out + i * p->n, p->n, p->weight + i % p->n_stream * p->n, float(p->eps));
  });
}

extern "C" void pyspec_streams_bend(const BendArgs *p) {
  const f8 by = all(float(p->n_stream));
  each_part(p->n_row, p->n, [&](int64_t r) {
    by_eights(p->n, [&](int64_t i, auto get, auto put) { put(p->out + r * p->n + i, silu(get(p->low + r * p->step + i) / by)); });
  });
}

extern "C" void pyspec_streams_read(const ReadArgs *p) {
  const int64_t wide = p->n_stream * p->n;
  each_part(p->n_row, wide, [&](int64_t r) {
    by_eights(p->n, [&](int64_t i, auto get, auto put) {
      f8 total = {};
      for (int64_t at = r * wide + i, s = 0; s < p->n_stream; s++, at += p->n) {
        total = fma(get(p->normed + at), sigmoid(get(p->gates + at)), total);
      }
      put(p->out + r * p->n + i, total / all(float(p->n_stream)));
    });
  });
}

extern "C" void pyspec_streams_merge(const MergeArgs *p) {
  each_part(p->n_row * p->n_stream, p->n, [&](int64_t unit) {
    const int64_t r = unit / p->n_stream, at = unit * p->n;
    const float inject = p->inject[r * p->step + unit % p->n_stream] / float(p->n_stream);
    const f8 by = all(2.0f) * sigmoid(all(inject));
    by_eights(p->n, [&](int64_t i, auto get, auto put) { put(p->out + at + i, fma(by, get(p->y + r * p->n + i), get(p->x + at + i))); });
  });
}
