// Head norms, rope, and keys and values into their pages: cuda/ops/rope_kv/ref.py defines it.
#include "hadamard.h"
#include "kv.h"
#include "pool.h"
#include "prep.h"
#include "turn.h"

using namespace pyspec;

namespace {

constexpr int64_t MOST = 1024;  // columns of a head

struct Args {
  const float *y, *q_norm, *k_norm, *cos, *sin;
  const int64_t *rows;
  float *q;
  char *k, *v;
  uint16_t *k_scale, *v_scale;
  int64_t n_row, stride, n_pool, n_q, n_kv, dim, n_rot, neox, step, k_kind, v_kind, turned_k, turned_v, norms_v, keys_are_values,
      norm_behind;
  double eps;
};

void head(const Args &p, int64_t row, const float *x, const float *norm, float *out) {
  if (norm && !p.norm_behind) rms_norm(x, out, p.dim, norm, float(p.eps));
  else std::memcpy(out, x, size_t(p.dim) * 4);
  const int64_t half = p.n_rot / 2;
  turn(out, p.cos + row * half, p.sin + row * half, half, p.neox);
  if (p.norm_behind) rms_norm(out, out, p.dim, norm, float(p.eps));
  if (p.turned_k) hadamard(out, p.dim, p.turned_k);
}

void put(const Args &p, int64_t kind, char *plane, uint16_t *scale, int64_t to, int64_t h, const float *x) {
  const int64_t at = to * p.n_kv + h;
  scale = scale ? scale + at * head_factors(kind, p.dim) : nullptr;
  pack_row(kind, x, plane + at * head_bytes(kind, p.dim), scale, p.dim);
}

// Unit u of a row: a head of q, of k or of v.
void unit(const Args &p, int64_t row, int64_t u) {
  const float *y = p.y + row * p.stride, *keys = y + p.n_q * p.step;
  const float *values = p.keys_are_values ? keys : keys + p.n_kv * p.dim;
  if (u < p.n_q) return head(p, row, y + u * p.step, p.q_norm, p.q + (row * p.n_q + u) * p.dim);
  const int64_t h = (u - p.n_q) % p.n_kv, to = p.rows[row];
  if (to < 0 || to >= p.n_pool) return;  // the host checks rows before
  float x[MOST];
  if (u >= p.n_q + p.n_kv) {
    if (!p.turned_v && !p.norms_v) return put(p, p.v_kind, p.v, p.v_scale, to, h, values + h * p.dim);
    if (p.norms_v) rms_norm(values + h * p.dim, x, p.dim, nullptr, float(p.eps));
    else std::memcpy(x, values + h * p.dim, size_t(p.dim) * 4);
    if (p.turned_v) hadamard(x, p.dim, p.turned_v);
    return put(p, p.v_kind, p.v, p.v_scale, to, h, x);
  }
  head(p, row, keys + h * p.dim, p.k_norm, x);
  put(p, p.k_kind, p.k, p.k_scale, to, h, x);
}

}  // namespace

extern "C" void pyspec_rope_kv(const Args *p) {
  const int64_t n_unit = p->n_q + 2 * p->n_kv;
  each_range(p->n_row * n_unit, 1 + 8192 / p->dim, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++) unit(*p, i / n_unit, i % n_unit);
  });
}
