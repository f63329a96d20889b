// Rows of the embedding by token, unpacked, and cos and sin of positions: cuda/ops/embed/ref.py and cuda/ops/angles/ref.py define them.
// A value is exact times its scale, and one sum is rounded, so results equal the reference's but for the sign of zeros.
#include <cstring>

#include "pool.h"
#include "prep.h"
#include "simd.h"
#include "unpacked.h"

using namespace pyspec;

namespace {

struct AnglesArgs {
  const int64_t *positions;
  const float *freq;
  float *cos, *sin;
  int64_t n_row, n;
  double factor;
};

struct EmbedArgs {
  const uint8_t *raw;
  const void *table;  // the lattice of a type that has one
  const int64_t *tokens;
  float *out;
  int64_t type, n_token, row_bytes, n_row, n_in;
};

typedef double d8 __attribute__((vector_size(64)));

// sin and cos, rounded from f64 sums, for angles up to 2^31.
void turned(f8 theta, f8 &sin, f8 &cos) {
  const double magic = 6755399441055744.0;  // 1.5 2^52: sums with it have no fraction
  const d8 x = __builtin_convertvector(theta, d8), k = (x * 0.63661977236758134 + magic) - magic;
  const d8 r = (x - k * 1.570796012878418) - k * 3.139164786504813e-07;  // k times the first is exact
  const d8 z = r * r;
  d8 s = z * 0.0 - 2.505210838544172e-8, c = z * 0.0 - 2.755731922398589e-7;
  for (double f : {2.755731922398589e-6, -1.984126984126984e-4, 8.333333333333333e-3, -1.6666666666666666e-1, 1.0}) s = s * z + f;
  for (double f : {2.48015873015873e-5, -1.388888888888889e-3, 4.1666666666666664e-2, -0.5, 1.0}) c = c * z + f;
  const i8 quarter = __builtin_convertvector(k, i8);
  const f8 a = __builtin_convertvector(s * r, f8), b = __builtin_convertvector(c, f8);
  sin = as_float(bits((quarter & 1) != 0 ? b : a) ^ (quarter & 2) << 30);
  cos = as_float(bits((quarter & 1) != 0 ? a : b) ^ ((quarter + 1) & 2) << 30);
}

void turn(const AnglesArgs &p, int64_t row) {
  const float factor = float(p.factor), at = float(p.positions[row]), position = factor == 1.0f ? at : at / factor;
  by_eights(p.n, [&](int64_t i, auto get, auto put) {
    f8 sin, cos;
    turned(all(position) * get(p.freq + i), sin, cos);
    put(p.sin + row * p.n + i, sin);
    put(p.cos + row * p.n + i, cos);
  });
}

void plain_row(int64_t type, const uint8_t *row, int64_t n_in, float *out) {
  if (type == 0) {
    std::memcpy(out, row, size_t(n_in) * 4);
    return;
  }
  for (int64_t i = 0; i < n_in; i++) {
    uint16_t x;
    std::memcpy(&x, row + 2 * i, 2);
    const uint32_t wide = uint32_t(x) << 16;
    if (type == 1) out[i] = half_to_float(x);
    else std::memcpy(out + i, &wide, 4);
  }
}

void row_of(const EmbedArgs &p, const uint8_t *row, float *out) {
  if (p.type == 0 || p.type == 1 || p.type == 30) return plain_row(p.type, row, p.n_in, out);  // ggml's F32, F16, BF16
  const UnpackArgs one{row, out, p.table, p.type, 1, p.n_in};
  pyspec_unpack(&one);
}

}  // namespace

extern "C" void pyspec_angles(const AnglesArgs *p) {
  each_range(p->n_row, 1 + 512 / (p->n + 1), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++) turn(*p, row);
  });
}

extern "C" void pyspec_embed(const EmbedArgs *p) {
  each_range(p->n_row, 1 + 8192 / (p->n_in + 1), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++) {
      const int64_t token = p->tokens[row];
      float *out = p->out + row * p->n_in;
      if (token >= 0 && token < p->n_token) row_of(*p, p->raw + token * p->row_bytes, out);
      else for (int64_t i = 0; i < p->n_in; i++) out[i] = __builtin_nanf("");  // the host checks tokens before
    }
  });
}
