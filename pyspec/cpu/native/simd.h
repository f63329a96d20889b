// Eight lanes of f32 or int32, by the compiler's own vectors: one order of sums on every CPU that runs the same build.
#pragma once
#include <cstdint>
#include <cstring>
#include <initializer_list>
#if defined(__AVX2__)
#include <immintrin.h>
#endif
#if defined(__aarch64__)
#include <arm_neon.h>
#endif
#if defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
#define PYSPEC_NEON 1  // products of bytes, four to a lane
#else
#define PYSPEC_NEON 0
#endif

namespace pyspec {

typedef float f8 __attribute__((vector_size(32)));
typedef int32_t i8 __attribute__((vector_size(32)));
typedef float f8u __attribute__((vector_size(32), aligned(4)));
typedef int32_t i8u __attribute__((vector_size(32), aligned(4)));

inline f8 load(const float *p) { return *reinterpret_cast<const f8u *>(p); }
inline void store(float *p, f8 x) { *reinterpret_cast<f8u *>(p) = x; }
inline f8 all(float x) { return f8{x, x, x, x, x, x, x, x}; }
inline f8 to_float(i8 x) { return __builtin_convertvector(x, f8); }
inline i8 to_int(f8 x) { return __builtin_convertvector(x, i8); }  // towards zero
inline i8 bits(f8 x) { i8 y; std::memcpy(&y, &x, 32); return y; }
inline f8 as_float(i8 x) { f8 y; std::memcpy(&y, &x, 32); return y; }
#if defined(__aarch64__)
inline float32x4_t low(const f8 &x) { return vld1q_f32(reinterpret_cast<const float *>(&x)); }
inline float32x4_t high(const f8 &x) { return vld1q_f32(reinterpret_cast<const float *>(&x) + 4); }
#endif
inline f8 fma(f8 a, f8 b, f8 c) {
#if defined(__FMA__)
  return f8(_mm256_fmadd_ps(__m256(a), __m256(b), __m256(c)));
#elif defined(__aarch64__)
  f8 y;
  vst1q_f32(reinterpret_cast<float *>(&y), vfmaq_f32(low(c), low(a), low(b)));
  vst1q_f32(reinterpret_cast<float *>(&y) + 4, vfmaq_f32(high(c), high(a), high(b)));
  return y;
#else
  return a * b + c;
#endif
}
inline f8 max(f8 a, f8 b) { return a > b ? a : b; }
inline f8 min(f8 a, f8 b) { return a < b ? a : b; }
inline float sum(f8 x) { return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7])); }
inline float largest(f8 x) {
  float m = x[0];
  for (int i = 1; i < 8; i++) m = x[i] > m ? x[i] : m;
  return m;
}

// e^x to about 2 units of the last place; 0 below -87.3, no overflow above 88.7; NaN stays NaN.
inline f8 exp(f8 x) {
  const f8 low = all(-87.33654f), high = all(88.72283f);
  const i8 gone = x < low;
  x = min(high, max(low, x));  // the second operand of two is taken where one is NaN
  const f8 scaled = fma(x, all(1.44269504f), all(0.5f));
  i8 n = to_int(scaled);
  n -= (to_float(n) > scaled) & 1;  // floor
  const f8 k = to_float(n);
  x = fma(k, all(-0.693359375f), x);
  x = fma(k, all(2.12194440e-4f), x);
  f8 y = all(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) y = fma(y, x, all(c));
  y = fma(y, x * x, x + all(1.0f));
  const i8 half = n >> 1;  // in two steps, because 2^128 is beyond f32
  y = y * as_float((half + 127) << 23) * as_float((n - half + 127) << 23);
  return as_float(bits(y) & ~gone);
}
inline f8 sigmoid(f8 x) { return all(1.0f) / (all(1.0f) + exp(-x)); }
inline f8 silu(f8 x) { return x * sigmoid(x); }
// cap * tanh(x / cap): near 0 a quotient of polynomials, because 1 - 2 / (1 + e^2x) loses digits there.
inline f8 capped(f8 x, float cap) {
  const f8 y = x * all(1.0f / cap), z = y * y;
  const f8 near = y * fma(z, z + all(105.0f), all(945.0f)) / fma(z, fma(z, all(15.0f), all(420.0f)), all(945.0f));
  const f8 far = all(1.0f) - all(2.0f) / (all(1.0f) + exp(y + y));
  return all(cap) * (z < all(1.0f) ? near : far);
}

// log(1 + e^x) to about 2e-7 of itself: with e = e^-|x|, log(1 + e) is 2 atanh(e / (2 + e)), whose series converges fast up to a third.
inline f8 softplus(f8 x) {
  const f8 e = exp(min(x, -x)), s = e / (e + all(2.0f)), t = s * s;
  f8 y = all(1.0f / 15);
  for (float c : {1.0f / 13, 1.0f / 11, 1.0f / 9, 1.0f / 7, 1.0f / 5, 1.0f / 3, 1.0f}) y = fma(y, t, all(c));
  return fma(all(2.0f) * s, y, max(x, all(0.0f)));
}

// A row's tail of fewer than eight values, with zeros behind them.
inline f8 load_tail(const float *p, int64_t n) {
  float x[8] = {0};
  std::memcpy(x, p, size_t(n) * 4);
  return load(x);
}
inline void store_tail(float *p, f8 x, int64_t n) {
  float y[8];
  store(y, x);
  std::memcpy(p, y, size_t(n) * 4);
}

inline float half_to_float(uint16_t h) {
#if defined(__F16C__)
  return _cvtsh_ss(h);
#elif defined(__aarch64__)
  __fp16 x;
  std::memcpy(&x, &h, 2);
  return float(x);
#else
  const uint32_t sign = uint32_t(h & 0x8000) << 16, rest = h & 0x7fff;
  uint32_t bits_;
  if (rest >= 0x7c00) bits_ = 0x7f800000u | (rest & 0x3ff) << 13;
  else if (rest >= 0x400) bits_ = (rest << 13) + 0x38000000u;
  else {
    const float small = float(rest) * 5.9604644775390625e-8f;  // 2^-24
    std::memcpy(&bits_, &small, 4);
  }
  bits_ |= sign;
  float x;
  std::memcpy(&x, &bits_, 4);
  return x;
#endif
}
inline f8 halves(const uint16_t *p) {
#if defined(__F16C__)
  return f8(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))));
#elif defined(__aarch64__)
  f8 x;
  const float16x8_t h = vreinterpretq_f16_u16(vld1q_u16(p));
  vst1q_f32(reinterpret_cast<float *>(&x), vcvt_f32_f16(vget_low_f16(h)));
  vst1q_f32(reinterpret_cast<float *>(&x) + 4, vcvt_high_f32_f16(h));
  return x;
#else
  f8 x;
  for (int i = 0; i < 8; i++) x[i] = half_to_float(p[i]);
  return x;
#endif
}
inline f8 bf16s(const uint16_t *p) {
#if defined(__AVX2__)
  return f8(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))), 16));
#else
  typedef uint16_t h8 __attribute__((vector_size(16)));
  h8 x;
  std::memcpy(&x, p, 16);
  return as_float(__builtin_convertvector(x, i8) << 16);
#endif
}

}  // namespace pyspec
