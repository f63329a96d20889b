// The preparation of one row for a product, as cuda/ops/rows/ref.py defines it. Sums have one order: four vectors of eight lanes, then the tail.
// `out` may be `x` where both have the same size.
#pragma once
#include "simd.h"

namespace pyspec {

// body(i, load, store) for every eight columns, with zeros behind the last one.
template <typename F>
inline void by_eights(int64_t n, F &&body) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    body(i, [](const float *p) { return load(p); }, [](float *p, f8 x) { store(p, x); });
  }
  if (const int64_t rest = n - i) {
    body(i, [=](const float *p) { return load_tail(p, rest); }, [=](float *p, f8 x) { store_tail(p, x, rest); });
  }
}

inline float sum_of_squares(const float *x, int64_t n) {
  f8 s[4] = {};
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    for (int j = 0; j < 4; j++) {
      const f8 v = load(x + i + 8 * j);
      s[j] = fma(v, v, s[j]);
    }
  }
  by_eights(n - i, [&](int64_t j, auto get, auto) {
    const f8 v = get(x + i + j);
    s[0] = fma(v, v, s[0]);
  });
  return sum((s[0] + s[1]) + (s[2] + s[3]));
}

inline float inverse_rms(const float *x, int64_t n, float eps) {
  return 1.0f / __builtin_sqrtf(sum_of_squares(x, n) / float(n) + eps);
}

// RMSNorm over the row. weight [n], or null for ones.
inline void rms_norm(const float *x, float *out, int64_t n, const float *weight, float eps) {
  const f8 r = all(inverse_rms(x, n, eps));
  by_eights(n, [&](int64_t i, auto get, auto put) {
    const f8 y = get(x + i) * r;
    put(out + i, weight ? y * get(weight + i) : y);
  });
}

// RMSNorm over every head's `dim` columns, times silu(gate). weight [dim]; gate [n].
inline void head_norm(const float *x, float *out, int64_t n, int64_t dim, const float *weight, float eps, const float *gate) {
  for (int64_t h = 0; h < n; h += dim) {
    const f8 r = all(inverse_rms(x + h, dim, eps));
    by_eights(dim, [&](int64_t i, auto get, auto put) {
      put(out + h + i, get(x + h + i) * r * get(weight + i) * silu(get(gate + h + i)));
    });
  }
}

// Times sigmoid(gate). gate [n / dim, dim] with `gate_step` columns from head to head.
inline void head_gate(const float *x, float *out, int64_t n, int64_t dim, const float *gate, int64_t gate_step) {
  for (int64_t h = 0; h * dim < n; h++) {
    const float *own = gate + h * gate_step;
    by_eights(dim, [&](int64_t i, auto get, auto put) { put(out + h * dim + i, get(x + h * dim + i) * sigmoid(get(own + i))); });
  }
}

// x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)), which is GELU's form with a tanh.
inline f8 gelu(f8 x) {
  const f8 inner = fma(x * x * x, all(0.044715f), x);
  return x * sigmoid(inner * all(1.5957691216f));
}

// silu of the first half of the columns times the second half: x [2 n] -> out [n].
inline void glu_silu(const float *x, float *out, int64_t n) {
  by_eights(n, [&](int64_t i, auto get, auto put) { put(out + i, silu(get(x + i)) * get(x + n + i)); });
}

// gelu in its place.
inline void glu_gelu(const float *x, float *out, int64_t n) {
  by_eights(n, [&](int64_t i, auto get, auto put) { put(out + i, gelu(get(x + i)) * get(x + n + i)); });
}

// Times silu(gate), then RMSNorm over every `dim` columns, times the weight. weight and gate [n].
inline void group_norm(const float *x, float *out, int64_t n, int64_t dim, const float *weight, float eps, const float *gate) {
  by_eights(n, [&](int64_t i, auto get, auto put) { put(out + i, silu(get(gate + i)) * get(x + i)); });
  for (int64_t g = 0; g < n; g += dim) {
    const f8 r = all(inverse_rms(out + g, dim, eps));
    by_eights(dim, [&](int64_t i, auto get, auto put) { put(out + g + i, get(out + g + i) * r * get(weight + g + i)); });
  }
}

// max(x, 0)^2.
inline void relu2(const float *x, float *out, int64_t n) {
  by_eights(n, [&](int64_t i, auto get, auto put) {
    const f8 y = max(all(0.0f), get(x + i));
    put(out + i, y * y);
  });
}

}  // namespace pyspec
