// Packed weights as bytes with f32 scales: 256 weights of eight rows at a time.
//
// A type T has:
//   BLOCK   weights of one block of the file, BYTES its bytes
//   GROUP   weights that share an f32 scale: 16 or 32
//   MINS    offsets of 256 weights: 0, 8 (of 32 weights each) or 16
//   LEAST   the least of its bytes and MOST the largest: int8 if LEAST < 0, else uint8
//   fill(rows, n, table, panel)   n weights of each row, a multiple of BLOCK, n <= 256:
//           weight i of row l is byte i * d[i / GROUP][l] + m[i * MINS / 256][l]. What lies behind the n-th weight is not written.
#pragma once
#include "panel.h"

namespace pyspec {

alignas(16) inline constexpr int8_t IQ4_VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
alignas(16) inline constexpr int8_t E2M1_VALUES[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};  // doubled

struct Q8_0 {
  static constexpr int BLOCK = 32, BYTES = 34, GROUP = 32, MINS = 0;
  static constexpr int LEAST = -128, MOST = 127;
  static ALWAYS void fill(Eight b, int n, const void *, Panel &p) {
    for (int g = 0; g < n / 32; g++, b.at += BYTES) {
      p.d[g] = b.half(0);
      b.sixteen(2, p.w + 8 * g), b.sixteen(18, p.w + 8 * g + 4);
    }
  }
};

// 16 bytes of nibbles at `at`: the low ones to w[0..3], the high ones to w[4..7]
template <typename F>
ALWAYS void nibbles(Eight b, int64_t at, b32 *w, F &&value) {
  b32 x[4];
  b.sixteen(at, x);
UNROLL(4)
  for (int k = 0; k < 4; k++) w[k] = value(low_nibbles(x[k])), w[4 + k] = value(high_nibbles(x[k]));
}
ALWAYS b32 as_is(b32 x) { return x; }

struct Q4_0 {
  static constexpr int BLOCK = 32, BYTES = 18, GROUP = 32, MINS = 0;
  static constexpr int LEAST = -8, MOST = 7;
  static ALWAYS void fill(Eight b, int n, const void *, Panel &p) {
    for (int g = 0; g < n / 32; g++, b.at += BYTES) {
      p.d[g] = b.half(0);
      nibbles(b, 2, p.w + 8 * g, [](b32 x) ALWAYS_LAMBDA { return x - every(8); });
    }
  }
};

struct Q4_1 {
  static constexpr int BLOCK = 32, BYTES = 20, GROUP = 32, MINS = 8;
  static constexpr int LEAST = 0, MOST = 15;
  static ALWAYS void fill(Eight b, int n, const void *, Panel &p) {
    for (int g = 0; g < n / 32; g++, b.at += BYTES) {
      p.d[g] = b.half(0), p.m[g] = b.half(2);
      nibbles(b, 4, p.w + 8 * g, as_is);
    }
  }
};

// w[k] of nibbles: plus 16 where bit 4k + i of the word is set, or less 16 where it is not
template <bool LESS>
ALWAYS void fifth_bits(u8v word, b32 *w) {
UNROLL(8)
  for (int k = 0; k < 8; k++) {
#if defined(__AVX2__)
    const b32 from = b32(_mm256_set1_epi32((k / 2) * 0x01010101)) | b32(_mm256_set_epi64x(0x0c0c0c0c08080808, 0x0404040400000000, 0x0c0c0c0c08080808, 0x0404040400000000));
    const b32 bit = b32(_mm256_set1_epi32(int(k % 2 ? 0x80402010 : 0x08040201)));
    const b32 there = b32((b32(_mm256_shuffle_epi8(__m256i(word), __m256i(from))) & bit) == bit);
    w[k] |= LESS ? ~there & every(0xf0) : there & every(16);
#else
    const u8v spread = (word >> (4 * k) & 15u) * 0x00204081u & 0x01010101u;
    w[k] = (w[k] | b32(spread << 4)) - every(LESS ? 16 : 0);
#endif
  }
}

struct Q5_0 {
  static constexpr int BLOCK = 32, BYTES = 22, GROUP = 32, MINS = 0;
  static constexpr int LEAST = -16, MOST = 15;
  static ALWAYS void fill(Eight b, int n, const void *, Panel &p) {
    for (int g = 0; g < n / 32; g++, b.at += BYTES) {
      p.d[g] = b.half(0);
      nibbles(b, 6, p.w + 8 * g, as_is), fifth_bits<true>(b.word(2), p.w + 8 * g);
    }
  }
};

struct Q5_1 {
  static constexpr int BLOCK = 32, BYTES = 24, GROUP = 32, MINS = 8;
  static constexpr int LEAST = 0, MOST = 31;
  static ALWAYS void fill(Eight b, int n, const void *, Panel &p) {
    for (int g = 0; g < n / 32; g++, b.at += BYTES) {
      p.d[g] = b.half(0), p.m[g] = b.half(2);
      nibbles(b, 8, p.w + 8 * g, as_is), fifth_bits<false>(b.word(4), p.w + 8 * g);
    }
  }
};

// 32 bytes of two bits each: bits 2 * k of byte i belong to weight 32 k + i
template <typename F>
ALWAYS void two_bits(const b32 *x, b32 *w, F &&value) {
UNROLL(8)
  for (int j = 0; j < 8; j++) {
    w[j] = value(x[j] & every(3), j, 0), w[8 + j] = value(right<2>(x[j]) & every(3), j, 1);
    w[16 + j] = value(right<4>(x[j]) & every(3), j, 2), w[24 + j] = value(right<6>(x[j]), j, 3);
  }
}

struct Q2_K {
  static constexpr int BLOCK = 256, BYTES = 84, GROUP = 16, MINS = 16;
  static constexpr int LEAST = 0, MOST = 3;
  static ALWAYS void fill(Eight b, int, const void *, Panel &p) {
    const f8 d = b.half(80), low = -b.half(82);
    b32 s[4], x[8];
    b.sixteen(0, s);
    for (int i = 0; i < 16; i++) {
      p.d[i] = d * byte_of<false>(u8v(low_nibbles(s[i / 4])), i % 4);
      p.m[i] = low * byte_of<false>(u8v(high_nibbles(s[i / 4])), i % 4);
    }
    for (int half = 0; half < 2; half++) {
      b.sixteen(16 + 32 * half, x), b.sixteen(32 + 32 * half, x + 4);
      two_bits(x, p.w + 32 * half, [](b32 v, int, int) ALWAYS_LAMBDA { return v; });
    }
  }
};

struct Q3_K {
  static constexpr int BLOCK = 256, BYTES = 110, GROUP = 16, MINS = 0;
  static constexpr int LEAST = -4, MOST = 3;
  static ALWAYS void fill(Eight b, int, const void *, Panel &p) {
    const f8 d = b.half(108);
    const u8v low[2] = {b.word(96), b.word(100)}, high = b.word(104);
UNROLL(4)
    for (int i = 0; i < 4; i++) {
      const u8v four = low[i % 2] >> (4 * (i / 2)) & 0x0f0f0f0fu, two = high >> (2 * i) & 0x03030303u;
      const b32 scale = b32(four | two << 4) - every(32);
      for (int k = 0; k < 4; k++) p.d[4 * i + k] = d * byte_of<true>(u8v(scale), k);
    }
    b32 h[8], x[8];
    b.sixteen(0, h), b.sixteen(16, h + 4);
    for (int half = 0; half < 2; half++) {
      b.sixteen(32 + 32 * half, x), b.sixteen(48 + 32 * half, x + 4);
      two_bits(x, p.w + 32 * half, [&](b32 v, int j, int pair) ALWAYS_LAMBDA {
        const b32 bit = every(1 << (4 * half + pair));
        return v - (b32((h[j] & bit) == every(0)) & every(4));
      });
    }
  }
};

// Scales and mins of Q4_K and Q5_K: six bits each, in twelve bytes
ALWAYS void six_bits(const b32 *head, f8 d, f8 low, Panel &p) {
  const u8v a = u8v(head[1]), b = u8v(head[2]), c = u8v(head[3]);
  const u8v x[2] = {a & 0x3f3f3f3fu, (c & 0x0f0f0f0fu) | (a >> 2 & 0x30303030u)};
  const u8v y[2] = {b & 0x3f3f3f3fu, (c >> 4 & 0x0f0f0f0fu) | (b >> 2 & 0x30303030u)};
UNROLL(8)
  for (int i = 0; i < 8; i++) p.d[i] = d * byte_of<false>(x[i / 4], i % 4), p.m[i] = low * byte_of<false>(y[i / 4], i % 4);
}

struct Q4_K {
  static constexpr int BLOCK = 256, BYTES = 144, GROUP = 32, MINS = 8;
  static constexpr int LEAST = 0, MOST = 15;
  static ALWAYS void fill(Eight b, int, const void *, Panel &p) {
    b32 head[4];
    b.sixteen(0, head);
    six_bits(head, b.half(0), -b.half(2), p);
    for (int i = 0; i < 4; i++) {
      b32 x[8];
      b.sixteen(16 + 32 * i, x), b.sixteen(32 + 32 * i, x + 4);
UNROLL(8)
      for (int j = 0; j < 8; j++) p.w[16 * i + j] = low_nibbles(x[j]), p.w[16 * i + 8 + j] = high_nibbles(x[j]);
    }
  }
};

struct Q5_K {
  static constexpr int BLOCK = 256, BYTES = 176, GROUP = 32, MINS = 8;
  static constexpr int LEAST = 0, MOST = 31;
  static ALWAYS void fill(Eight b, int, const void *, Panel &p) {
    b32 head[4], h[8];
    b.sixteen(0, head);
    six_bits(head, b.half(0), -b.half(2), p);
    b.sixteen(16, h), b.sixteen(32, h + 4);
    for (int i = 0; i < 4; i++) {
      b32 x[8];
      b.sixteen(48 + 32 * i, x), b.sixteen(64 + 32 * i, x + 4);
UNROLL(8)
      for (int j = 0; j < 8; j++) {
        p.w[16 * i + j] = low_nibbles(x[j]) | left<4>(h[j] & every(1));
        p.w[16 * i + 8 + j] = high_nibbles(x[j]) | left<3>(h[j] & every(2));
        h[j] = right<2>(h[j]);
      }
    }
  }
};

struct Q6_K {
  static constexpr int BLOCK = 256, BYTES = 210, GROUP = 16, MINS = 0;
  static constexpr int LEAST = -32, MOST = 31;
  static ALWAYS void fill(Eight b, int, const void *, Panel &p) {
    const f8 d = b.half(208);
    const b32 top = every(48), o = every(32);
    b32 s[4];
    b.sixteen(192, s);
    UNROLL(16)
    for (int i = 0; i < 16; i++) p.d[i] = d * byte_of<true>(u8v(s[i / 4]), i % 4);
    for (int i = 0; i < 4; i++) {
      const int half = i / 2, k = i % 2;
      b32 *w = p.w + 32 * half + 4 * k, x[4], y[4], h[4];
      b.sixteen(64 * half + 16 * k, x), b.sixteen(64 * half + 32 + 16 * k, y), b.sixteen(128 + 32 * half + 16 * k, h);
      UNROLL(4)
      for (int j = 0; j < 4; j++) {
        // a shift of 16-bit words is enough: what crosses bytes is masked out
        w[j] = (low_nibbles(x[j]) | (b32(s16(h[j]) << 4) & top)) - o;
        w[8 + j] = (low_nibbles(y[j]) | (b32(s16(h[j]) << 2) & top)) - o;
        w[16 + j] = (high_nibbles(x[j]) | (h[j] & top)) - o;
        w[24 + j] = (high_nibbles(y[j]) | (b32(s16(h[j]) >> 2) & top)) - o;
      }
    }
  }
};

struct IQ4_NL {
  static constexpr int BLOCK = 32, BYTES = 18, GROUP = 32, MINS = 0;
  static constexpr int LEAST = -127, MOST = 113;
  static ALWAYS void fill(Eight b, int n, const void *, Panel &p) {
    for (int g = 0; g < n / 32; g++, b.at += BYTES) {
      p.d[g] = b.half(0);
      nibbles(b, 2, p.w + 8 * g, [](b32 x) ALWAYS_LAMBDA { return look_up(IQ4_VALUES, x); });
    }
  }
};

struct IQ4_XS {
  static constexpr int BLOCK = 256, BYTES = 136, GROUP = 32, MINS = 0;
  static constexpr int LEAST = -127, MOST = 113;
  static ALWAYS void fill(Eight b, int, const void *, Panel &p) {
    const f8 d = b.half(0);
    const u8v high = b.word(0) >> 16, low = b.word(4);
    for (int i = 0; i < 8; i++) {
      const u8v scale = (low >> (4 * i) & 15u) | (high >> (2 * i) & 3u) << 4;
      p.d[i] = d * to_float(i8(scale) - 32);
      nibbles(b, 8 + 16 * i, p.w + 8 * i, [](b32 x) ALWAYS_LAMBDA { return look_up(IQ4_VALUES, x); });
    }
  }
};

struct MXFP4 {
  static constexpr int BLOCK = 32, BYTES = 17, GROUP = 32, MINS = 0;
  static constexpr int LEAST = -12, MOST = 12;
  static ALWAYS void fill(Eight b, int n, const void *, Panel &p) {
    for (int g = 0; g < n / 32; g++, b.at += BYTES) {
      const i8 code = b.byte(0);
      const i8 least = (code == 1) ? i8{} + 0x00400000 : i8{} + 0x00200000;  // half of 2^(code - 127), below the normal numbers
      p.d[g] = as_float(code < 2 ? least : (code - 1) << 23);
      nibbles(b, 1, p.w + 8 * g, [](b32 x) ALWAYS_LAMBDA { return look_up(E2M1_VALUES, x); });
    }
  }
};

// Half of UE4M3 numbers, because values are doubled
ALWAYS f8 half_ue4m3(i8 code) {
  const i8 normal = ((code >> 3 & 15) + 119) << 23 | (code & 7) << 20;
  const f8 small = to_float(code & 7) * all(0.0009765625f);
  const f8 x = (code >> 3 & 15) == 0 ? small : as_float(normal);
  return code == 0x7f ? all(0.0f) : x;
}

struct NVFP4 {
  static constexpr int BLOCK = 64, BYTES = 36, GROUP = 16, MINS = 0;
  static constexpr int LEAST = -12, MOST = 12;
  static ALWAYS void fill(Eight b, int n, const void *, Panel &p) {
    for (int i = 0; i < n / 64; i++, b.at += BYTES)
      for (int k = 0; k < 4; k++) p.d[4 * i + k] = half_ue4m3(b.byte(k));
    b.at -= n / 64 * BYTES;
    for (int i = 0; i < n / 64; i++, b.at += BYTES)
      for (int k = 0; k < 2; k++) {
        b32 x[4];
        b.sixteen(4 + 16 * k, x);
        b32 *w = p.w + 16 * i + 8 * k;
        for (int j = 0; j < 2; j++) {
          w[j] = look_up(E2M1_VALUES, low_nibbles(x[j])), w[2 + j] = look_up(E2M1_VALUES, high_nibbles(x[j]));
          w[4 + j] = look_up(E2M1_VALUES, low_nibbles(x[2 + j])), w[6 + j] = look_up(E2M1_VALUES, high_nibbles(x[2 + j]));
        }
      }
  }
};

// Eight bytes, negated where a sign code has a bit: bits 0 to 6, and the eighth makes their number even.
ALWAYS uint64_t with_signs(uint64_t points, uint32_t code) {
  constexpr uint64_t BIT = 0x8040201008040201u, HIGH = 0x8080808080808080u, ONES = 0x0101010101010101u;
  code = (code & 127) | uint32_t(__builtin_popcount(code & 127) & 1) << 7;
  const uint64_t set = (((code * ONES & BIT) + ~HIGH) | (code * ONES & BIT)) & HIGH;  // the byte's bit 7, where its own bit is set
  const uint64_t mask = (set >> 7) * 255;
  return (points ^ mask) + (set >> 7);  // points are not zero, so nothing is carried between bytes
}

// A row's 256 bytes, written one row after another, to a panel
struct Transposed {
  alignas(32) uint64_t w[LANES][CHUNK / 8];
  void to(b32 *out) const {
    const Eight b{reinterpret_cast<const uint8_t *>(w), CHUNK};
    for (int i = 0; i < CHUNK / 16; i++) b.sixteen(16 * i, out + 4 * i);
  }
};

struct IQ2_XXS {  // table: [256][8] bytes
  static constexpr int BLOCK = 256, BYTES = 66, GROUP = 32, MINS = 0;
  static constexpr int LEAST = -43, MOST = 43;
  static void fill(Eight b, int, const void *table, Panel &p) {
    const f8 d = b.half(0) * all(0.125f);
    Transposed t;
    for (int i = 0; i < 8; i++) {
      const u8v word = b.word(6 + 8 * i);
      p.d[i] = d * to_float(i8(word >> 28) * 2 + 1);
      for (int l = 0; l < LANES; l++)
        for (int k = 0; k < 4; k++) {
          uint64_t points;
          std::memcpy(&points, static_cast<const uint8_t *>(table) + 8 * *b.row(l, 2 + 8 * i + k), 8);
          t.w[l][4 * i + k] = with_signs(points, word[l] >> 7 * k);
        }
    }
    t.to(p.w);
  }
};

struct IQ3_XXS {  // table: [256][4] bytes
  static constexpr int BLOCK = 256, BYTES = 98, GROUP = 32, MINS = 0;
  static constexpr int LEAST = -62, MOST = 62;
  static void fill(Eight b, int, const void *table, Panel &p) {
    const f8 d = b.half(0) * all(0.25f);
    Transposed t;
    for (int i = 0; i < 8; i++) {
      const u8v word = b.word(66 + 4 * i);
      p.d[i] = d * to_float(i8(word >> 28) * 2 + 1);
      for (int l = 0; l < LANES; l++)
        for (int k = 0; k < 4; k++) {
          const uint8_t *q = b.row(l, 2 + 8 * i + 2 * k);
          uint32_t two[2];
          std::memcpy(two, static_cast<const uint8_t *>(table) + 4 * q[0], 4);
          std::memcpy(two + 1, static_cast<const uint8_t *>(table) + 4 * q[1], 4);
          t.w[l][4 * i + k] = with_signs(two[0] | uint64_t(two[1]) << 32, word[l] >> 7 * k);
        }
    }
    t.to(p.w);
  }
};

}  // namespace pyspec
