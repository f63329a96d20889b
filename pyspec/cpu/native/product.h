// Rows as 16-bit whole numbers, and their products with packed weights. A product's bits depend on its row and its weights alone:
// how many rows run together, and on how many threads, changes the order of loops and never the order of a sum.
#pragma once
#include <cstdint>
#include <cstring>

#include "simd.h"
#include "unpack.h"

namespace pyspec {

constexpr int N_SUM = 24;  // of each 256 values: sums of 32 (8 of them), then of 16 (16 of them)

// Rows in both forms. Whole numbers: value i of a row is q[i] * scale[i / 256] to within 2^-16 of its 256 values' largest.
struct Rows {
  const float *x;      // [row, n_in], or null if no weights are f32, f16 or bf16
  const int16_t *q;    // [row, n_chunk * 256], zeros behind n_in
  const float *scale;  // [row, n_chunk]
  const float *sums;   // [row, n_chunk, N_SUM], of q
  int64_t n_in, n_chunk;
};

// 256 values, zeros behind the n-th, as whole numbers. A scale that is not finite makes every product of the row NaN, as the values would.
inline void quantise(const float *x, int n, int16_t *q, float *scale, float *sums) {
  f8 most = all(0.0f);
  int i = 0;
  i8 odd = {0};
  for (; i + 8 <= n; i += 8) {
    const f8 v = load(x + i);
    const f8 size = as_float(bits(v) & 0x7fffffff);
    odd |= bits(size) >= 0x7f800000;
    most = max(most, size);
  }
  float top = largest(most);
  bool bad = false;
  for (int k = 0; k < 8; k++) bad |= odd[k] != 0;
  for (; i < n; i++) {
    const float size = __builtin_fabsf(x[i]);
    bad |= !(size <= 3.402823466e38f);
    top = size > top ? size : top;
  }
  if (bad) top = __builtin_nanf("");
  *scale = top * (1.0f / 32767.0f);
  const float inverse = top > 1e-30f ? 32767.0f / top : 0.0f;
  if (top > 0.0f && inverse == 0.0f) *scale = 0.0f;
  for (i = 0; i + 8 <= n; i += 8) {
    const f8 v = load(x + i) * all(inverse);
    const i8 sign = bits(v) & int32_t(0x80000000);
    const i8 r = to_int(min(max(v + as_float(bits(all(0.5f)) | sign), all(-32767.0f)), all(32767.0f)));
    for (int k = 0; k < 8; k++) q[i + k] = int16_t(r[k]);
  }
  for (; i < n; i++) {
    const float v = x[i] * inverse;
    q[i] = int16_t(v < 0 ? v - 0.5f : v + 0.5f);
  }
  for (; i < CHUNK; i++) q[i] = 0;
  if (bad) std::memset(q, 0, CHUNK * 2), q[0] = 1;
  for (int k = 0; k < 16; k++) {
    int32_t s = 0;
    for (int j = 0; j < 16; j++) s += q[16 * k + j];
    sums[8 + k] = float(s);
  }
  for (int k = 0; k < 8; k++) sums[k] = sums[8 + 2 * k] + sums[9 + 2 * k];  // whole numbers below 2^20: exact
}

// Sums of products of 16 pairs, two to a lane
inline i8 dot_step(i8 sum, const int16_t *w, const int16_t *x) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  return i8(_mm256_dpwssd_epi32(__m256i(sum), _mm256_loadu_si256(reinterpret_cast<const __m256i *>(w)),
                                _mm256_loadu_si256(reinterpret_cast<const __m256i *>(x))));
#elif defined(__AVX2__)
  const __m256i y = _mm256_madd_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(w)),
                                      _mm256_loadu_si256(reinterpret_cast<const __m256i *>(x)));
  return i8(_mm256_add_epi32(__m256i(sum), y));
#else
  for (int k = 0; k < 8; k++) sum[k] += int32_t(w[2 * k]) * x[2 * k] + int32_t(w[2 * k + 1]) * x[2 * k + 1];
  return sum;
#endif
}

// 256 weights of one row of a matrix
template <typename T>
struct Unpacked {
  static constexpr int N_SCALE = CHUNK / T::GROUP, N_MIN = T::MINS ? T::MINS : 8;
  alignas(32) int16_t w[CHUNK];
  alignas(32) float d[N_SCALE < 8 ? 8 : N_SCALE];
  alignas(32) float m[N_MIN];

  void read(const uint8_t *row, int64_t chunk, int64_t n_in, const void *table) {
    const int64_t left = n_in - chunk * CHUNK;
    const uint8_t *from = row + chunk * (CHUNK / T::BLOCK) * T::BYTES;
    if (T::BLOCK == CHUNK || left >= CHUNK) {
      T::unpack(from, CHUNK, table, w, d, m);
      return;
    }
    std::memset(w, 0, sizeof w), std::memset(d, 0, sizeof d), std::memset(m, 0, sizeof m);
    T::unpack(from, int(left), table, w, d, m);
  }
};

// acc[o][r] += weights[o] . row r, for 256 of their values
template <typename T, int O, int R>
inline void multiply(const Unpacked<T> *weights, const Rows &rows, int64_t first, int64_t chunk, f8 *acc, int64_t stride) {
  const int16_t *x[R];
  f8 total[O][R];
  for (int r = 0; r < R; r++) x[r] = rows.q + ((first + r) * rows.n_chunk + chunk) * CHUNK;
  for (int o = 0; o < O; o++)
    for (int r = 0; r < R; r++) total[o][r] = all(0.0f);
  for (int g = 0; g < CHUNK / T::GROUP; g++) {
    i8 sum[O][R];
#pragma GCC unroll 8
    for (int o = 0; o < O; o++)
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) sum[o][r] = i8{0};
    for (int i = g * T::GROUP; i < (g + 1) * T::GROUP; i += 16) {
#pragma GCC unroll 8
      for (int o = 0; o < O; o++)
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) sum[o][r] = dot_step(sum[o][r], weights[o].w + i, x[r] + i);
    }
#pragma GCC unroll 8
    for (int o = 0; o < O; o++)
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) total[o][r] = fma(to_float(sum[o][r]), all(weights[o].d[g]), total[o][r]);
  }
  for (int r = 0; r < R; r++) {
    const int64_t at = (first + r) * rows.n_chunk + chunk;
    const float *sums = rows.sums + at * N_SUM;
    const f8 scale = all(rows.scale[at]);
    for (int o = 0; o < O; o++) {
      if (T::MINS == 8) total[o][r] = fma(load(weights[o].m), load(sums), total[o][r]);
      if (T::MINS == 16)
        total[o][r] = fma(load(weights[o].m), load(sums + 8), fma(load(weights[o].m + T::MINS - 8), load(sums + 16), total[o][r]));
      acc[o * stride + r] = fma(total[o][r], scale, acc[o * stride + r]);
    }
  }
}

// Weights as they are: f32, f16 and bf16
struct F32 {
  static constexpr int BYTES = 4;
  static f8 at(const uint8_t *row, int64_t i) { return load(reinterpret_cast<const float *>(row) + i); }
  static float one(const uint8_t *row, int64_t i) { return reinterpret_cast<const float *>(row)[i]; }
};
struct F16 {
  static constexpr int BYTES = 2;
  static f8 at(const uint8_t *row, int64_t i) { return halves(reinterpret_cast<const uint16_t *>(row) + i); }
  static float one(const uint8_t *row, int64_t i) { return half_to_float(reinterpret_cast<const uint16_t *>(row)[i]); }
};
struct BF16 {
  static constexpr int BYTES = 2;
  static f8 at(const uint8_t *row, int64_t i) { return bf16s(reinterpret_cast<const uint16_t *>(row) + i); }
  static float one(const uint8_t *row, int64_t i) {
    const uint32_t b = uint32_t(reinterpret_cast<const uint16_t *>(row)[i]) << 16;
    float x;
    std::memcpy(&x, &b, 4);
    return x;
  }
};

// acc[o][r] = weights[o] . row r
template <typename T, int O, int R>
inline void multiply_plain(const uint8_t *weights, int64_t n_byte, const Rows &rows, int64_t first, f8 (&acc)[O][R]) {
  const float *x[R];
  for (int r = 0; r < R; r++) x[r] = rows.x + (first + r) * rows.n_in;
  for (int o = 0; o < O; o++)
    for (int r = 0; r < R; r++) acc[o][r] = all(0.0f);
  int64_t i = 0;
  for (; i + 8 <= rows.n_in; i += 8) {
    f8 xs[R];
    for (int r = 0; r < R; r++) xs[r] = load(x[r] + i);
    for (int o = 0; o < O; o++) {
      const f8 w = T::at(weights + o * n_byte, i);
      for (int r = 0; r < R; r++) acc[o][r] = fma(w, xs[r], acc[o][r]);
    }
  }
  for (; i < rows.n_in; i++)
    for (int o = 0; o < O; o++)
      for (int r = 0; r < R; r++) acc[o][r][i % 8] = __builtin_fmaf(T::one(weights + o * n_byte, i), x[r][i], acc[o][r][i % 8]);
}

}  // namespace pyspec
