// Rows for products: prepared as cuda/ops/rows/ref.py defines it, and as whole numbers of 16 or 8 bits. And gates behind products.
#include "eight.h"
#include "pool.h"
#include "prep.h"
#include "product.h"

using namespace pyspec;

namespace {

enum Kind { PLAIN = 0, NORM = 1, HEADS = 2, GATE = 3, GLU = 4, GROUPS = 5, RELU2 = 6 };  // PrepKind

struct PrepareArgs {
  const float *x;
  float *out;  // [n_row, n_in]; may be null for PLAIN
  int16_t *q;  // whole numbers, or null
  float *scales, *sums;
  Row8 *eight;  // [n_chunk, n_row], or null
  const float *weight, *gate;
  int64_t kind, n_row, n_in, stride, gate_stride, gate_step, dim;
  double eps;
};

void prepare(const PrepareArgs &p, const float *x, const float *gate, float *out) {
  const float eps = float(p.eps);
  switch (p.kind) {
    case NORM: return rms_norm(x, out, p.n_in, p.weight, eps);
    case HEADS: return head_norm(x, out, p.n_in, p.dim, p.weight, eps, gate);
    case GATE: return head_gate(x, out, p.n_in, p.dim, gate, p.gate_step);
    case GLU: return glu_silu(x, out, p.n_in);
    case GROUPS: return group_norm(x, out, p.n_in, p.dim, p.weight, eps, gate);
    case RELU2: return relu2(x, out, p.n_in);
    default: std::memcpy(out, x, size_t(p.n_in) * 4);
  }
}

struct GatesArgs {
  const float *both, *residual;  // [n_row, 2 n]: gates, then ups; residual [n_row, n] or null
  float *out;
  int64_t n_row, n, gelu;
  double gate_limit, limit;  // cut gates at the first, ups at plus and minus the second; 0: do not
};

}  // namespace

extern "C" void pyspec_prepare(const PrepareArgs *p) {
  const int64_t n_chunk = (p->n_in + CHUNK - 1) / CHUNK;
  each_range(p->n_row, 1, [&](int64_t a, int64_t b) {
    for (int64_t r = a; r < b; r++) {
      const float *x = p->x + r * p->stride;
      if (p->out) prepare(*p, x, p->gate ? p->gate + r * p->gate_stride : nullptr, p->out + r * p->n_in);
      const float *from = p->out ? p->out + r * p->n_in : x;
      for (int64_t c = 0; c < n_chunk && (p->q || p->eight); c++) {
        const int64_t at = r * n_chunk + c, left = p->n_in - c * CHUNK;
        const int n = int(left < CHUNK ? left : CHUNK);
        if (p->q) quantise(from + c * CHUNK, n, p->q + at * CHUNK, p->scales + at, p->sums + at * N_SUM);
        if (p->eight) quantise_eight(from + c * CHUNK, n, p->eight[c * p->n_row + r]);
      }
    }
  });
}

extern "C" void pyspec_gates(const GatesArgs *p) {
  each_range(p->n_row, 1, [&](int64_t a, int64_t b) {
    for (int64_t r = a; r < b; r++) {
      const float *gate = p->both + 2 * r * p->n, *up = gate + p->n;
      float *out = p->out + r * p->n;
      const f8 of_gate = all(float(p->gate_limit)), most = all(float(p->limit));
      by_eights(p->n, [&](int64_t i, auto get, auto put) {
        f8 g = get(gate + i), u = get(up + i);
        if (p->limit > 0) g = min(of_gate, g), u = max(-most, min(most, u));  // NaN stays NaN: the second is taken
        f8 y = (p->gelu ? gelu(g) : silu(g)) * u;
        if (p->residual) y = get(p->residual + r * p->n + i) + y;
        put(out + i, y);
      });
    }
  });
}
