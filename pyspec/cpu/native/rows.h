// Rows of f32 as 16-bit whole numbers, in blocks of 256 with an f32 scale.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "panel.h"

namespace pyspec {

constexpr int N_SUM = 24;  // of each 256 values: sums of 32 (8 of them), then of 16 (16 of them)

// Rows in both forms. Whole numbers: a value is its number * scale to within 2^-16 of its 256 values' largest.
struct Rows {
  const float *x;      // [row, n_in], or null if no weights are f32, f16 or bf16
  const int16_t *q;    // [row, n_chunk * 256], zeros behind n_in; put_four says in which order each four lie
  const float *scale;  // [row, n_chunk]
  const float *sums;   // [row, n_chunk, N_SUM], of q
  int64_t n_in, n_chunk;
  const int32_t *place = nullptr;  // row r of a product is row place[r] here; null: row r

  ALWAYS int64_t of(int64_t row) const { return place == nullptr ? row : place[row]; }
  // Groups of GROUP weights in a chunk: the last chunk ends with the row, and what lies behind it is not read
  template <int GROUP>
  ALWAYS int groups(int64_t chunk) const { return int(std::min<int64_t>(CHUNK, n_in - chunk * CHUNK) + GROUP - 1) / GROUP; }
  const float *values(int64_t row) const { return x + of(row) * n_in; }
  // Number p of a row's chunk is the pair p
  const int32_t *pairs(int64_t row, int64_t chunk) const {
    return reinterpret_cast<const int32_t *>(q + (of(row) * n_chunk + chunk) * CHUNK);
  }
};

// Whole numbers nearest to x (ties to even), below 2^22
ALWAYS i8 nearest(f8 x) { return bits(x + all(12582912.0f)) - 0x4b400000; }

#if defined(__AVX2__)
// Sums of the eight lanes of each of eight vectors
ALWAYS __m256i sums_of(const __m256i *x) {
  const __m256i a = _mm256_hadd_epi32(_mm256_hadd_epi32(x[0], x[1]), _mm256_hadd_epi32(x[2], x[3]));
  const __m256i b = _mm256_hadd_epi32(_mm256_hadd_epi32(x[4], x[5]), _mm256_hadd_epi32(x[6], x[7]));
  return _mm256_add_epi32(_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31));
}
#endif

// Each four numbers lie so that their two words meet the bytes of four weights. Numbers 0 2 1 3 meet bytes that became pairs of 16 bits. With
// products of bytes the first word has their high bytes, the second one their low bytes less 128, in the order of the weights.
inline void put_four(const i8 &r, int at, int16_t *to) {
#if PYSPEC_NEON
  int8_t four[8];
  for (int j = 0; j < 4; j++) four[j] = int8_t(r[at + j] >> 8), four[4 + j] = int8_t((r[at + j] & 255) - 128);
  std::memcpy(to, four, 8);
#else
  constexpr int TO[4] = {0, 2, 1, 3};
  for (int j = 0; j < 4; j++) to[TO[j]] = int16_t(r[at + j]);
#endif
}

// 256 values times `inverse`
inline void round_chunk(const float *x, float inverse, int16_t *q, float *sums) {
#if defined(__AVX2__)
  const __m256i order = _mm256_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15, 0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
  const __m256i one = _mm256_set1_epi16(1);
  __m256i of[2];
  for (int half = 0; half < 2; half++) {
    __m256i s[8];
UNROLL(8)
    for (int k = 0; k < 8; k++, x += 16, q += 16) {
      const __m256i a = __m256i(nearest(load(x) * all(inverse))), b = __m256i(nearest(load(x + 8) * all(inverse)));
      const __m256i y = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
      _mm256_storeu_si256(reinterpret_cast<__m256i *>(q), _mm256_shuffle_epi8(y, order));
      s[k] = _mm256_madd_epi16(y, one);
    }
    of[half] = sums_of(s);
    store(sums + 8 + 8 * half, to_float(i8(of[half])));
  }
  store(sums, to_float(i8(_mm256_permute4x64_epi64(_mm256_hadd_epi32(of[0], of[1]), 0xd8))));
#else
  for (int k = 0; k < 16; k++) {
    int32_t s = 0;
    for (int i = 16 * k; i < 16 * k + 16; i += 8) {
      const i8 r = nearest(load(x + i) * all(inverse));
      put_four(r, 0, q + i), put_four(r, 4, q + i + 4);
      for (int j = 0; j < 8; j++) s += r[j];
    }
    sums[8 + k] = float(s);
  }
  for (int k = 0; k < 8; k++) sums[k] = sums[8 + 2 * k] + sums[9 + 2 * k];  // whole numbers below 2^20: exact
#endif
}

// n values, at most 256, as whole numbers with zeros behind them. Where a value is not finite, every product of the row is NaN.
inline void quantise(const float *x, int n, int16_t *q, float *scale, float *sums) {
  alignas(32) float padded[CHUNK];
  if (n < CHUNK) {
    std::memcpy(padded, x, size_t(n) * 4);
    std::memset(padded + n, 0, size_t(CHUNK - n) * 4);
    x = padded;
  }
  i8 most[4] = {};  // sizes as whole numbers: their order is that of the values, and NaN is above all
  for (int i = 0; i < CHUNK; i += 32)
UNROLL(4)
    for (int k = 0; k < 4; k++) {
      const i8 size = bits(load(x + i + 8 * k)) & 0x7fffffff;
      most[k] = size > most[k] ? size : most[k];
    }
  for (int k = 1; k < 4; k++) most[0] = most[k] > most[0] ? most[k] : most[0];
  int32_t top_bits = 0;
  for (int k = 0; k < 8; k++) top_bits = most[0][k] > top_bits ? most[0][k] : top_bits;
  float top;
  std::memcpy(&top, &top_bits, 4);
  const bool bad = top_bits >= 0x7f800000, tiny = !(top > 1e-30f);
  *scale = bad ? __builtin_nanf("") : tiny ? 0.0f : top * (1.0f / 32767.0f);
  if (bad || tiny) {
    std::memset(q, 0, CHUNK * 2), std::memset(sums, 0, N_SUM * 4);
    return;
  }
  round_chunk(x, 32767.0f / top, q, sums);
}

}  // namespace pyspec
