// What the products of packed and of plain weights share: the arguments, and how a result is written.
#pragma once
#include <algorithm>

#include "pool.h"
#include "rows.h"

namespace pyspec {

// One product: y[r, o] = rows[r] . weights[o] * scale (+ bias[o]) (+ residual[r, o])
struct ProductArgs {
  const uint8_t *weights;
  const float *x;
  const int16_t *q;
  const float *scales, *sums;
  float *y;
  const float *residual, *bias;
  const void *table;
  int64_t type, n_row, n_in, n_out, stride, residual_stride;  // strides of y and residual, in values
  double scale;
};

// Outputs first_o to last_o, first_o a multiple of eight, of rows first to first + n of a product, on this thread. The rows of `p` are not read.
struct Part {
  int64_t first, n, first_o, last_o;
};
void product_part(const ProductArgs &p, const Rows &rows, const Part &part);

inline bool is_plain(int64_t type) { return type == 0 || type == 1 || type == 30; }
void product_plain(const ProductArgs &p);  // weights f32, f16 or bf16
void product_plain_part(const ProductArgs &p, const Rows &rows, const Part &part);

inline float result(const ProductArgs &p, int64_t row, int64_t o, float y) {
  y *= float(p.scale);
  if (p.bias) y += p.bias[o];
  if (p.residual) y += p.residual[row * p.residual_stride + o];
  return y;
}

// Where the panel of output o starts: the last one reaches back, and gives some outputs twice.
inline int64_t panel_start(int64_t o, int64_t n_out) { return std::max<int64_t>(0, std::min<int64_t>(o, n_out - LANES)); }

// Outputs o to o + 7 of a row, or those of them that there are
inline void put(const ProductArgs &p, int64_t row, int64_t o, f8 y) {
  float *to = p.y + row * p.stride + o;
  if (o + LANES > p.n_out) {
    for (int64_t k = o; k < p.n_out; k++) to[k - o] = result(p, row, k, y[k - panel_start(o, p.n_out)]);
    return;
  }
  y *= all(float(p.scale));
  if (p.bias) y += load(p.bias + o);
  if (p.residual) y += load(p.residual + row * p.residual_stride + o);
  store(to, y);
}

// body(part) for all outputs of all rows. A task is a block of at most `most_rows` rows and of neighbouring panels, `most` down to `least`, a power of
// two between them: as many as leave each thread several tasks, so that the last ones end together. Rows come from memory once for a task's panels,
// and tasks that run together read the same weights.
template <typename F>
void each_block(const ProductArgs &p, int64_t most_rows, int64_t most, int64_t least, F &&body) {
  const int64_t n_block = (p.n_row + most_rows - 1) / most_rows, n_panel = (p.n_out + LANES - 1) / LANES;
  int64_t size = most;
  while (size > least && n_block * ((n_panel + size - 1) / size) < 8 * n_thread) size /= 2;
  each(n_block * ((n_panel + size - 1) / size), [&](int64_t i) {
    const int64_t first = p.n_row * (i % n_block) / n_block, last = p.n_row * (i % n_block + 1) / n_block, o = i / n_block * size * LANES;
    body(Part{first, last - first, o, std::min(o + size * LANES, p.n_out)});
  });
}

}  // namespace pyspec
