// Products of few rows with 16 rows of a matrix, unpacked in registers (AVX-512 with VNNI): the sums of product.h in their order. Nibbles
// meet the numbers of a row where they lie in their word, high ones as 16 times their value; a scale of 1/16 makes that good, exactly.
#pragma once
#include "product.h"

#if defined(__AVX512VNNI__)
namespace pyspec {

// Two panels that need not be neighbours
struct Sixteen {
  Eight a, b;

  // Bytes from to from + 15 of each row: four to a vector
  ALWAYS void sixteen(int64_t from, __m512i *out) const {
    __m512i x[4];
UNROLL(4)
    for (int l = 0; l < 4; l++) {
      const auto of = [&](const Eight &e, int row) ALWAYS_LAMBDA { return _mm_loadu_si128(reinterpret_cast<const __m128i *>(e.row(row, from))); };
      const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(of(a, l)), of(a, l + 4), 1);
      x[l] = _mm512_inserti32x4(_mm512_inserti32x4(_mm512_castsi256_si512(low), of(b, l), 2), of(b, l + 4), 3);
    }
    fours(x, out);
  }
  // Bytes from to from + 31: those of the first sixteen, then the others. Half the reads of `sixteen` twice.
  ALWAYS void thirty_two(int64_t from, __m512i *out) const {
    __m512i of[2][4];
UNROLL(2)
    for (int side = 0; side < 2; side++) {
      const Eight &e = side ? b : a;
      const auto read = [&](int row) ALWAYS_LAMBDA { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(e.row(row, from))); };
      __m512i x[4];
UNROLL(4)
      for (int l = 0; l < 4; l++) x[l] = _mm512_inserti64x4(_mm512_castsi256_si512(read(l)), read(l + 4), 1);
      fours(x, of[side]);
    }
UNROLL(4)
    for (int k = 0; k < 4; k++) {
      out[k] = _mm512_shuffle_i64x2(of[0][k], of[1][k], 0x88);
      out[4 + k] = _mm512_shuffle_i64x2(of[0][k], of[1][k], 0xdd);
    }
  }
  ALWAYS __m512 half(int64_t from) const { return both_of(a.half(from), b.half(from)); }

 private:
  // Word k of four vectors in each 128 bits
  static ALWAYS void fours(const __m512i *x, __m512i *out) {
    const __m512i p = _mm512_unpacklo_epi32(x[0], x[1]), q = _mm512_unpackhi_epi32(x[0], x[1]);
    const __m512i r = _mm512_unpacklo_epi32(x[2], x[3]), s = _mm512_unpackhi_epi32(x[2], x[3]);
    out[0] = _mm512_unpacklo_epi64(p, r), out[1] = _mm512_unpackhi_epi64(p, r);
    out[2] = _mm512_unpacklo_epi64(q, s), out[3] = _mm512_unpackhi_epi64(q, s);
  }
};

template <bool SIGNED>
ALWAYS __m512 byte_of(__m512i x, int k) {
  const __m512i top = k == 3 ? x : _mm512_slli_epi32(x, 24 - 8 * k);
  return _mm512_cvtepi32_ps(SIGNED ? _mm512_srai_epi32(top, 24) : _mm512_srli_epi32(top, 24));
}

// Scales and mins of Q4_K: six bits each
struct SixBits {
  __m512i scales[2], mins[2];

  explicit ALWAYS SixBits(const __m512i *head) {
    const auto masked = [](__m512i x, int by, int mask) ALWAYS_LAMBDA { return _mm512_and_si512(by ? _mm512_srli_epi32(x, by) : x, _mm512_set1_epi32(mask)); };
    scales[0] = masked(head[1], 0, 0x3f3f3f3f), scales[1] = _mm512_or_si512(masked(head[3], 0, 0x0f0f0f0f), masked(head[1], 2, 0x30303030));
    mins[0] = masked(head[2], 0, 0x3f3f3f3f), mins[1] = _mm512_or_si512(masked(head[3], 4, 0x0f0f0f0f), masked(head[2], 2, 0x30303030));
  }
};

// Weights of Q6_K, 0 to 63, of group g of a half: `low` has four of their bits, `high` two of them
ALWAYS __m512i six_bit_weights(__m512i low, __m512i high, int g, __m512i nibble, __m512i top) {
  high = g / 2 == 0 ? _mm512_slli_epi16(high, 4) : g / 2 == 1 ? _mm512_slli_epi16(high, 2) : g / 2 == 2 ? high : _mm512_srli_epi16(high, 2);
  return _mm512_ternarylogic_epi32(g < 4 ? low : _mm512_srli_epi16(low, 4), nibble, _mm512_and_si512(high, top), 0xea);
}

// Rows' numbers of a chunk, and where its products go
template <int R>
struct Meets {
  const int32_t *x[R];
  int64_t at[R];
  __m512 total[R];

  ALWAYS Meets(const Rows &rows, int64_t first, int64_t chunk) {
UNROLL(16)
    for (int r = 0; r < R; r++) {
      x[r] = rows.pairs(first + r, chunk), at[r] = rows.of(first + r) * rows.n_chunk + chunk;
      total[r] = _mm512_setzero_ps();
    }
  }
  // sum[r] += w . pair of each row; or the first of a sum
  ALWAYS void dot(__m512i *sum, __m512i w, int pair, bool is_first = false) const {
UNROLL(16)
    for (int r = 0; r < R; r++) {
      if (is_first) sum[r] = _mm512_setzero_si512();
      add_dot(sum[r], w, x[r][pair]);
    }
  }
  ALWAYS void add(const __m512i *sum, __m512 d) {
UNROLL(16)
    for (int r = 0; r < R; r++) total[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r]), d, total[r]);
  }
  ALWAYS void put(const Rows &rows, f8 (*acc)[2]) const {
UNROLL(16)
    for (int r = 0; r < R; r++) {
      float *to = reinterpret_cast<float *>(acc[r]);
      _mm512_storeu_ps(to, _mm512_fmadd_ps(total[r], _mm512_set1_ps(rows.scale[at[r]]), _mm512_loadu_ps(to)));
    }
  }
};

// acc[r] += 256 weights of the sixteen rows at `b` . row r, for at most MOST rows: more leave no registers for the weights
template <typename T>
struct Direct {
  static constexpr int MOST = 0;
  static constexpr bool WIDENS = false;
};

template <>
struct Direct<Q4_K> {
  static constexpr int MOST = 10;
  static constexpr bool WIDENS = true;

  // Scales and offsets of the eight groups
  struct Head {
    __m512 d, low;
    __m512i scales[2], mins[2];

    ALWAYS explicit Head(const Sixteen &b) {
      __m512i x[4];
      b.sixteen(0, x);
      d = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(x[0])), low = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(x[0], 16)));
      const SixBits of(x);
      for (int i = 0; i < 2; i++) scales[i] = of.scales[i], mins[i] = of.mins[i];
    }
    ALWAYS __m512 scale(int g) const { return _mm512_mul_ps(d, byte_of<false>(scales[g / 4], g % 4)); }
    ALWAYS __m512 offset(int g) const { return _mm512_mul_ps(-low, byte_of<false>(mins[g / 4], g % 4)); }
  };

  static NEVER void widen(Sixteen b, int, Wide &to) {
    const Head head(b);
    const __m512i nibble = _mm512_set1_epi16(15);
UNROLL(4)
    for (int i = 0; i < 4; i++) {
      __m512i x[8];
      b.thirty_two(16 + 32 * i, x);
UNROLL(8)
      for (int j = 0; j < 8; j++) {
        const int at = 2 * (16 * i + j);
        to.set(at, _mm512_and_si512(x[j], nibble)), to.set(at + 1, _mm512_and_si512(_mm512_srli_epi16(x[j], 8), nibble));
        to.set(at + 16, _mm512_and_si512(_mm512_srli_epi16(x[j], 4), nibble)), to.set(at + 17, _mm512_srli_epi16(x[j], 12));
      }
    }
UNROLL(8)
    for (int g = 0; g < 8; g++) _mm512_store_ps(to.d[g], head.scale(g)), _mm512_store_ps(to.m[g], head.offset(g));
  }

  template <int R>
  static NEVER void multiply(Sixteen b, const Rows &rows, int64_t first, int64_t chunk, f8 (*acc)[2]) {
    Meets<R> meets(rows, first, chunk);
    const Head head(b);
    const __m512i nibble = _mm512_set1_epi16(15), above = _mm512_set1_epi16(240);
UNROLL(4)
    for (int i = 0; i < 4; i++) {
      constexpr int CHAINS = R == 1 ? 4 : R == 2 ? 2 : 1;  // of a group: a product waits four cycles for the one before
      __m512i x[8], sum[CHAINS][2 * R];                     // of the low nibbles' group, then of the high ones'
      b.thirty_two(16 + 32 * i, x);
UNROLL(8)
      for (int j = 0; j < 8; j++) {
        const int at = 2 * (16 * i + j);
        __m512i *const even = sum[2 * j % CHAINS], *const odd = sum[(2 * j + 1) % CHAINS];
        const __m512i y = _mm512_srli_epi16(x[j], 8);
        meets.dot(even, _mm512_and_si512(x[j], nibble), at, 2 * j < CHAINS), meets.dot(even + R, _mm512_and_si512(x[j], above), at + 16, 2 * j < CHAINS);
        meets.dot(odd, _mm512_and_si512(y, nibble), at + 1, 2 * j + 1 < CHAINS), meets.dot(odd + R, _mm512_and_si512(y, above), at + 17, 2 * j + 1 < CHAINS);
      }
      for (int k = CHAINS / 2; k > 0; k /= 2)
        for (int c = 0; c < k; c++)
          for (int r = 0; r < 2 * R; r++) sum[c][r] = _mm512_add_epi32(sum[c][r], sum[c + k][r]);
      __m512i *const even = sum[0];
      meets.add(even, head.scale(2 * i));
      meets.add(even + R, _mm512_mul_ps(head.scale(2 * i + 1), _mm512_set1_ps(0.0625f)));
    }
UNROLL(8)
    for (int g = 0; g < 8; g++) {
      const __m512 m = head.offset(g);
UNROLL(16)
      for (int r = 0; r < R; r++) meets.total[r] = _mm512_fmadd_ps(m, _mm512_set1_ps(rows.sums[meets.at[r] * N_SUM + g]), meets.total[r]);
    }
    meets.put(rows, acc);
  }
};

template <>
struct Direct<Q8_0> {
  static constexpr int MOST = 0;  // few rows of large matrices wait for memory longer this way than panel by panel
  static constexpr bool WIDENS = true;

  // Pairs 0 2 and 1 3 of the word
  static ALWAYS __m512i even(__m512i x) { return _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8); }
  static ALWAYS __m512i odd(__m512i x) { return _mm512_srai_epi16(x, 8); }

  static NEVER void widen(Sixteen b, int n_group, Wide &to) {
    for (int g = 0; g < n_group; g++) {
      __m512i x[8];
      b.thirty_two(34 * g + 2, x);
UNROLL(8)
      for (int j = 0; j < 8; j++) to.set(2 * (8 * g + j), even(x[j])), to.set(2 * (8 * g + j) + 1, odd(x[j]));
      _mm512_store_ps(to.d[g], b.half(34 * g));
    }
  }
};

template <>
struct Direct<Q6_K> {
  static constexpr int MOST = 5;
  static constexpr bool WIDENS = true;

  // 128 weights as bytes from 0 to 63: four words of each of eight groups
  struct Half {
    __m512i x[16], h[8];

    ALWAYS Half(const Sixteen &b, int half) { b.thirty_two(64 * half, x), b.thirty_two(64 * half + 32, x + 8), b.thirty_two(128 + 32 * half, h); }
    ALWAYS __m512i bytes(int g, int j) const {
      return six_bit_weights(x[4 * (g % 4) + j], h[4 * (g % 2) + j], g, _mm512_set1_epi8(15), _mm512_set1_epi8(48));
    }
  };

  static NEVER void widen(Sixteen b, int, Wide &to) {
    const __m512 d = b.half(208);
    const __m512i byte = _mm512_set1_epi16(255), zero = _mm512_set1_epi16(32);
    __m512i s[4];
    b.sixteen(192, s);
UNROLL(2)
    for (int half = 0; half < 2; half++) {
      const Half of(b, half);
UNROLL(8)
      for (int g = 0; g < 8; g++) {
UNROLL(4)
        for (int j = 0; j < 4; j++) {
          const __m512i w = of.bytes(g, j);
          const int at = 2 * (32 * half + 4 * g + j);
          to.set(at, _mm512_sub_epi16(_mm512_and_si512(w, byte), zero)), to.set(at + 1, _mm512_sub_epi16(_mm512_srli_epi16(w, 8), zero));
        }
        _mm512_store_ps(to.d[8 * half + g], _mm512_mul_ps(d, byte_of<true>(s[2 * half + g / 4], g % 4)));
      }
    }
  }

  // Weights are bytes from 0 to 63 here, and each group's sum begins with -32 times the row's
  template <int R>
  static NEVER void multiply(Sixteen b, const Rows &rows, int64_t first, int64_t chunk, f8 (*acc)[2]) {
    Meets<R> meets(rows, first, chunk);
    alignas(64) int32_t begin[R][16];
UNROLL(16)
    for (int r = 0; r < R; r++) {
      const __m512i s = _mm512_cvtps_epi32(_mm512_loadu_ps(rows.sums + meets.at[r] * N_SUM + 8));
      _mm512_store_si512(begin[r], _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_slli_epi32(s, 5)));
    }
    const __m512 d = b.half(208);
    const __m512i byte = _mm512_set1_epi16(255);
    __m512i s[4];
    b.sixteen(192, s);
UNROLL(2)
    for (int half = 0; half < 2; half++) {
      const Half of(b, half);
UNROLL(8)
      for (int g = 0; g < 8; g++) {
        __m512i sum[R];
UNROLL(16)
        for (int r = 0; r < R; r++) sum[r] = _mm512_set1_epi32(begin[r][8 * half + g]);
UNROLL(4)
        for (int j = 0; j < 4; j++) {
          const __m512i w = of.bytes(g, j);
          const int at = 2 * (32 * half + 4 * g + j);
          meets.dot(sum, _mm512_and_si512(w, byte), at), meets.dot(sum, _mm512_srli_epi16(w, 8), at + 1);
        }
        meets.add(sum, _mm512_mul_ps(d, byte_of<true>(s[2 * half + g / 4], g % 4)));
      }
    }
    meets.put(rows, acc);
  }
};

}  // namespace pyspec
#endif
