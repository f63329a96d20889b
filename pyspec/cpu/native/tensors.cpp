// What is left between kernels: sums, scaling, copies and picked rows, of f32 rows with strides.
#include <cmath>

#include "kv.h"
#include "pool.h"
#include "prep.h"

using namespace pyspec;

namespace {

struct AddArgs {
  const float *x, *y;
  float *out;
  int64_t n_row, n, x_stride, y_stride;  // y_stride 0: the same values for every row
  double cap;                            // cap * tanh(x / cap) of the sum; 0: the sum itself
};

struct CopyArgs {
  const float *x;
  float *out;
  const int64_t *rows;  // of x, or null for all in order
  int64_t n_row, n, x_stride, out_stride, n_x;
  double factor;
};

struct NextArgs {
  const int64_t *x;
  int64_t *out;
  int64_t n;
};

struct FactorArgs {
  const int64_t *positions;
  float *out;
  int64_t n, n_ctx, offset;
  double scale;
};

struct TimesArgs {
  const float *x, *factors;
  float *out;
  int64_t n_row, n;
};

struct GateArgs {
  const float *gate, *y;
  float *out;
  int64_t n_row, n, gate_stride, y_stride, per, act;  // per: columns of y for each gate
};

struct KeysArgs {
  const float *keys;  // [row, head * dim]
  const int64_t *rows;
  char *k;
  uint16_t *k_scale;
  int64_t n_row, step, n_head, dim, n_pool, kind;
};

enum Act { GELU, SILU, SIGMOID, SOFTPLUS, SOFTPLUS2, NONE };  // in the order of tensors.py

inline f8 tanh(f8 x) {
  const f8 e = exp(all(2.0f) * min(max(x, all(-20.0f)), all(20.0f)));
  return (e - all(1.0f)) / (e + all(1.0f));
}

inline f8 activated(f8 x, int64_t act) {
  if (act == NONE) return x;
  if (act == GELU) return gelu(x);
  if (act == SILU) return silu(x);
  if (act == SIGMOID) return sigmoid(x);
  const f8 unit = all(act == SOFTPLUS ? 1.0f : 0.69314718f);
  return softplus(x * unit) / unit;
}

}  // namespace

extern "C" void pyspec_add(const AddArgs *p) {
  each_range(p->n_row, 1 + 4096 / (p->n + 1), [&](int64_t a, int64_t b) {
    for (int64_t r = a; r < b; r++) {
      const float *x = p->x + r * p->x_stride, *y = p->y ? p->y + r * p->y_stride : nullptr;
      by_eights(p->n, [&](int64_t i, auto get, auto put) {
        f8 s = y ? get(x + i) + get(y + i) : get(x + i);
        if (p->cap != 0) s = tanh(s / all(float(p->cap))) * all(float(p->cap));
        put(p->out + r * p->n + i, s);
      });
    }
  });
}

extern "C" void pyspec_copy(const CopyArgs *p) {
  each_range(p->n_row, 1 + 4096 / (p->n + 1), [&](int64_t a, int64_t b) {
    for (int64_t r = a; r < b; r++) {
      int64_t from = p->rows ? p->rows[r] : r;
      if (from < 0 || from >= p->n_x) from = 0;
      by_eights(p->n, [&](int64_t i, auto get, auto put) {
        put(p->out + r * p->out_stride + i, get(p->x + from * p->x_stride + i) * all(float(p->factor)));
      });
    }
  });
}

extern "C" void pyspec_next_positions(const NextArgs *p) {
  for (int64_t i = 0; i < p->n; i++) p->out[i] = p->x[i] + 1;
}

extern "C" void pyspec_query_factors(const FactorArgs *p) {
  for (int64_t i = 0; i < p->n; i++) {
    p->out[i] = float(std::log1p(double((p->positions[i] + p->offset) / p->n_ctx)) * p->scale + 1);
  }
}

extern "C" void pyspec_times_rows(const TimesArgs *p) {
  each_range(p->n_row, 1 + 4096 / (p->n + 1), [&](int64_t a, int64_t b) {
    for (int64_t r = a; r < b; r++) {
      const f8 by = all(p->factors[r]);
      by_eights(p->n, [&](int64_t i, auto get, auto put) {
        put(p->out + r * p->n + i, get(p->x + r * p->n + i) * by);
      });
    }
  });
}

extern "C" void pyspec_gate_times(const GateArgs *p) {
  each_range(p->n_row, 1 + 1024 / (p->n + 1), [&](int64_t a, int64_t b) {
    for (int64_t r = a; r < b; r++) {
      const float *gate = p->gate + r * p->gate_stride, *y = p->y + r * p->y_stride;
      float *out = p->out + r * p->n;
      if (p->per == 1) {
        by_eights(p->n, [&](int64_t i, auto get, auto put) {
          put(out + i, activated(get(gate + i), p->act) * get(y + i));
        });
        continue;
      }
      for (int64_t h = 0; h < p->n / p->per; h++, y += p->per, out += p->per) {
        const f8 by = activated(all(gate[h]), p->act);
        by_eights(p->per, [&](int64_t i, auto get, auto put) { put(out + i, get(y + i) * by); });
      }
    }
  });
}

extern "C" void pyspec_write_keys(const KeysArgs *p) {
  const int64_t n_head = p->n_head, dim = p->dim;
  each_range(p->n_row, 1 + 4096 / (n_head * dim), [&](int64_t a, int64_t b) {
    for (int64_t r = a; r < b; r++) {
      const int64_t to = p->rows[r] * n_head;
      for (int64_t h = 0; h < n_head && p->rows[r] >= 0 && p->rows[r] < p->n_pool; h++) {  // the host checks rows before
        uint16_t *scale = p->k_scale ? p->k_scale + (to + h) * head_factors(p->kind, dim) : nullptr;
        pack_row(p->kind, p->keys + r * p->step + h * dim, p->k + (to + h) * head_bytes(p->kind, dim), scale, dim);
      }
    }
  });
}
