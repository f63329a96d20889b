// Mamba-2 with deferred commit (cuda/ops/mamba2/ref.py): two loops for each piece of the batch.
//
// prepare   a head, or a group's B or C, of a sequence: convolution, gates; windows and records. Its tokens, records first, end in one run
//           of memory.
// advance   PART rows of the state of a head: S <- e S + (t x) B^T; o = S C + d x. They lie in L1 while all tokens run.
//
// Tokens come one by one, in one order of sums: no bit depends on the cut of a text into forwards, and none on neighbours.
#include <cmath>

#include "recurrent.h"

using namespace pyspec;

namespace {

constexpr int64_t R = 8, PART = 32;  // rows of a step; rows of a job

struct Args {
  ConvArgs conv;
  BatchArgs batch;
  const float *step;  // [row, head], raw
  int64_t step_stride;
  const float *a, *dt_bias, *d;      // [head]
  float *state, *x, *b, *decay, *dt;  // of all slots
  float *out;                        // [row, head, dim]
  int64_t n_head, dim, n_group, n_state;
};

// Tokens of a piece: x [head, token, dim], b c [group, token, state], e dt [head, token].
struct Tokens {
  float *x, *b, *c, *e, *dt;
  Tokens(const Args &p, int64_t n) {
    const int64_t inner = p.n_head * n * p.dim, wide = p.n_group * n * p.n_state, heads = p.n_head * n;
    x = scratch(inner + 2 * wide + 2 * heads);
    b = x + inner, c = b + wide, e = c + wide, dt = e + heads;
  }
};

void prepare_head(const Args &p, const Tokens &to, const Seq &q, int64_t n_token, int64_t head) {
  const int64_t at = head * n_token, rows = at + q.at + q.fold, width = p.batch.width;
  convolve(p.conv, width, q, head * p.dim, p.dim, to.x + rows * p.dim);
  join_records(p.x, width, p.n_head, q, head, p.dim, to.x + at * p.dim);
  for (int64_t t = 0; t < q.n; t++) {
    const int64_t row = q.start + q.row + t;
    const float step = softplus(p.step[row * p.step_stride + head] + p.dt_bias[head]);
    to.dt[rows + t] = step;
    to.e[rows + t] = std::exp(step * p.a[head]);
  }
  join_records(p.decay, width, p.n_head, q, head, 1, to.e + at);
  join_records(p.dt, width, p.n_head, q, head, 1, to.dt + at);
}

void prepare_group(const Args &p, const Tokens &to, const Seq &q, int64_t n_token, int64_t group, bool is_b) {
  const int64_t at = group * n_token, rows = at + q.at + q.fold, n = p.n_state;
  const int64_t first = p.n_head * p.dim + ((is_b ? 0 : p.n_group) + group) * n;
  convolve(p.conv, p.batch.width, q, first, n, (is_b ? to.b : to.c) + rows * n);
  if (is_b) join_records(p.b, p.batch.width, p.n_group, q, group, n, to.b + at * n);
}

// R rows: to = e from + x b^T; their sums with c, if there is one.
template <bool READS>
f8 add_token(const float *from, float *to, int64_t n, float e, const float *x, const float *b, const float *c) {
  f8 s[R] = {}, add[R];
  const f8 by = all(e);
  for (int64_t r = 0; r < R; r++) add[r] = all(x[r]);
  for (int64_t j = 0; j < n; j += 8) {
    const f8 bj = load(b + j), cj = READS ? load(c + j) : bj;
    for (int64_t r = 0; r < R; r++) {
      const f8 y = fma(add[r], bj, by * load(from + r * n + j));
      store(to + r * n + j, y);
      if (READS) s[r] = fma(y, cj, s[r]);
    }
  }
  return READS ? sums(s) : s[0];
}

void advance(const Args &p, const Tokens &of, const Seq &q, int64_t n_token, int64_t head, int64_t first) {
  const int64_t n = p.n_state, n_block = std::min(PART, p.dim - first) / R, group = head / (p.n_head / p.n_group);
  const int64_t at = head * n_token + q.at, group_at = group * n_token + q.at;
  const float *x = of.x + at * p.dim + first, *b = of.b + group_at * n, *c = of.c + group_at * n;
  const float *e = of.e + at, *dt = of.dt + at;
  float *state = p.state + ((q.slot * p.n_head + head) * p.dim + first) * n;
  float own[PART * WIDEST];  // of rows that are recorded: the stored state stays before them
  const float *from = state;
  for (int64_t t = 0; t < q.n_token(); t++) {
    const bool is_row = t >= q.fold;
    float *to = q.keeps() || (q.mode == VERIFY && !is_row) ? state : own;
    float *out = is_row ? p.out + ((q.start + q.row + t - q.fold) * p.n_head + head) * p.dim + first : nullptr;
    for (int64_t i = 0; i < n_block; i++) {
      const float *xi = x + t * p.dim + i * R;
      float add[R];
      store(add, all(dt[t]) * load(xi));
      const float *old = from + i * R * n;
      if (!is_row) {
        add_token<false>(old, to + i * R * n, n, e[t], add, b + t * n, nullptr);
        continue;
      }
      const f8 y = add_token<true>(old, to + i * R * n, n, e[t], add, b + t * n, c + t * n);
      store(out + i * R, fma(all(p.d[head]), load(xi), y));
    }
    from = to;
  }
}

}  // namespace

extern "C" void pyspec_mamba2(const Args *args) {
  const Args &p = *args;
  for (Pieces pieces(p.batch); pieces.next();) {
    const std::vector<Seq> &seqs = pieces.seqs;
    const int64_t n = pieces.n_token, n_unit = p.n_head + 2 * p.n_group, n_part = (p.dim + PART - 1) / PART;
    const Tokens tokens(p, n);
    each(int64_t(seqs.size()) * n_unit, [&](int64_t i) {
      const Seq &q = seqs[i / n_unit];
      const int64_t unit = i % n_unit, other = unit - p.n_head;
      if (other < 0) prepare_head(p, tokens, q, n, unit);
      else prepare_group(p, tokens, q, n, other % p.n_group, other < p.n_group);
    });
    const int64_t n_job = p.n_head * n_part;
    each(int64_t(seqs.size()) * n_job, [&](int64_t i) {
      advance(p, tokens, seqs[i / n_job], n, i % n_job / n_part, i % n_part * PART);
    });
  }
  if (p.batch.n_row > 0) clear_rest(p.batch, p.out, p.n_head * p.dim);
}
