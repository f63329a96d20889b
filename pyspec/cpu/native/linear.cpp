// linear: rows times a packed matrix, from the bytes of the file.
#include <algorithm>
#include <vector>

#include "linear.h"
#include "matrix.h"
#include "pool.h"
#include "product.h"
#include "sixteen.h"
#include "unpacked.h"

using namespace pyspec;

namespace {

constexpr int64_t ROWS = 128;         // of a block: their 256 values lie in L2 while weights pass
#if defined(__AVX512VNNI__)
constexpr int64_t TILE = 12;  // rows whose sums stay in registers
constexpr int64_t FEW = 12;   // rows that one pass over a panel multiplies
#else
constexpr int64_t TILE = 6;
constexpr int64_t FEW = 7;
#endif
#if defined(__AVX512VNNI__)
constexpr int64_t MANY = 4;  // panels that many rows are multiplied with at a time
#else
constexpr int64_t MANY = 2;
#endif
constexpr int64_t PANELS = 32;        // of a task at most: as often is a block's chunk read from L2, where its sums lie, too

using Pair = f8[2];

#if defined(__AVX512VNNI__)
// `some` of a type that is unpacked in registers
template <typename T>
void direct(const ProductArgs &p, const Rows &rows, const Matrix &matrix, const Part &part) {
  constexpr int64_t SIZE = CHUNK / T::BLOCK * T::BYTES;
  using Multiply = void(Sixteen, const Rows &, int64_t, int64_t, Pair *);
  Multiply *multiply = nullptr;
  with_constant<Direct<T>::MOST>(part.n, [&](auto n_) ALWAYS_LAMBDA { multiply = &Direct<T>::template multiply<decltype(n_)::value>; });
  Pair acc[FEW];
  for (int64_t o = part.first_o; o < part.last_o; o += 2 * LANES) {
    const int n_side = o + LANES < part.last_o ? 2 : 1;  // a panel alone goes twice
    std::fill_n(&acc[0][0], 2 * part.n, all(0.0f));
    Sixteen here{matrix.from(o), matrix.from(o + (n_side - 1) * LANES)};
    for (int64_t c = 0; c < rows.n_chunk; c++, here.a.at += SIZE, here.b.at += SIZE) {
      for (int side = 0; side < n_side; side++) fetch_ahead<T>(matrix.from(o + (n_side + side) * LANES), c);
      multiply(here, rows, part.first, c, acc);
    }
    for (int64_t r = 0; r < part.n; r++)
      for (int side = 0; side < n_side; side++) put(p, part.first + r, o + side * LANES, acc[r][side]);
  }
}

// Outputs first_o to last_o of at most FEW rows in one pass over their panels, two at a time
template <typename T>
void some(const ProductArgs &p, const Rows &rows, const Matrix &matrix, const Part &part) {
  if constexpr (Direct<T>::MOST > 0) {
    if (part.n <= Direct<T>::MOST) return direct<T>(p, rows, matrix, part);
  }
  using Multiply = void(const Panel &, const Panel &, const Rows &, int64_t, int64_t, Pair *);
  Multiply *multiply = nullptr;
  with_constant<FEW>(part.n, [&](auto n_) ALWAYS_LAMBDA { multiply = &multiply_pair<ShapeOf<T>, decltype(n_)::value>; });
  Panel panel[2];
  Pair acc[FEW];
  for (int64_t o = part.first_o; o < part.last_o; o += 2 * LANES) {
    const int n_side = o + LANES < part.last_o ? 2 : 1;  // a panel alone goes twice
    std::fill_n(&acc[0][0], 2 * part.n, all(0.0f));
    for (int64_t c = 0; c < rows.n_chunk; c++) {
      for (int side = 0; side < n_side; side++) {
        fetch_ahead<T>(matrix.from(o + (n_side + side) * LANES), c);
        fill<T>(matrix.from(o + side * LANES), p.n_in, c, p.table, panel[side]);
      }
      multiply(panel[0], panel[n_side - 1], rows, part.first, c, acc);
    }
    for (int64_t r = 0; r < part.n; r++)
      for (int side = 0; side < n_side; side++) put(p, part.first + r, o + side * LANES, acc[r][side]);
  }
}
#else
// Outputs first_o to last_o of at most FEW rows in one pass over their panels
template <typename T>
void some(const ProductArgs &p, const Rows &rows, const Matrix &matrix, const Part &part) {
  using Multiply = void(const Panel &, const Rows &, int64_t, int64_t, f8 *);
  Multiply *of_panel = nullptr;
  with_constant<FEW>(part.n, [&](auto n_) ALWAYS_LAMBDA { of_panel = &multiply<ShapeOf<T>, decltype(n_)::value>; });
  Panel panel;
  f8 acc[FEW];
  for (int64_t o = part.first_o; o < part.last_o; o += LANES) {
    std::fill_n(acc, part.n, all(0.0f));
    const Eight b = matrix.from(o);
    for (int64_t c = 0; c < rows.n_chunk; c++) {
      fetch_ahead<T>(matrix.from(o + LANES), c);
      fill<T>(b, p.n_in, c, p.table, panel);
      of_panel(panel, rows, part.first, c, acc);
    }
    for (int64_t r = 0; r < part.n; r++) put(p, part.first + r, o, acc[r]);
  }
}
#endif

// Tiles of at most TILE rows, as even as can be
template <typename S>
void wide_rows(const Wide &wide, const Rows &rows, int64_t first, int64_t n, int64_t c, Pair *acc) {
  const int64_t n_tile = (n + TILE - 1) / TILE;
  for (int64_t i = 0; i < n_tile; i++) {
    const int64_t a = n * i / n_tile, size = n * (i + 1) / n_tile - a, r = first + a;
    with_constant<TILE>(size, [&](auto r_) ALWAYS_LAMBDA { multiply_wide<S, decltype(r_)::value>(wide, rows, r, c, acc + a); });
  }
}

#if defined(__AVX512VNNI__)
// The same for four panels
template <typename S>
void quad_rows(const Wide *wide, const Rows &rows, int64_t first, int64_t n, int64_t c, Pair *acc, Pair *next) {
  const int64_t n_tile = (n + QUAD - 1) / QUAD;
  for (int64_t i = 0; i < n_tile; i++) {
    const int64_t a = n * i / n_tile, size = n * (i + 1) / n_tile - a, r = first + a;
    with_constant<QUAD>(size, [&](auto r_) ALWAYS_LAMBDA { multiply_quad<S, decltype(r_)::value>(wide, rows, r, c, acc + a, next + a); });
  }
}
#endif

// Chunk c of the panels of outputs o and o + LANES
template <typename T>
void unpack_wide(const Matrix &matrix, const Rows &rows, int64_t o, int64_t n_in, int64_t c, const void *table, Wide &wide) {
#if defined(__AVX512VNNI__)
  if constexpr (Direct<T>::WIDENS) {
    constexpr int64_t SIZE = CHUNK / T::BLOCK * T::BYTES;
    Sixteen here{matrix.from(o), matrix.from(o + LANES)};
    here.a.at += c * SIZE, here.b.at += c * SIZE;
    return Direct<T>::widen(here, rows.groups<T::GROUP>(c), wide);
  }
#endif
  Panel panel;
  for (int side = 0; side < 2; side++) {
    fill<T>(matrix.from(o + side * LANES), n_in, c, table, panel);
    widen_panel<ShapeOf<T>>(panel, side, rows.groups<T::GROUP>(c), wide);
  }
}

// Outputs first_o to last_o of a block of rows
template <typename T>
void many(const ProductArgs &p, const Rows &rows, const Matrix &matrix, int64_t first, int64_t n, int64_t first_o, int64_t last_o) {
  Wide wide[2];
  static thread_local std::vector<f8> memory(PANELS *ROWS);
  Pair *acc = reinterpret_cast<Pair *>(memory.data());
  for (int64_t o = first_o, k = 0; o < last_o; o += 2 * LANES, k++) std::fill_n(&acc[k * ROWS][0], 2 * n, all(0.0f));
  for (int64_t c = 0; c < rows.n_chunk; c++)
    for (int64_t o = first_o, k = 0; o < last_o; o += 2 * LANES, k++) {
      for (int side = 0; side < 2; side++) fetch_ahead<T>(matrix.from(o + (2 + side) * LANES), c);
      unpack_wide<T>(matrix, rows, o, p.n_in, c, p.table, wide[k % 2]);
#if defined(__AVX512VNNI__)
      if (k % 2 == 1) {
        quad_rows<ShapeOf<T>>(wide, rows, first, n, c, acc + (k - 1) * ROWS, acc + k * ROWS);
        continue;
      }
      if (o + 2 * LANES < last_o) continue;
#endif
      wide_rows<ShapeOf<T>>(wide[k % 2], rows, first, n, c, acc + k * ROWS);
    }
  for (int64_t r = 0; r < n; r++)
    for (int64_t o = first_o, k = 0; o < last_o; o += LANES, k++) put(p, first + r, o, acc[k / 2 * ROWS + r][k % 2]);
}

template <typename T>
void part_of(const ProductArgs &p, const Rows &rows, const Part &part) {
  const Matrix matrix(p.weights, p.n_in / T::BLOCK * T::BYTES, p.n_out);
  const int64_t last = part.first + part.n;
  if (part.n <= FEW) {
    if (part.n > 0) some<T>(p, rows, matrix, part);
    return;
  }
  for (int64_t o = part.first_o; o < part.last_o; o += PANELS * LANES)
    for (int64_t r = part.first; r < last; r += ROWS)
      many<T>(p, rows, matrix, r, std::min(ROWS, last - r), o, std::min(o + PANELS * LANES, part.last_o));
}

template <typename T>
void packed(const ProductArgs &p) {
  const Rows rows{p.x, p.q, p.scales, p.sums, p.n_in, (p.n_in + CHUNK - 1) / CHUNK};
  const Matrix matrix(p.weights, p.n_in / T::BLOCK * T::BYTES, p.n_out);
  const int64_t n_panel = (p.n_out + LANES - 1) / LANES;
  if (p.n_row <= FEW) {
    each_range(n_panel, 2, [&](int64_t a, int64_t b) { part_of<T>(p, rows, {0, p.n_row, a * LANES, std::min(b * LANES, p.n_out)}); });
    return;
  }
  each_block(p, ROWS, PANELS, MANY, [&](const Part &b) { many<T>(p, rows, matrix, b.first, b.n, b.first_o, b.last_o); });
}

struct RowsArgs {
  const float *x;
  int16_t *q;
  float *scales, *sums;
  int64_t n_row, n_in, stride;
};

template <typename T>
void unpacked(const UnpackArgs &p) {
  const Matrix matrix(p.weights, p.n_in / T::BLOCK * T::BYTES, p.n_row);
  each_range((p.n_row + LANES - 1) / LANES, 1, [&](int64_t a, int64_t b) {
    Panel panel;
    for (int64_t o = a * LANES; o < b * LANES; o += LANES)
      for (int64_t c = 0; c * CHUNK < p.n_in; c++) {
        fill<T>(matrix.from(o), p.n_in, c, p.table, panel);
        for (int64_t l = 0; l < LANES && o + l < p.n_row; l++)
          for (int64_t i = 0; i < std::min<int64_t>(CHUNK, p.n_in - c * CHUNK); i++) {
            const int64_t lane = o + l - panel_start(o, p.n_row);
            const uint8_t byte = panel.w[i / 4][4 * lane + i % 4];
            float y = (T::LEAST < 0 ? float(int8_t(byte)) : float(byte)) * panel.d[i / T::GROUP][lane];
            if (T::MINS) y += panel.m[i * T::MINS / CHUNK][lane];
            p.out[(o + l) * p.n_in + c * CHUNK + i] = y;
          }
      }
  });
}

}  // namespace

extern "C" void pyspec_product(const ProductArgs *p) {
  if (p->n_row == 0) return;
  if (is_plain(p->type)) return product_plain(*p);
  FOR_TYPE(p->type, packed, *p)
}

void pyspec::product_part(const ProductArgs &p, const Rows &rows, const Part &part) {
  if (is_plain(p.type)) return product_plain_part(p, rows, part);
  FOR_TYPE(p.type, part_of, p, rows, part)
}

// Rows [n_row, n_in] f32 as whole numbers
extern "C" void pyspec_quantise_rows(const RowsArgs *p) {
  const int64_t n_chunk = (p->n_in + CHUNK - 1) / CHUNK;
  each_range(p->n_row * n_chunk, 16, [&](int64_t a, int64_t b) {
    for (int64_t i = a; i < b; i++) {
      const int64_t r = i / n_chunk, c = i % n_chunk;
      const int n = int(std::min<int64_t>(CHUNK, p->n_in - c * CHUNK));
      quantise(p->x + r * p->stride + c * CHUNK, n, p->q + i * CHUNK, p->scales + i, p->sums + i * N_SUM);
    }
  });
}

// A matrix of a packed type as f32 [n_row, n_in]
extern "C" void pyspec_unpack(const UnpackArgs *p) { FOR_TYPE(p->type, unpacked, *p) }
