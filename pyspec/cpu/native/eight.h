// Rows of f32 as 8-bit whole numbers, 32 values sharing an f32 scale, and their products with packed weights (`--cpu-activations q8`).
// A product's bits depend on its row and its weights alone. The sum of one product, over blocks of 32:
//   group = whole-number sum over 16 or 32 weights, exact
//   block = group * d, plus the group's sum of the row * m; the second group of 16 behind the first
//   total = fma(block, the row's scale, total)
#pragma once
#include <algorithm>

#include "rows.h"
#include "unpack.h"

namespace pyspec {

constexpr int EIGHTH = 32;  // values that share a scale

// 256 values of a row. A call's rows lie side by side chunk by chunk, [n_chunk, n_row], so that rows are constants apart.
struct Row8 {
  int8_t q[CHUNK];
  float scale[CHUNK / EIGHTH];
  float sums[N_SUM];  // of q: of 32 (8 of them), then of 16
};

// Where a value is not finite, every product of the row is NaN.
inline void quantise_eight(const float *x, int n, Row8 &to) {
  float padded[CHUNK];
  if (n < CHUNK) {
    std::memcpy(padded, x, size_t(n) * 4);
    std::memset(padded + n, 0, size_t(CHUNK - n) * 4);
    x = padded;
  }
  typedef int8_t c8 __attribute__((vector_size(8)));
  alignas(32) i8 of[CHUNK / 16];  // of 16 values: lane l has the sum of values l and l + 8
  for (int b = 0; b < CHUNK / EIGHTH; b++, x += EIGHTH) {
    i8 most = {};  // sizes as whole numbers: their order is that of the values, and NaN is above all
UNROLL(4)
    for (int k = 0; k < 4; k++) {
      const i8 size = bits(load(x + 8 * k)) & 0x7fffffff;
      most = size > most ? size : most;
    }
    int32_t top_bits = 0;
    for (int k = 0; k < 8; k++) top_bits = most[k] > top_bits ? most[k] : top_bits;
    float top;
    std::memcpy(&top, &top_bits, 4);
    const bool bad = top_bits >= 0x7f800000, tiny = !(top > 1e-30f);
    to.scale[b] = bad ? __builtin_nanf("") : tiny ? 0.0f : top * (1.0f / 127.0f);
    const f8 inverse = all(bad || tiny ? 0.0f : 127.0f / top);
    of[2 * b] = of[2 * b + 1] = i8{};
UNROLL(4)
    for (int k = 0; k < 4; k++) {
      const i8 r = bad ? i8{} : nearest(load(x + 8 * k) * inverse);
      const c8 narrow = __builtin_convertvector(r, c8);
      std::memcpy(to.q + b * EIGHTH + 8 * k, &narrow, 8);
      of[2 * b + k / 2] += r;
    }
  }
#if defined(__AVX2__)
  const __m256i *all_of = reinterpret_cast<const __m256i *>(of);
  const __m256i half[2] = {sums_of(all_of), sums_of(all_of + 8)};
  for (int k = 0; k < 2; k++) store(to.sums + 8 + 8 * k, to_float(i8(half[k])));
  store(to.sums, to_float(i8(_mm256_permute4x64_epi64(_mm256_hadd_epi32(half[0], half[1]), 0xd8))));
#else
  for (int k = 0; k < 16; k++) {
    int32_t s = 0;
    for (int l = 0; l < 8; l++) s += of[k][l];
    to.sums[8 + k] = float(s);
  }
  for (int k = 0; k < 8; k++) to.sums[k] = to.sums[8 + 2 * k] + to.sums[9 + 2 * k];
#endif
}

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
#define PYSPEC_DPBUSD 1
ALWAYS __m256i dot_bytes(__m256i sum, __m256i w, __m256i x) { return _mm256_dpbusd_epi32(sum, w, x); }
#elif defined(__AVXVNNI__)
#define PYSPEC_DPBUSD 1
ALWAYS __m256i dot_bytes(__m256i sum, __m256i w, __m256i x) { return _mm256_dpbusd_avx_epi32(sum, w, x); }
#else
#define PYSPEC_DPBUSD 0
#endif

// What products depend on of a type whose bytes are LEAST to MOST. Signed ones become unsigned by an offset, which the row's sums take off.
template <int GROUP_, int MINS_, int LEAST, int MOST>
struct Shape8 {
#if defined(__AVX2__)
  static constexpr int OFFSET = LEAST < 0 ? -LEAST : 0;
#else
  static constexpr int OFFSET = 0;
#endif
  static constexpr int GROUP = GROUP_, WORDS = GROUP / 4;
  static constexpr bool MINS = MINS_ > 0, SIGNED = LEAST < 0;
  static_assert(MINS_ == 0 || MINS_ * GROUP == CHUNK);
  static constexpr int FIT = 32767 / (2 * 127 * (MOST + OFFSET));  // pairs of products whose sum is below 2^15
#if defined(__AVX2__) && !PYSPEC_DPBUSD
  static constexpr bool FITS = FIT >= 2;
#else
  static constexpr bool FITS = true;
#endif
  static constexpr int DEPTH = FIT >= 8 ? 8 : FIT >= 4 ? 4 : FIT >= 2 ? 2 : 1;
};
template <typename T>
using Shape8Of = Shape8<T::GROUP, T::MINS, T::LEAST, T::MOST>;

// sum[r] = whole-number sums of a group: weights w, rows' numbers from byte `at`
template <typename S, int R>
ALWAYS void group_sums(const b32 *w, const Row8 *x, int at, i8 *sum) {
#if PYSPEC_DPBUSD
UNROLL(8)
  for (int r = 0; r < R; r++) sum[r] = i8{0};
UNROLL(8)
  for (int k = 0; k < S::WORDS; k++) {
    const __m256i bytes = __m256i(w[k] + every(S::OFFSET));
UNROLL(8)
    for (int r = 0; r < R; r++) {
      int32_t four;
      std::memcpy(&four, x[r].q + at + 4 * k, 4);
      sum[r] = i8(dot_bytes(__m256i(sum[r]), bytes, _mm256_set1_epi32(four)));
    }
  }
#elif defined(__AVX2__)
  constexpr int DEPTH = std::min(S::DEPTH, S::WORDS);
UNROLL(8)
  for (int first = 0; first < S::WORDS; first += DEPTH) {
    __m256i part[R];
UNROLL(8)
    for (int k = first; k < first + DEPTH; k++) {
      const __m256i bytes = __m256i(w[k] + every(S::OFFSET));
UNROLL(8)
      for (int r = 0; r < R; r++) {
        int32_t four;
        std::memcpy(&four, x[r].q + at + 4 * k, 4);
        const __m256i two = _mm256_maddubs_epi16(bytes, _mm256_set1_epi32(four));
        part[r] = k == first ? two : _mm256_add_epi16(part[r], two);
        asm("" : "+x"(part[r]));
      }
    }
UNROLL(8)
    for (int r = 0; r < R; r++) {
      const i8 wide = i8(_mm256_madd_epi16(part[r], _mm256_set1_epi16(1)));
      sum[r] = first == 0 ? wide : sum[r] + wide;
    }
  }
#elif PYSPEC_NEON
  for (int h = 0; h < 2; h++) {  // four outputs
    int32x4_t of[R];
UNROLL(8)
    for (int r = 0; r < R; r++) of[r] = vdupq_n_s32(0);
UNROLL(8)
    for (int k = 0; k < S::WORDS; k++) {
      const int8x16_t bytes = vld1q_s8(reinterpret_cast<const int8_t *>(w + k) + 16 * h);
UNROLL(8)
      for (int r = 0; r < R; r++) {
        int32_t four;
        std::memcpy(&four, x[r].q + at + 4 * k, 4);
        of[r] = vdotq_s32(of[r], bytes, vreinterpretq_s8_s32(vdupq_n_s32(four)));
      }
    }
UNROLL(8)
    for (int r = 0; r < R; r++) vst1q_s32(reinterpret_cast<int32_t *>(sum + r) + 4 * h, of[r]);
  }
#else
  for (int r = 0; r < R; r++) {
    sum[r] = i8{0};
    for (int k = 0; k < S::WORDS; k++)
      for (int j = 0; j < 4; j++) {
        const u8v byte = u8v(w[k]) << (24 - 8 * j);
        sum[r] += (S::SIGNED ? i8(byte) >> 24 : i8(byte >> 24)) * int32_t(x[r].q[at + 4 * k + j]);
      }
  }
#endif
}

// acc[r] += panel . row r; x: the panel's chunk of the first row
template <typename S, int R>
NEVER void multiply_eight(const Panel &p, const Row8 *x, f8 *acc) {
  constexpr int GROUPS = EIGHTH / S::GROUP, FIRST_SUM = GROUPS == 1 ? 0 : 8;
  f8 total[R];
  for (int r = 0; r < R; r++) total[r] = acc[r];
  for (int b = 0; b < CHUNK / EIGHTH; b++) {
    f8 block[R];
UNROLL(2)
    for (int k = 0; k < GROUPS; k++) {
      const int g = b * GROUPS + k;
      i8 sum[R];
      group_sums<S, R>(p.w + g * S::WORDS, x, g * S::GROUP, sum);
UNROLL(8)
      for (int r = 0; r < R; r++) {
        f8 y = to_float(sum[r]);
        const f8 of_row = all(x[r].sums[FIRST_SUM + g]);
        if (S::OFFSET) y = fma(of_row, all(float(-S::OFFSET)), y);  // exact: whole numbers below 2^24
        block[r] = k == 0 ? y * p.d[g] : fma(y, p.d[g], block[r]);
        if (S::MINS) block[r] = fma(of_row, p.m[g], block[r]);
      }
    }
UNROLL(8)
    for (int r = 0; r < R; r++) total[r] = fma(block[r], all(x[r].scale[b]), total[r]);
  }
  for (int r = 0; r < R; r++) acc[r] = total[r];
}

}  // namespace pyspec
