// Between the products of latent attention and its sums: cuda/ops/rope_latent/ref.py defines it.
#include "hadamard.h"
#include "kv.h"
#include "pool.h"
#include "prep.h"
#include "turn.h"

using namespace pyspec;

namespace {

constexpr int64_t MOST = 1024;  // columns of a stored row

struct Args {
  const float *kv, *q, *plain, *norm, *cos, *sin;  // norm [rank]; plain [row, head, rank]
  const int64_t *rows;
  float *out;  // [row, head, rank + n_rot]
  char *k;
  uint16_t *k_scale;
  int64_t n_row, kv_stride, q_stride, n_pool, n_head, n_plain, rank, n_rot, neox, kind, turned;
  double eps;
};

// Turns the last dims of x, then all of them by hadamard
void turn_tail(const Args &p, int64_t row, float *x) {
  const int64_t half = p.n_rot / 2;
  turn(x + p.rank, p.cos + row * half, p.sin + row * half, half, p.neox);
  if (p.turned) hadamard(x, p.rank + p.n_rot, p.turned);
}

// Unit 0 of a row is its key, unit h + 1 the query of head h.
void unit(const Args &p, int64_t row, int64_t u) {
  const int64_t dim = p.rank + p.n_rot;
  if (u > 0) {
    const int64_t at = row * p.n_head + u - 1;
    float *out = p.out + at * dim;
    std::memcpy(out, p.plain + at * p.rank, size_t(p.rank) * 4);
    std::memcpy(out + p.rank, p.q + row * p.q_stride + (u - 1) * (p.n_plain + p.n_rot) + p.n_plain, size_t(p.n_rot) * 4);
    return turn_tail(p, row, out);
  }
  const int64_t to = p.rows[row];
  if (to < 0 || to >= p.n_pool) return;  // the host checks rows before
  float x[MOST];
  const float *from = p.kv + row * p.kv_stride;
  rms_norm(from, x, p.rank, p.norm, float(p.eps));
  std::memcpy(x + p.rank, from + p.rank, size_t(p.n_rot) * 4);
  turn_tail(p, row, x);
  uint16_t *scale = p.k_scale ? p.k_scale + to * head_factors(p.kind, dim) : nullptr;
  pack_row(p.kind, x, p.k + to * head_bytes(p.kind, dim), scale, dim);
}

}  // namespace

extern "C" void pyspec_rope_latent(const Args *p) {
  const int64_t n_unit = p->n_head + 1;
  each_range(p->n_row * n_unit, 1 + 8192 / (p->rank + p->n_rot), [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++) unit(*p, i / n_unit, i % n_unit);
  });
}
