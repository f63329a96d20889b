// product.h by products of bytes (arm64). A row's number is 256 high + low + 128 (put_four of rows.h), all three bytes with a sign, so
//   group = 256 sum(w high) + sum(w low) + 128 sum(w)
// which is exact, and the bits are those of the other forms.
#pragma once
#include "rows.h"

namespace pyspec {

struct Lanes {
  int32x4_t a, b;  // outputs 0 to 3, 4 to 7
};

ALWAYS Lanes bytes_dot(Lanes sum, const b32 &w, int32_t four) {
  const int8_t *at = reinterpret_cast<const int8_t *>(&w);
  const int8x16_t x = vreinterpretq_s8_s32(vdupq_n_s32(four));
  return {vdotq_s32(sum.a, vld1q_s8(at), x), vdotq_s32(sum.b, vld1q_s8(at + 16), x)};
}
template <int N>
ALWAYS Lanes times_two_to(Lanes x) { return {vshlq_n_s32(x.a, N), vshlq_n_s32(x.b, N)}; }

// 128 times the sum of a group's weights: what low bytes lack
template <int WORDS>
ALWAYS Lanes offsets(const b32 *w) {
  Lanes sum = {vdupq_n_s32(0), vdupq_n_s32(0)};
UNROLL(8)
  for (int k = 0; k < WORDS; k++) sum = bytes_dot(sum, w[k], 0x01010101);
  return times_two_to<7>(sum);
}

struct Floats {
  float32x4_t a, b;
};
ALWAYS Floats floats(const f8 &x) { return {low(x), high(x)}; }
ALWAYS Floats fma(Floats x, Floats y, Floats to) { return {vfmaq_f32(to.a, x.a, y.a), vfmaq_f32(to.b, x.b, y.b)}; }
ALWAYS Floats floats(Lanes x) { return {vcvtq_f32_s32(x.a), vcvtq_f32_s32(x.b)}; }
ALWAYS Floats floats(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
ALWAYS void keep(f8 &to, Floats x) {
  vst1q_f32(reinterpret_cast<float *>(&to), x.a);
  vst1q_f32(reinterpret_cast<float *>(&to) + 4, x.b);
}

// total[r] += a group's sums * d. x[r]: the row's chunk, whose words of this group begin at `at`
template <int WORDS, int R>
ALWAYS void add_group(const b32 *w, Lanes offset, const f8 &d, const int32_t *const *x, int at, Floats *total) {
  Lanes sum[R];
UNROLL(8)
  for (int r = 0; r < R; r++) sum[r] = {vdupq_n_s32(0), vdupq_n_s32(0)};
UNROLL(8)
  for (int k = 0; k < WORDS; k++)
UNROLL(8)
    for (int r = 0; r < R; r++) sum[r] = bytes_dot(sum[r], w[k], x[r][at + 2 * k]);
UNROLL(8)
  for (int r = 0; r < R; r++) sum[r] = times_two_to<8>(sum[r]);
UNROLL(8)
  for (int k = 0; k < WORDS; k++)
UNROLL(8)
    for (int r = 0; r < R; r++) sum[r] = bytes_dot(sum[r], w[k], x[r][at + 2 * k + 1]);
  const Floats scale = floats(d);
UNROLL(8)
  for (int r = 0; r < R; r++)
    total[r] = fma(floats(Lanes{vaddq_s32(sum[r].a, offset.a), vaddq_s32(sum[r].b, offset.b)}), scale, total[r]);
}

// What a row's chunk adds, at last
template <typename S>
ALWAYS void add_chunk(const Rows &rows, int64_t row, int64_t chunk, const f8 *m, Floats total, f8 &acc) {
  const int64_t at = rows.of(row) * rows.n_chunk + chunk;
  const float *sums = rows.sums + at * N_SUM + (S::MINS == 16 ? 8 : 0);
UNROLL(16)
  for (int g = 0; g < S::MINS; g++) total = fma(floats(m[g]), floats(sums[g]), total);
  keep(acc, fma(total, floats(rows.scale[at]), floats(acc)));
}

// acc[r] += panel . row r
template <typename S, int R>
NEVER void multiply(const Panel &p, const Rows &rows, int64_t first, int64_t chunk, f8 *acc) {
  constexpr int WORDS = S::GROUP / 4;
  const int32_t *x[R];
  Floats total[R];
  for (int r = 0; r < R; r++) x[r] = rows.pairs(first + r, chunk), total[r] = floats(0.0f);
  for (int g = 0; g < CHUNK / S::GROUP; g++)
    add_group<WORDS, R>(p.w + g * WORDS, offsets<WORDS>(p.w + g * WORDS), p.d[g], x, 2 * g * WORDS, total);
  for (int r = 0; r < R; r++) add_chunk<S>(rows, first + r, chunk, p.m, total[r], acc[r]);
}

// Two panels with their groups' offsets, for many rows
struct Wide {
  Panel of[2];
  Lanes offset[2][16];
};

template <typename S>
NEVER void widen_panel(const Panel &p, int side, int, Wide &wide) {
  constexpr int WORDS = S::GROUP / 4;
  wide.of[side] = p;
  for (int g = 0; g < CHUNK / S::GROUP; g++) wide.offset[side][g] = offsets<WORDS>(p.w + g * WORDS);
}

// acc[r] += both panels . row r
template <typename S, int R>
NEVER void multiply_wide(const Wide &p, const Rows &rows, int64_t first, int64_t chunk, f8 (*acc)[2]) {
  constexpr int WORDS = S::GROUP / 4;
  const int32_t *x[R];
  for (int r = 0; r < R; r++) x[r] = rows.pairs(first + r, chunk);
  for (int side = 0; side < 2; side++) {
    Floats total[R];
    for (int r = 0; r < R; r++) total[r] = floats(0.0f);
    for (int g = 0; g < CHUNK / S::GROUP; g++)
      add_group<WORDS, R>(p.of[side].w + g * WORDS, p.offset[side][g], p.of[side].d[g], x, 2 * g * WORDS, total);
    for (int r = 0; r < R; r++) add_chunk<S>(rows, first + r, chunk, p.of[side].m, total[r], acc[r][side]);
  }
}

}  // namespace pyspec
