// Rows that stand for several tokens: cuda/ops/compress/ref.py defines them.
#include "tokens.h"

using namespace pyspec;

namespace {

constexpr int64_t MOST = 1024, MOST_SOURCES = 512;  // columns and sources of a row

struct CompressArgs {
  const float *values, *scores, *places, *norm;  // null: scores, places where all tokens of a block count alike; norm where rows have none
  const double *freq;
  float *ring_values, *ring_scores;
  TokensArgs rows;
  PoolArgs pool;
  int64_t values_step, scores_step, n_ring, n_slot, overlaps, n_rot;
  double eps;
};

struct Source {
  const float *value, *score, *place;  // place: null where the score has its bias
};

int64_t width_of(const CompressArgs &p) { return p.pool.dim * (1 + p.overlaps); }

// The tokens of the block that `t` ends, behind those of the block before; their number
int64_t sources(const CompressArgs &p, const Token &t, Source *to) {
  const int64_t ratio = p.pool.ratio, begin = t.at + 1 - ratio, width = width_of(p);
  const Kept values{p.ring_values, p.values, p.n_ring, width, p.values_step};
  const Kept scores{p.ring_scores, p.scores, p.n_ring, width, p.scores_step};
  int64_t n = 0;
  for (int64_t at = std::max<int64_t>(0, p.overlaps ? begin - ratio : begin); at <= t.at; at++, n++) {
    const int64_t off = p.overlaps && at >= begin ? p.pool.dim : 0;
    to[n] = {values.row(t, at) + off, nullptr, nullptr};
    if (p.scores == nullptr) continue;
    to[n].score = scores.row(t, at) + off;
    if (at >= t.first) to[n].place = p.places + at % ratio * width + off;
  }
  return n;
}

void make(const CompressArgs &p, const Token &t, int64_t row) {
  Source from[MOST_SOURCES];
  const int64_t n = sources(p, t, from), dim = p.pool.dim;
  float y[MOST];
  by_eights(dim, [&](int64_t d, auto get, auto put) {
    const auto score = [&](const Source &x) { return x.place ? get(x.score + d) + get(x.place + d) : get(x.score + d); };
    f8 total{}, weights{}, most = all(-__builtin_inff());
    for (int64_t i = 0; i < n && p.scores != nullptr; i++) most = max(score(from[i]), most);
    for (int64_t i = 0; i < n; i++) {
      const f8 weight = p.scores == nullptr ? all(1.0f) : exp(score(from[i]) - most);
      weights += weight, total = fma(weight, get(from[i].value + d), total);
    }
    put(y + d, total / weights);
  });
  if (p.norm != nullptr) rms_norm(y, y, dim, p.norm, float(p.eps));
  turn_tails(y, 1, dim, p.n_rot, t.at + 1 - p.pool.ratio, p.freq, 1.0);
  pack_row(p.pool.kind, y, p.pool.row(row), p.pool.factors(row), dim);
}

void row(const CompressArgs &p, int64_t r) {
  Token t;
  if (!read_token(p.rows, r, p.n_slot, t) || (t.at + 1) % p.pool.ratio) return;
  const int64_t size = p.rows.page_size, at = p.rows.kv_rows[r];
  const int64_t to = at < 0 ? -1 : at / size * p.pool.per_page + at % size / p.pool.ratio;
  if (inside(to, p.pool.n_row, t.seq, p.rows.op, p.rows.fault)) make(p, t, to);
}

void keep(const CompressArgs &p, int64_t r) {
  Token t;
  if (!read_token(p.rows, r, p.n_slot, t) || t.at + p.n_ring <= t.last) return;
  const int64_t width = width_of(p);
  Kept{p.ring_values, p.values, p.n_ring, width, p.values_step}.keep(t);
  if (p.scores == nullptr) return;
  const Kept scores{p.ring_scores, p.scores, p.n_ring, width, p.scores_step};
  const float *from = scores.row(t, t.at), *place = p.places + t.at % p.pool.ratio * width;
  float *to = scores.place(t, t.at);
  by_eights(width, [&](int64_t i, auto get, auto put) { put(to + i, get(from + i) + get(place + i)); });
}

}  // namespace

extern "C" void pyspec_compress(const CompressArgs *p) {
  each_range(p->rows.n_row, 1, [&](int64_t a, int64_t b) {
    for (int64_t r = a; r < b; r++) row(*p, r);
  });
  each_range(p->rows.n_row, 16, [&](int64_t a, int64_t b) {  // behind all that read the ring
    for (int64_t r = a; r < b; r++) keep(*p, r);
  });
}
