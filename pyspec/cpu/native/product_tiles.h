// Products of rows by AMX: the sums of product.h in their order. A row's number is 256 high + low, so a group's sum is 256 times that
// of the high bytes (with a sign) plus that of the low ones (without), each a tile of rows x 16 outputs. Weights are bytes with a sign in all types.
// A group has its own scale, so a product of tiles is 16 or 32 bytes deep: half or a quarter of what an instruction could add up.
#pragma once
#include <algorithm>
#include <memory>
#include <vector>

#include "matrix.h"
#include "sixteen.h"
#include "tiles.h"

#if PYSPEC_TILES
namespace pyspec {

// With fewer rows, products of tiles took longer than those of vectors on a Xeon (docs/kernels.md). Groups of 16 take twice as many tiles.
constexpr int64_t tiles_from(int group) {
#if defined(PYSPEC_TILES_FROM)
  return group > 0 ? PYSPEC_TILES_FROM : 0;
#else
  return group == 16 ? 512 : 16;
#endif
}
template <typename T>
bool by_tiles(int64_t n_row) {
  return n_row >= tiles_from(T::GROUP) && tiles_permitted();
}

// 256 weights of sixteen outputs, a lane each: weights 4k to 4k + 3 in w[k], as a tile's row wants them; scales of their groups and offsets
struct TileWeights {
  __m512i w[CHUNK / 4];
  __m512 d[16], m[16];
};

// Chunk `chunk` of the panels at o and o + 8
template <typename T>
ALWAYS void fill_by_panels(const Eight &a, const Eight &b, int64_t n_in, int64_t chunk, const void *table, TileWeights &to) {
  Panel of[2];
  fill<T>(a, n_in, chunk, table, of[0]), fill<T>(b, n_in, chunk, table, of[1]);
  for (int k = 0; k < CHUNK / 4; k++) to.w[k] = both_of(of[0].w[k], of[1].w[k]);
  for (int g = 0; g < CHUNK / T::GROUP; g++) to.d[g] = both_of(of[0].d[g], of[1].d[g]);
  for (int g = 0; g < T::MINS; g++) to.m[g] = both_of(of[0].m[g], of[1].m[g]);
}

template <typename T>
struct Unpacked {
  static constexpr bool THERE = false;
};

template <>
struct Unpacked<Q8_0> {
  static constexpr bool THERE = true;
  static ALWAYS void fill(Sixteen b, TileWeights &to) {
UNROLL(2)
    for (int g = 0; g < 8; g++, b.a.at += Q8_0::BYTES, b.b.at += Q8_0::BYTES) b.thirty_two(2, to.w + 8 * g), to.d[g] = b.half(0);
  }
};

template <>
struct Unpacked<Q4_K> {
  static constexpr bool THERE = true;
  static ALWAYS void fill(Sixteen b, TileWeights &to) {
    __m512i head[4];
    b.sixteen(0, head);
    const __m512 d = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(head[0]));
    const __m512 low = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(head[0], 16)));
    const SixBits of(head);
UNROLL(8)
    for (int g = 0; g < 8; g++) {
      to.d[g] = _mm512_mul_ps(d, byte_of<false>(of.scales[g / 4], g % 4));
      to.m[g] = _mm512_mul_ps(-low, byte_of<false>(of.mins[g / 4], g % 4));
    }
    const __m512i nibble = _mm512_set1_epi8(15);
UNROLL(2)
    for (int i = 0; i < 4; i++) {
      __m512i x[8];
      b.thirty_two(16 + 32 * i, x);
UNROLL(8)
      for (int j = 0; j < 8; j++) {
        to.w[16 * i + j] = _mm512_and_si512(x[j], nibble);
        to.w[16 * i + 8 + j] = _mm512_and_si512(_mm512_srli_epi16(x[j], 4), nibble);
      }
    }
  }
};

template <>
struct Unpacked<Q6_K> {
  static constexpr bool THERE = true;
  static ALWAYS void fill(const Sixteen &b, TileWeights &to) {
    const __m512 d = b.half(208);
    __m512i s[4];
    b.sixteen(192, s);
UNROLL(16)
    for (int g = 0; g < 16; g++) to.d[g] = _mm512_mul_ps(d, byte_of<true>(s[g / 4], g % 4));
    const __m512i nibble = _mm512_set1_epi8(15), top = _mm512_set1_epi8(48), offset = _mm512_set1_epi8(32);
    for (int half = 0; half < 2; half++) {
      __m512i x[16], h[8];
      b.thirty_two(64 * half, x), b.thirty_two(64 * half + 32, x + 8), b.thirty_two(128 + 32 * half, h);
UNROLL(8)
      for (int g = 0; g < 8; g++)
UNROLL(4)
        for (int j = 0; j < 4; j++) {
          const __m512i w = six_bit_weights(x[4 * (g % 4) + j], h[4 * (g % 2) + j], g, nibble, top);
          to.w[32 * half + 4 * g + j] = _mm512_sub_epi8(w, offset);
        }
    }
  }
};

template <typename T>
NEVER void fill_tiles(const Matrix &matrix, int64_t o, int64_t n_in, int64_t chunk, const void *table, TileWeights &to) {
  Eight a = matrix.from(o), b = matrix.from(o + LANES);
  if constexpr (Unpacked<T>::THERE) {
    if (T::BLOCK == CHUNK || n_in - chunk * CHUNK >= CHUNK) {
      constexpr int64_t SIZE = CHUNK / T::BLOCK * T::BYTES;
      a.at += chunk * SIZE, b.at += chunk * SIZE;
      return Unpacked<T>::fill({a, b}, to);
    }
  }
  fill_by_panels<T>(a, b, n_in, chunk, table, to);
}

// Rows as tiles read them: the same number `m` of rows to each tile, rows of zeros behind the last one.
// A tile's chunk has [group, high or low, m, GROUP] bytes, then f32: m scales, and [m, MINS] sums.
struct Split {
  int64_t n, m, n_tile, n_chunk, size;
  uint8_t *at = nullptr;

  Split(int64_t n, int64_t n_chunk, int mins) : n(n), n_chunk(n_chunk) {
    n_tile = (n + 15) / 16;
    m = ((n + n_tile - 1) / n_tile + 1) / 2 * 2;
    n_tile = (n + m - 1) / m;
    size = (2 * CHUNK * m + 4 * m * (1 + mins) + 63) / 64 * 64;
  }
  int64_t n_byte() const { return size * n_tile * n_chunk; }
  uint8_t *of(int64_t tile, int64_t chunk) const { return at + (tile * n_chunk + chunk) * size; }

  // Memory of this thread, until its next call
  void take() {
    struct alignas(64) Line {
      uint8_t of[64];
    };
    static thread_local std::vector<Line> memory;
    const size_t n_line = size_t(n_byte() / 64);
    if (memory.size() < n_line) memory.resize(n_line + n_line / 4);
    at = reinterpret_cast<uint8_t *>(memory.data());
  }
  // A chunk of rows first + tile * m and on
  template <typename T>
  void fill(const Rows &rows, int64_t first, int64_t tile, int64_t chunk) const {
    uint8_t *bytes = of(tile, chunk);
    float *scale = reinterpret_cast<float *>(bytes + 2 * CHUNK * m), *sums = scale + m;
    for (int64_t r = 0; r < m; r++) {
      alignas(64) uint8_t both[2][CHUNK];  // high bytes, low bytes
      const bool there = tile * m + r < n;
      const int64_t row = there ? first + tile * m + r : 0;
      if (there) halve(rows.pairs(row, chunk), both);
      else std::memset(both, 0, sizeof both);
      for (int g = 0; g < CHUNK / T::GROUP; g++)
        for (int side = 0; side < 2; side++) std::memcpy(bytes + ((2 * g + side) * m + r) * T::GROUP, both[side] + g * T::GROUP, T::GROUP);
      const int64_t from = there ? rows.of(row) * rows.n_chunk + chunk : 0;
      scale[r] = there ? rows.scale[from] : 0.0f;
      for (int k = 0; k < T::MINS; k++) sums[r * T::MINS + k] = there ? rows.sums[from * N_SUM + (T::MINS == 16 ? 8 : 0) + k] : 0.0f;
    }
  }

 private:
  // Each four numbers lie as 0 2 1 3 (put_four)
  static ALWAYS void halve(const int32_t *pairs, uint8_t (*both)[CHUNK]) {
    const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi8(1, 5, 3, 7, 9, 13, 11, 15, 0, 4, 2, 6, 8, 12, 10, 14));
    const __m512i high = _mm512_setr_epi64(0, 2, 4, 6, 8, 10, 12, 14), low = _mm512_setr_epi64(1, 3, 5, 7, 9, 11, 13, 15);
UNROLL(4)
    for (int k = 0; k < 4; k++) {
      const __m512i a = _mm512_shuffle_epi8(_mm512_loadu_si512(pairs + 32 * k), order);
      const __m512i b = _mm512_shuffle_epi8(_mm512_loadu_si512(pairs + 32 * k + 16), order);
      _mm512_store_si512(both[0] + 64 * k, _mm512_permutex2var_epi64(a, high, b));
      _mm512_store_si512(both[1] + 64 * k, _mm512_permutex2var_epi64(a, low, b));
    }
  }
};

// Tiles of this thread while it lives: 0 and 1 weights, 2 and 3 rows' bytes, 4 to 7 sums. Given back at its end, so that switches between threads
// do not carry them.
struct Tiles {
  Tiles(int64_t m, int group) {
    TileShapes shapes;
    for (int t = 0; t < 8; t++) {
      shapes.n_row[t] = uint8_t(t < 2 ? group / 4 : m);
      shapes.n_byte[t] = uint8_t(t == 2 || t == 3 ? group : 64);
    }
    tiles_configure(shapes);
  }
  Tiles(const Tiles &) = delete;
  ~Tiles() { tiles_release(); }
};

// acc[r] += weights . row r of a tile of M rows. While sums of a group are on their way to memory, those of the group before are added up.
template <typename S, int M>
NEVER void multiply_tiles(const TileWeights &w, const uint8_t *rows, __m512 *acc) {
  constexpr int WORDS = S::GROUP / 4, GROUPS = CHUNK / S::GROUP, BYTES = M * S::GROUP;
  alignas(64) __m512i sums[2][2][M];  // of even and odd groups, of high and low bytes
  __m512 total[M];
UNROLL(16)
  for (int r = 0; r < M; r++) total[r] = _mm512_setzero_ps();
  const auto start = [&]<int ODD>(int g, std::integral_constant<int, ODD>) ALWAYS_LAMBDA {
    tile_load<ODD>(w.w + g * WORDS, 64);
    tile_load<2>(rows + 2 * g * BYTES, S::GROUP), tile_load<3>(rows + (2 * g + 1) * BYTES, S::GROUP);
    tile_zero<4 + 2 * ODD>(), tile_zero<5 + 2 * ODD>();
    tile_dot<4 + 2 * ODD, 2, ODD, true>(), tile_dot<5 + 2 * ODD, 3, ODD, false>();
    tile_store<4 + 2 * ODD>(sums[ODD][0], 64), tile_store<5 + 2 * ODD>(sums[ODD][1], 64);
  };
  const auto finish = [&](int g, int odd) ALWAYS_LAMBDA {
    const __m512 d = w.d[g];
UNROLL(16)
    for (int r = 0; r < M; r++) {
      const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(sums[odd][0][r], 8), sums[odd][1][r]);
      total[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), d, total[r]);
    }
  };
  start(0, std::integral_constant<int, 0>{});
  for (int g = 0; g < GROUPS; g += 2) {
    start(g + 1, std::integral_constant<int, 1>{}), finish(g, 0);
    if (g + 2 < GROUPS) start(g + 2, std::integral_constant<int, 0>{});
    finish(g + 1, 1);
  }
  const float *scale = reinterpret_cast<const float *>(rows + 2 * CHUNK * M), *of_rows = scale + M;
  for (int g = 0; g < S::MINS; g++) {
    const __m512 m = w.m[g];
UNROLL(16)
    for (int r = 0; r < M; r++) total[r] = _mm512_fmadd_ps(m, _mm512_set1_ps(of_rows[r * S::MINS + g]), total[r]);
  }
UNROLL(16)
  for (int r = 0; r < M; r++) acc[r] = _mm512_fmadd_ps(total[r], _mm512_set1_ps(scale[r]), acc[r]);
}

// Rows of 16 bits as `tiled` wants them
template <typename T>
struct SplitRows : Split {
  using Multiply = void(const TileWeights &, const uint8_t *, __m512 *);
  Multiply *of_tile = nullptr;

  SplitRows(int64_t n, int64_t n_chunk) : Split(n, n_chunk, T::MINS) {
    with_constant<8>(m / 2, [&](auto half) ALWAYS_LAMBDA { of_tile = &multiply_tiles<ShapeOf<T>, 2 * decltype(half)::value>; });
    take();
  }
  int64_t start(int64_t tile) const { return tile * m; }
  void multiply(const TileWeights &w, int64_t tile, int64_t chunk, __m512 *acc) const { of_tile(w, of(tile, chunk), acc); }
  void fill_chunk(const Rows &rows, int64_t first, int64_t tile, int64_t chunk) const { fill<T>(rows, first, tile, chunk); }
};

// Asks for the next chunk of eight outputs.
template <typename T>
ALWAYS void fetch_next(const Eight &b, int64_t chunk) {
  constexpr int64_t SIZE = CHUNK / T::BLOCK * T::BYTES;
  for (int l = 0; l < LANES; l++)
    for (int64_t i = 0; i < SIZE; i += 64) __builtin_prefetch(b.row(l, (chunk + 1) * SIZE + i), 0, 2);
}

// Of a thread
struct TiledRoom {
  static constexpr int64_t PAIRS = 4, ROWS = 256;  // of a block: 64 KiB of sums
  TileWeights weights[PAIRS];
  __m512 acc[PAIRS * ROWS];

  static TiledRoom &here() {
    static thread_local const std::unique_ptr<TiledRoom> room = std::make_unique<TiledRoom>();
    return *room;
  }
};

// Outputs first_o to last_o of rows `first` to first + rows.n. `rows` has n_tile tiles of m rows, of which tile t has rows start(t) and on, and
// multiply(weights, tile, chunk, acc).
template <typename T, typename R>
void tiled(const ProductArgs &p, const Matrix &matrix, const R &rows, int64_t first, int64_t first_o, int64_t last_o) {
  TiledRoom &room = TiledRoom::here();
  const int64_t m = rows.m, most = rows.n_tile == 1 ? 1 : TiledRoom::PAIRS, n_at_once = TiledRoom::ROWS / m;
  const Tiles tiles(m, T::GROUP);
  for (int64_t o = first_o; o < last_o; o += 2 * LANES * most) {
    const int64_t n_pair = std::min(most, (last_o - o + 2 * LANES - 1) / (2 * LANES));
    for (int64_t t = 0; t < rows.n_tile; t += n_at_once) {
      const int64_t n_tile = std::min(n_at_once, rows.n_tile - t);
      std::fill_n(room.acc, n_tile * n_pair * m, _mm512_setzero_ps());
      for (int64_t c = 0; c < rows.n_chunk; c++) {
        for (int64_t k = 0; k < n_pair; k++) {
          const int64_t at = o + 2 * LANES * k;
          for (int64_t side = 0; side < 2; side++) {
            if (most == 1) fetch_ahead<T>(matrix.from(at + (2 + side) * LANES), c);
            else fetch_next<T>(matrix.from(at + side * LANES), c);
          }
          fill_tiles<T>(matrix, at, p.n_in, c, p.table, room.weights[k]);
        }
        for (int64_t i = 0; i < n_tile; i++)
          for (int64_t k = 0; k < n_pair; k++) rows.multiply(room.weights[k], t + i, c, room.acc + (i * n_pair + k) * m);
      }
      for (int64_t i = 0; i < n_tile; i++)
        for (int64_t r = rows.start(t + i), end = std::min(r + m, rows.n), l = 0; r < end; r++, l++)
          for (int64_t k = 0; k < n_pair; k++) {
            const f8 *of = reinterpret_cast<const f8 *>(room.acc + (i * n_pair + k) * m + l);
            for (int64_t side = 0; side < 2; side++) {
              const int64_t at = o + (2 * k + side) * LANES;
              if (at < last_o) put(p, first + r, at, of[side]);
            }
          }
    }
  }
}

}  // namespace pyspec
#endif
