// Products with weights as they are: f32, f16 and bf16.
#pragma once
#include "rows.h"

namespace pyspec {

struct F32 {
  static constexpr int BYTES = 4;
  static ALWAYS f8 at(const uint8_t *row, int64_t i) { return load(reinterpret_cast<const float *>(row) + i); }
  static float one(const uint8_t *row, int64_t i) { return reinterpret_cast<const float *>(row)[i]; }
};
struct F16 {
  static constexpr int BYTES = 2;
  static ALWAYS f8 at(const uint8_t *row, int64_t i) { return halves(reinterpret_cast<const uint16_t *>(row) + i); }
  static float one(const uint8_t *row, int64_t i) { return half_to_float(reinterpret_cast<const uint16_t *>(row)[i]); }
};
struct BF16 {
  static constexpr int BYTES = 2;
  static ALWAYS f8 at(const uint8_t *row, int64_t i) { return bf16s(reinterpret_cast<const uint16_t *>(row) + i); }
  static float one(const uint8_t *row, int64_t i) {
    const uint32_t b = uint32_t(reinterpret_cast<const uint16_t *>(row)[i]) << 16;
    float x;
    std::memcpy(&x, &b, 4);
    return x;
  }
};

// acc[o][r] = weights[o] . row r
template <typename T, int O, int R>
ALWAYS void multiply_plain(const uint8_t *weights, int64_t n_byte, const Rows &rows, int64_t first, f8 (&acc)[O][R]) {
  const float *x[R];
  for (int r = 0; r < R; r++) x[r] = rows.x + (first + r) * rows.n_in;
UNROLL(8)
  for (int o = 0; o < O; o++)
UNROLL(8)
    for (int r = 0; r < R; r++) acc[o][r] = all(0.0f);
  int64_t i = 0;
  for (; i + 8 <= rows.n_in; i += 8) {
    f8 xs[R];
UNROLL(8)
    for (int r = 0; r < R; r++) xs[r] = load(x[r] + i);
UNROLL(8)
    for (int o = 0; o < O; o++) {
      const f8 w = T::at(weights + o * n_byte, i);
UNROLL(8)
      for (int r = 0; r < R; r++) acc[o][r] = fma(w, xs[r], acc[o][r]);
    }
  }
  if (i == rows.n_in) return;
  for (int o = 0; o < O; o++) {
    float tail[8] = {};
    for (int64_t k = i; k < rows.n_in; k++) tail[k - i] = T::one(weights + o * n_byte, k);
    for (int r = 0; r < R; r++) acc[o][r] = fma(load(tail), load_tail(x[r] + i, rows.n_in - i), acc[o][r]);
  }
}

}  // namespace pyspec
