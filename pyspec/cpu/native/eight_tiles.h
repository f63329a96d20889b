// Products of 8-bit rows by AMX: the sums of eight.h in their order. Rows are tiles as they lie in memory.
#pragma once
#include "eight.h"
#include "product_tiles.h"

#if PYSPEC_TILES
namespace pyspec {

// acc[r] += weights . row r of M rows. While sums of 32 columns are on their way to memory, those of the 32 before are added up.
template <typename S, int M>
NEVER void multiply_tiles_eight(const TileWeights &w, const Row8 *rows, __m512 *acc) {
  constexpr int WORDS = S::GROUP / 4, GROUPS = EIGHTH / S::GROUP, FIRST_SUM = GROUPS == 1 ? 0 : 8;
  static_assert(S::MINS == 0 || S::MINS * S::GROUP == CHUNK);
  alignas(64) __m512i sums[2][GROUPS][M];  // of even and odd blocks
  __m512 total[M];
UNROLL(16)
  for (int r = 0; r < M; r++) total[r] = acc[r];
  const auto group = [&]<int ODD, int K>(int b, std::integral_constant<int, ODD>, std::integral_constant<int, K>) ALWAYS_LAMBDA {
    constexpr int WHICH = GROUPS == 1 ? ODD : K, SUM = 4 + 2 * ODD + K;
    const int g = b * GROUPS + K;
    tile_load<WHICH>(w.w + g * WORDS, 64), tile_load<2 + WHICH>(rows->q + g * S::GROUP, sizeof(Row8));
    tile_zero<SUM>(), tile_dot<SUM, 2 + WHICH, WHICH, true>(), tile_store<SUM>(sums[ODD][K], 64);
  };
  const auto start = [&](int b, auto odd) ALWAYS_LAMBDA {
    group(b, odd, std::integral_constant<int, 0>{});
    if constexpr (GROUPS == 2) group(b, odd, std::integral_constant<int, 1>{});
  };
  const auto finish = [&](int b, int odd) ALWAYS_LAMBDA {
UNROLL(16)
    for (int r = 0; r < M; r++) {
      __m512 block;
UNROLL(2)
      for (int k = 0; k < GROUPS; k++) {
        const int g = b * GROUPS + k;
        const __m512 y = _mm512_cvtepi32_ps(sums[odd][k][r]);
        block = k == 0 ? _mm512_mul_ps(y, w.d[g]) : _mm512_fmadd_ps(y, w.d[g], block);
        if (S::MINS) block = _mm512_fmadd_ps(_mm512_set1_ps(rows[r].sums[FIRST_SUM + g]), w.m[g], block);
      }
      total[r] = _mm512_fmadd_ps(block, _mm512_set1_ps(rows[r].scale[b]), total[r]);
    }
  };
  constexpr std::integral_constant<int, 0> EVEN;
  constexpr std::integral_constant<int, 1> ODD;
  start(0, EVEN);
  for (int b = 0; b < CHUNK / EIGHTH; b += 2) {
    start(b + 1, ODD), finish(b, 0);
    if (b + 2 < CHUNK / EIGHTH) start(b + 2, EVEN);
    finish(b + 1, 1);
  }
UNROLL(16)
  for (int r = 0; r < M; r++) acc[r] = total[r];
}

// Rows of 8 bits as `tiled` wants them. The last tile reaches back, and gives some rows twice.
template <typename T>
struct EightRows {
  using Multiply = void(const TileWeights &, const Row8 *, __m512 *);
  const Row8 *from;
  int64_t n, n_chunk, n_tile, m;
  Multiply *of_tile = nullptr;

  EightRows(const Row8 *from, int64_t n, int64_t n_chunk) : from(from), n(n), n_chunk(n_chunk), n_tile((n + 15) / 16), m((n + n_tile - 1) / n_tile) {
    with_constant<16>(m, [&](auto m_) ALWAYS_LAMBDA { of_tile = &multiply_tiles_eight<ShapeOf<T>, decltype(m_)::value>; });
  }
  int64_t start(int64_t tile) const { return std::min(tile * m, n - m); }
  void multiply(const TileWeights &w, int64_t tile, int64_t chunk, __m512 *acc) const { of_tile(w, from + chunk * n + start(tile), acc); }
};

}  // namespace pyspec
#endif
