// Rows of a table by n-grams, and what they add to several streams: cuda/ops/ngrams/ref.py defines both.
#include "tokens.h"

using namespace pyspec;

namespace {

struct RowsArgs {
  const int64_t *tokens, *multipliers, *sizes, *offsets;
  float *ids;  // [slot, n_ring]
  int64_t *places;
  TokensArgs rows;
  int64_t n_ring, n_slot, n_gram, n_head, end;
};

struct MixArgs {
  const float *x, *made, *key_norm, *query_norm, *conv_norm, *taps;  // taps [tap, n_stream * n]
  const int64_t *tokens;
  float *ids, *inputs, *own, *out;  // inputs: of the ring; own [row, n_stream * n]: what is convolved
  TokensArgs rows;
  int64_t made_step, n_ring, n_slot, n_gram, n_stream, n, n_tap;
  double eps;
};

void run_row(const RowsArgs &p, int64_t r) {
  const int64_t per = p.n_head / (p.n_gram - 1);
  int64_t *to = p.places + r * p.n_head;
  Token t;
  if (!read_token(p.rows, r, p.n_slot, t)) return void(std::memset(to, 0, size_t(p.n_head) * 8));
  uint64_t m = uint64_t(p.tokens[r]) * uint64_t(p.multipliers[0]);
  bool has_ended = false;
  for (int64_t back = 1; back < p.n_gram; back++) {
    const int64_t at = t.at - back;
    int64_t id = p.end;
    if (!has_ended && at >= t.first) id = p.tokens[t.row + at - t.first];
    else if (!has_ended && at >= 0) id = int64_t(p.ids[t.slot * p.n_ring + at % p.n_ring]);
    has_ended |= id == p.end;
    m ^= uint64_t(id) * uint64_t(p.multipliers[back]);
    for (int64_t h = (back - 1) * per; h < back * per; h++) to[h] = int64_t(m % uint64_t(p.sizes[h])) + p.offsets[h];
  }
}

float dot(const float *x, const float *y, int64_t n) {
  f8 s = {};
  by_eights(n, [&](int64_t i, auto get, auto) { s = fma(get(x + i), get(y + i), s); });
  return sum(s);
}

// The value of each stream to `out`, and what is convolved
void gate_row(const MixArgs &p, int64_t r) {
  const int64_t n = p.n, wide = p.n_stream * n;
  const float *made = p.made + r * p.made_step, *x = p.x + r * wide;
  float *value = p.out + r * wide, *own = p.own + r * wide;
  for (int64_t at = 0; at < wide; at += n) {
    rms_norm(made + at, own + at, n, p.key_norm + at, float(p.eps));
    rms_norm(x + at, value + at, n, p.query_norm + at, float(p.eps));
    const float s = dot(own + at, value + at, n) / std::sqrt(float(n));
    const float size = std::sqrt(std::max(std::fabs(s), 1e-6f));
    const f8 gate = sigmoid(all(s > 0.0f ? size : s < 0.0f ? -size : s));
    by_eights(n, [&](int64_t i, auto get, auto put) { put(value + at + i, gate * get(made + wide + i)); });
    rms_norm(value + at, own + at, n, p.conv_norm + at, float(p.eps));
  }
}

void mix_row(const MixArgs &p, int64_t r) {
  const int64_t wide = p.n_stream * p.n;
  float *out = p.out + r * wide;
  Token t;
  if (!read_token(p.rows, r, p.n_slot, t)) return void(std::memset(out, 0, size_t(wide) * 4));
  const Kept kept{p.inputs, p.own, p.n_ring, wide, wide};
  by_eights(wide, [&](int64_t i, auto get, auto put) {
    f8 y = {};
    for (int64_t tap = 0; tap < p.n_tap; tap++) {
      const int64_t at = t.at - (p.n_tap - 1 - tap) * p.n_gram;
      if (at >= 0) y = fma(get(kept.row(t, at) + i), get(p.taps + tap * wide + i), y);
    }
    put(out + i, get(p.x + r * wide + i) + get(out + i) + silu(y));
  });
}

void keep(const MixArgs &p, int64_t r) {
  Token t;
  if (!read_token(p.rows, r, p.n_slot, t) || t.at + p.n_ring <= t.last) return;
  const int64_t wide = p.n_stream * p.n;
  Kept{p.inputs, p.own, p.n_ring, wide, wide}.keep(t);
  p.ids[t.slot * p.n_ring + t.at % p.n_ring] = float(p.tokens[r]);
}

}  // namespace

extern "C" void pyspec_ngrams_rows(const RowsArgs *p) {
  each_range(p->rows.n_row, 16, [&](int64_t a, int64_t b) {
    for (int64_t r = a; r < b; r++) run_row(*p, r);
  });
}

extern "C" void pyspec_ngrams_mixed(const MixArgs *p) {
  const auto rows = [&](auto &&body) {
    each_range(p->rows.n_row, 1, [&](int64_t a, int64_t b) {
      for (int64_t r = a; r < b; r++) body(*p, r);
    });
  };
  rows(gate_row), rows(mix_row), rows(keep);  // each reads what the one before wrote of other rows
}
