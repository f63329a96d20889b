// linear: rows as 8-bit whole numbers times a packed matrix, from the bytes of the file.
#include "eight.h"
#include "matrix.h"
#include "pool.h"

using namespace pyspec;

namespace {

constexpr int64_t ROWS = 128;         // of a block
constexpr int64_t TILE = 8;            // rows whose sums stay in registers
constexpr int64_t PANELS = 16;        // of a task at most: as often is a block's chunk read from L2

template <typename S>
void tile(const Panel &panel, const Row8 *x, int64_t n, f8 *acc) {
  switch (n) {
    case 1: return multiply_eight<S, 1>(panel, x, acc);
    case 2: return multiply_eight<S, 2>(panel, x, acc);
    case 3: return multiply_eight<S, 3>(panel, x, acc);
    case 4: return multiply_eight<S, 4>(panel, x, acc);
    case 5: return multiply_eight<S, 5>(panel, x, acc);
    case 6: return multiply_eight<S, 6>(panel, x, acc);
    case 7: return multiply_eight<S, 7>(panel, x, acc);
    default: return multiply_eight<S, 8>(panel, x, acc);
  }
}

// Outputs first_o to last_o of a block of rows
template <typename T>
void block(const ProductArgs &p, const Matrix &matrix, int64_t first, int64_t n, int64_t first_o, int64_t last_o) {
  const int64_t n_chunk = (p.n_in + CHUNK - 1) / CHUNK, n_tile = (n + TILE - 1) / TILE;
  const Row8 *rows = reinterpret_cast<const Row8 *>(p.q) + first;
  Panel panel;
  static thread_local std::vector<f8> memory(PANELS *ROWS);
  f8 *acc = memory.data();
  for (int64_t o = first_o, k = 0; o < last_o; o += LANES, k++) std::fill_n(acc + k * ROWS, n, all(0.0f));
  for (int64_t c = 0; c < n_chunk; c++)
    for (int64_t o = first_o, k = 0; o < last_o; o += LANES, k++) {
      fetch_ahead<T>(matrix.from(o + LANES), c);
      fill<T>(matrix.from(o), p.n_in, c, p.table, panel);
      for (int64_t i = 0; i < n_tile; i++) {  // as even as can be
        const int64_t a = n * i / n_tile;
        tile<Shape8Of<T>>(panel, rows + c * p.n_row + a, n * (i + 1) / n_tile - a, acc + k * ROWS + a);
      }
    }
  for (int64_t r = 0; r < n; r++)
    for (int64_t o = first_o, k = 0; o < last_o; o += LANES, k++) put(p, first + r, o, acc[k * ROWS + r]);
}

template <typename T>
void product(const ProductArgs &p) {
  const Matrix matrix(p.weights, p.n_in / T::BLOCK * T::BYTES, p.n_out);
  each_block(p, ROWS, PANELS, 2, [&](const Part &b) { block<T>(p, matrix, b.first, b.n, b.first_o, b.last_o); });
}

template <typename T>
void packed(const ProductArgs &p) {
  if constexpr (Shape8Of<T>::FITS) product<T>(p);
}

template <typename T>
void fits(bool &yes) {
  yes = Shape8Of<T>::FITS;
}

}  // namespace

// As pyspec_product, of a packed type. q: Row8 [n_chunk, n_row]; scales and sums are not read.
extern "C" void pyspec_product_eight(const ProductArgs *p) {
  if (p->n_row == 0) return;
  FOR_TYPE(p->type, packed, *p)
}

// Whether pyspec_product_eight has this type. Where its products may pass 16 bits, 16-bit rows are as fast.
extern "C" int32_t pyspec_has_eight(int32_t type) {
  bool yes = false;
  FOR_TYPE(type, fits, yes)
  return yes;
}
