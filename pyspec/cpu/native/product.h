// Products of rows with packed weights. A product's bits depend on its row and its weights alone: how many rows run together, and
// on how many threads, changes the order of loops and never the order of a sum. The sum of one product, over chunks of 256:
//   group = whole-number sum over 16 or 32 weights, exact
//   chunk = group[0] * d[0], then fma of group[g] * d[g] in order, then of the row's sums[k] * m[k]
//   total = fma(chunk, the row's scale, total)
#pragma once
#include <type_traits>

#include "rows.h"
#include "unpack.h"

namespace pyspec {

// f of n as a constant, 1 to MOST
template <int MOST, typename F>
ALWAYS void with_constant(int64_t n, F &&f) {
  if constexpr (MOST > 1) {
    if (n < MOST) return with_constant<MOST - 1>(n, f);
  }
  f(std::integral_constant<int, MOST>{});
}

// Keeps a value in its register: left alone, the compiler puts off all sums of a loop and spills the products, and loads bytes twice.
template <typename V>
ALWAYS void hold(V &x) {
#if defined(__AVX2__)
  asm("" : "+x"(x));
#endif
}

// Bytes 0 and 2, 1 and 3 of each word as pairs of 16 bits
template <bool SIGNED>
ALWAYS void widen(b32 x, i8 &even, i8 &odd) {
#if defined(__AVX2__)
  const __m256i y = __m256i(x);
  if (SIGNED) even = i8(_mm256_srai_epi16(_mm256_slli_epi16(y, 8), 8)), odd = i8(_mm256_srai_epi16(y, 8));
  else even = i8(_mm256_and_si256(y, _mm256_set1_epi16(255))), odd = i8(_mm256_srli_epi16(y, 8));
#else
  const s16 y = s16(x);
  if (SIGNED) even = i8((y << 8) >> 8), odd = i8(y >> 8);
  else even = i8(y & 255), odd = i8(y >> 8 & 255);
#endif
}

// Rows whose products hide each other's latency: fewer have two chains each
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
constexpr int IN_FLIGHT = 5;
#else
constexpr int IN_FLIGHT = 1;  // additions take one cycle
#endif

// sum + w . pair, in each lane
ALWAYS i8 dot(i8 sum, i8 w, int32_t pair) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  return i8(_mm256_dpwssd_epi32(__m256i(sum), __m256i(w), _mm256_set1_epi32(pair)));
#elif defined(__AVXVNNI__)
  return i8(_mm256_dpwssd_avx_epi32(__m256i(sum), __m256i(w), _mm256_set1_epi32(pair)));
#elif defined(__AVX2__)
  return i8(_mm256_add_epi32(__m256i(sum), _mm256_madd_epi16(__m256i(w), _mm256_set1_epi32(pair))));
#else
  return sum + ((w << 16) >> 16) * int32_t(int16_t(pair)) + (w >> 16) * (pair >> 16);
#endif
}

// What of a type a product depends on, once its weights are unpacked
template <int GROUP_, int MINS_, bool SIGNED_>
struct Shape {
  static constexpr int GROUP = GROUP_, MINS = MINS_;
  static constexpr bool SIGNED = SIGNED_;
};
template <typename T>
using ShapeOf = Shape<T::GROUP, T::MINS, (T::LEAST < 0)>;

// Offsets of so many groups
template <typename S>
ALWAYS int mins_of(int n_group) { return S::MINS * S::GROUP * n_group / CHUNK; }

#if PYSPEC_NEON
}  // namespace pyspec
#include "product_neon.h"
#else
// acc[r] += panel . row r
template <typename S, int R>
NEVER void multiply(const Panel &p, const Rows &rows, int64_t first, int64_t chunk, f8 *acc) {
  constexpr int WORDS = S::GROUP / 4;
  const int n_group = rows.template groups<S::GROUP>(chunk), n_min = mins_of<S>(n_group);
  const int32_t *x[R];
  f8 total[R];
  for (int r = 0; r < R; r++) x[r] = rows.pairs(first + r, chunk), total[r] = all(0.0f);
  for (int g = 0; g < n_group; g++) {
    i8 sum[R], of_odd[R];
UNROLL(8)
    for (int r = 0; r < R; r++) sum[r] = of_odd[r] = i8{0};
UNROLL(8)
    for (int k = 0; k < WORDS; k++) {
      i8 even, odd;
      b32 bytes = p.w[g * WORDS + k];
      hold(bytes), widen<S::SIGNED>(bytes, even, odd);
UNROLL(8)
      for (int r = 0; r < R; r++) sum[r] = dot(sum[r], even, x[r][2 * (g * WORDS + k)]), hold(sum[r]);
UNROLL(8)
      for (int r = 0; r < R; r++) {
        i8 &to = R < IN_FLIGHT ? of_odd[r] : sum[r];
        to = dot(to, odd, x[r][2 * (g * WORDS + k) + 1]), hold(to);
      }
    }
    if (R < IN_FLIGHT)
      for (int r = 0; r < R; r++) sum[r] += of_odd[r];
UNROLL(8)
    for (int r = 0; r < R; r++) total[r] = fma(to_float(sum[r]), p.d[g], total[r]);
  }
  for (int r = 0; r < R; r++) {
    const int64_t at = rows.of(first + r) * rows.n_chunk + chunk;
    const float *sums = rows.sums + at * N_SUM + (S::MINS == 16 ? 8 : 0);
    for (int g = 0; g < n_min; g++) total[r] = fma(p.m[g], all(sums[g]), total[r]);
    acc[r] = fma(total[r], all(rows.scale[at]), acc[r]);
  }
}

// Two panels with their bytes widened, for many rows. Aligned: a vector across two lines of the cache takes two reads.
struct alignas(64) Wide {
  i8 w[CHUNK / 2][2];
  f8 d[16][2], m[16][2];

#if defined(__AVX512VNNI__)
  ALWAYS void set(int pair, __m512i x) { _mm512_store_si512(w[pair], x); }
#endif
};

template <typename S>
NEVER void widen_panel(const Panel &p, int side, int n_group, Wide &wide) {
  for (int k = 0; k < n_group * S::GROUP / 4; k++) widen<S::SIGNED>(p.w[k], wide.w[2 * k][side], wide.w[2 * k + 1][side]);
  for (int g = 0; g < n_group; g++) wide.d[g][side] = p.d[g];
  for (int g = 0; g < mins_of<S>(n_group); g++) wide.m[g][side] = p.m[g];
}

// acc[r] += both panels . row r
#if defined(__AVX512VNNI__)
ALWAYS __m512i both_of(b32 a, b32 b) { return _mm512_inserti64x4(_mm512_castsi256_si512(__m256i(a)), __m256i(b), 1); }
ALWAYS __m512 both_of(f8 a, f8 b) { return __m512(both_of(b32(bits(a)), b32(bits(b)))); }

// sum + w . pair, in each lane. Left alone, the compiler takes a register and an instruction more for each pair, and spills sums.
ALWAYS void add_dot(__m512i &sum, __m512i w, const int32_t &pair) { asm("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(pair)); }
ALWAYS void add_dot(__m512i &sum, __m512i w, __m512i pair) { asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(pair)); }

// Both panels in one vector, widened on the way: the same sums in the same order
template <typename S, int R>
NEVER void multiply_pair(const Panel &p, const Panel &q, const Rows &rows, int64_t first, int64_t chunk, f8 (*acc)[2]) {
  constexpr int WORDS = S::GROUP / 4;
  const int n_group = rows.template groups<S::GROUP>(chunk), n_min = mins_of<S>(n_group);
  const int32_t *x[R];
  __m512 total[R];
UNROLL(16)
  for (int r = 0; r < R; r++) x[r] = rows.pairs(first + r, chunk), total[r] = _mm512_setzero_ps();
  for (int g = 0; g < n_group; g++) {
    __m512i sum[R], of_odd[R];  // two chains, where a product would wait for the one before
UNROLL(16)
    for (int r = 0; r < R; r++) sum[r] = of_odd[r] = _mm512_setzero_si512();
UNROLL(2)
    for (int k = g * WORDS; k < (g + 1) * WORDS; k++) {
      const __m512i y = both_of(p.w[k], q.w[k]);
      const __m512i even = S::SIGNED ? _mm512_srai_epi16(_mm512_slli_epi16(y, 8), 8) : _mm512_and_si512(y, _mm512_set1_epi16(255));
      const __m512i odd = S::SIGNED ? _mm512_srai_epi16(y, 8) : _mm512_srli_epi16(y, 8);
UNROLL(16)
      for (int r = 0; r < R; r++) add_dot(sum[r], even, x[r][2 * k]);
UNROLL(16)
      for (int r = 0; r < R; r++) add_dot(R < IN_FLIGHT ? of_odd[r] : sum[r], odd, x[r][2 * k + 1]);
    }
    if (R < IN_FLIGHT)
UNROLL(16)
      for (int r = 0; r < R; r++) sum[r] = _mm512_add_epi32(sum[r], of_odd[r]);
    const __m512 d = both_of(p.d[g], q.d[g]);
UNROLL(16)
    for (int r = 0; r < R; r++) total[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r]), d, total[r]);
  }
UNROLL(16)
  for (int r = 0; r < R; r++) {
    const int64_t at = rows.of(first + r) * rows.n_chunk + chunk;
    const float *sums = rows.sums + at * N_SUM + (S::MINS == 16 ? 8 : 0);
    for (int g = 0; g < n_min; g++) total[r] = _mm512_fmadd_ps(both_of(p.m[g], q.m[g]), _mm512_set1_ps(sums[g]), total[r]);
    float *to = reinterpret_cast<float *>(acc[r]);
    _mm512_storeu_ps(to, _mm512_fmadd_ps(total[r], _mm512_set1_ps(rows.scale[at]), _mm512_loadu_ps(to)));
  }
}

template <typename S, int R>
NEVER void multiply_wide(const Wide &p, const Rows &rows, int64_t first, int64_t chunk, f8 (*acc)[2]) {
  constexpr int PAIRS = S::GROUP / 2;
  const auto both = [](const f8 *of) ALWAYS_LAMBDA { return _mm512_loadu_ps(of); };
  const int n_group = rows.template groups<S::GROUP>(chunk), n_min = mins_of<S>(n_group);
  const int32_t *x[R];
  __m512 total[R];
UNROLL(16)
  for (int r = 0; r < R; r++) x[r] = rows.pairs(first + r, chunk), total[r] = _mm512_setzero_ps();
  for (int g = 0; g < n_group; g++) {
    __m512i sum[R];
UNROLL(16)
    for (int r = 0; r < R; r++) sum[r] = _mm512_setzero_si512();
UNROLL(2)
    for (int k = 0; k < PAIRS; k++) {
      const __m512i w = _mm512_loadu_si512(p.w[g * PAIRS + k]);
UNROLL(16)
      for (int r = 0; r < R; r++) add_dot(sum[r], w, x[r][g * PAIRS + k]);
    }
UNROLL(16)
    for (int r = 0; r < R; r++) total[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r]), both(p.d[g]), total[r]);
  }
UNROLL(16)
  for (int r = 0; r < R; r++) {
    const int64_t at = rows.of(first + r) * rows.n_chunk + chunk;
    const float *sums = rows.sums + at * N_SUM + (S::MINS == 16 ? 8 : 0);
    for (int g = 0; g < n_min; g++) total[r] = _mm512_fmadd_ps(both(p.m[g]), _mm512_set1_ps(sums[g]), total[r]);
    float *to = reinterpret_cast<float *>(acc[r]);
    _mm512_storeu_ps(to, _mm512_fmadd_ps(total[r], _mm512_set1_ps(rows.scale[at]), _mm512_loadu_ps(to)));
  }
}
// Rows of a tile of four panels: 2 R sums, as many totals, the weights of a pair and the row's fill the registers
constexpr int QUAD = 7;

// a[r] += the first two panels . row r, b[r] += the others. A row's pair is read once for both, which a multiply-add with its operand in memory
// reads twice: reads, and not multiply-adds, bounded the products of two panels.
template <typename S, int R>
NEVER void multiply_quad(const Wide *p, const Rows &rows, int64_t first, int64_t chunk, f8 (*a)[2], f8 (*b)[2]) {
  constexpr int PAIRS = S::GROUP / 2;
  const int n_group = rows.template groups<S::GROUP>(chunk), n_min = mins_of<S>(n_group);
  const auto each = [](const f8 *of) ALWAYS_LAMBDA { return _mm512_load_ps(of); };
  const int32_t *x[R];
  __m512 total[R][2];
UNROLL(16)
  for (int r = 0; r < R; r++) x[r] = rows.pairs(first + r, chunk), total[r][0] = total[r][1] = _mm512_setzero_ps();
  for (int g = 0; g < n_group; g++) {
    __m512i sum[R][2];
UNROLL(16)
    for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = _mm512_setzero_si512();
UNROLL(2)
    for (int k = g * PAIRS; k < (g + 1) * PAIRS; k++) {
      const __m512i v = _mm512_load_si512(p[0].w[k]), w = _mm512_load_si512(p[1].w[k]);
UNROLL(16)
      for (int r = 0; r < R; r++) {
        const __m512i pair = _mm512_set1_epi32(x[r][k]);
        add_dot(sum[r][0], v, pair), add_dot(sum[r][1], w, pair);
      }
    }
UNROLL(16)
    for (int r = 0; r < R; r++)
UNROLL(2)
      for (int k = 0; k < 2; k++) total[r][k] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r][k]), each(p[k].d[g]), total[r][k]);
  }
UNROLL(16)
  for (int r = 0; r < R; r++) {
    const int64_t at = rows.of(first + r) * rows.n_chunk + chunk;
    const float *sums = rows.sums + at * N_SUM + (S::MINS == 16 ? 8 : 0);
UNROLL(2)
    for (int k = 0; k < 2; k++) {
      for (int g = 0; g < n_min; g++) total[r][k] = _mm512_fmadd_ps(each(p[k].m[g]), _mm512_set1_ps(sums[g]), total[r][k]);
      float *to = reinterpret_cast<float *>(k ? b[r] : a[r]);
      _mm512_storeu_ps(to, _mm512_fmadd_ps(total[r][k], _mm512_set1_ps(rows.scale[at]), _mm512_loadu_ps(to)));
    }
  }
}
#else
template <typename S, int R>
NEVER void multiply_wide(const Wide &p, const Rows &rows, int64_t first, int64_t chunk, f8 (*acc)[2]) {
  constexpr int PAIRS = S::GROUP / 2;
  const int n_group = rows.template groups<S::GROUP>(chunk), n_min = mins_of<S>(n_group);
  const int32_t *x[R];
  f8 total[R][2];
  for (int r = 0; r < R; r++) x[r] = rows.pairs(first + r, chunk), total[r][0] = total[r][1] = all(0.0f);
  for (int g = 0; g < n_group; g++) {
    i8 sum[R][2];
UNROLL(8)
    for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = i8{0};
UNROLL(2)
    for (int k = 0; k < PAIRS; k++) {
      const i8 a = p.w[g * PAIRS + k][0], b = p.w[g * PAIRS + k][1];
UNROLL(8)
      for (int r = 0; r < R; r++) {
        const int32_t pair = x[r][g * PAIRS + k];
        sum[r][0] = dot(sum[r][0], a, pair), sum[r][1] = dot(sum[r][1], b, pair), hold(sum[r][0]), hold(sum[r][1]);
      }
    }
UNROLL(8)
    for (int r = 0; r < R; r++)
      for (int side = 0; side < 2; side++) total[r][side] = fma(to_float(sum[r][side]), p.d[g][side], total[r][side]);
  }
  for (int r = 0; r < R; r++) {
    const int64_t at = rows.of(first + r) * rows.n_chunk + chunk;
    const float *sums = rows.sums + at * N_SUM + (S::MINS == 16 ? 8 : 0);
    const f8 scale = all(rows.scale[at]);
    f8 a = total[r][0], b = total[r][1];
    for (int g = 0; g < n_min; g++) a = fma(p.m[g][0], all(sums[g]), a), b = fma(p.m[g][1], all(sums[g]), b);
    acc[r][0] = fma(a, scale, acc[r][0]), acc[r][1] = fma(b, scale, acc[r][1]);
  }
}
#endif

}  // namespace pyspec
#endif
