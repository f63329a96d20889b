// linear: rows times a packed matrix, from the bytes of the file.
#include <algorithm>
#include <vector>

#include "plain.h"
#include "pool.h"
#include "unpacked.h"
#include "product.h"

using namespace pyspec;

namespace {

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

constexpr int64_t ROWS = 128;  // of a block: their 256 values lie in L2 while weights pass
constexpr int64_t TILE = 6;    // rows whose sums stay in registers
constexpr int64_t FEW = 8;     // rows that one pass over a panel multiplies
constexpr int64_t PANELS = 8;  // of a task: as often is a block's chunk read from L2

float result(const ProductArgs &p, int64_t row, int64_t o, float y) {
  y *= float(p.scale);
  if (p.bias) y += p.bias[o];
  if (p.residual) y += p.residual[row * p.residual_stride + o];
  return y;
}

// Eight outputs of a row, or those of them that there are
void put(const ProductArgs &p, int64_t row, int64_t o, f8 y) {
  float *to = p.y + row * p.stride + o;
  if (o + LANES > p.n_out) {
    for (int l = 0; o + l < p.n_out; l++) to[l] = result(p, row, o + l, y[l]);
    return;
  }
  y *= all(float(p.scale));
  if (p.bias) y += load(p.bias + o);
  if (p.residual) y += load(p.residual + row * p.residual_stride + o);
  store(to, y);
}

// Rows o to o + 7 of the matrix; the last stands in for those behind it
Eight eight(const uint8_t *weights, int64_t n_byte, int64_t o, int64_t n_out) {
  Eight b;
  for (int l = 0; l < LANES; l++) b.row[l] = weights + std::min(o + l, n_out - 1) * n_byte;
  return b;
}

template <typename T>
NEVER void fill(const Eight &b, int64_t n_in, int64_t chunk, const void *table, Panel &panel) {
  Eight here = b;
  here.forward(chunk * (CHUNK / T::BLOCK) * T::BYTES);
  const int64_t left = n_in - chunk * CHUNK;
  if (T::BLOCK == CHUNK || left >= CHUNK) return T::fill(here, CHUNK, table, panel);
  std::memset(&panel, 0, sizeof panel);
  T::fill(here, int(left), table, panel);
}

template <typename T, int R>
void few(const ProductArgs &p, const Rows &rows, int64_t n_byte, int64_t first, int64_t o) {
  Panel panel;
  f8 acc[R];
  for (int r = 0; r < R; r++) acc[r] = all(0.0f);
  const Eight b = eight(p.weights, n_byte, o, p.n_out);
  for (int64_t c = 0; c < rows.n_chunk; c++) {
    fill<T>(b, p.n_in, c, p.table, panel);
    multiply<ShapeOf<T>, R>(panel, rows, first, c, acc);
  }
  for (int r = 0; r < R; r++) put(p, first + r, o, acc[r]);
}

template <typename T>
void some(const ProductArgs &p, const Rows &rows, int64_t n_byte, int64_t first, int64_t n, int64_t o) {
  switch (n) {
    case 1: return few<T, 1>(p, rows, n_byte, first, o);
    case 2: return few<T, 2>(p, rows, n_byte, first, o);
    case 3: return few<T, 3>(p, rows, n_byte, first, o);
    case 4: return few<T, 4>(p, rows, n_byte, first, o);
    case 5: return few<T, 5>(p, rows, n_byte, first, o);
    case 6: return few<T, 6>(p, rows, n_byte, first, o);
    case 7: return few<T, 7>(p, rows, n_byte, first, o);
    default: return few<T, 8>(p, rows, n_byte, first, o);
  }
}

using Pair = f8[2];

template <typename S>
void wide_rows(const Wide &wide, const Rows &rows, int64_t first, int64_t n, int64_t c, Pair *acc) {
  int64_t r = 0;
  for (; r + TILE <= n; r += TILE) multiply_wide<S, TILE>(wide, rows, first + r, c, acc + r);
  if (r + 3 <= n) multiply_wide<S, 3>(wide, rows, first + r, c, acc + r), r += 3;
  if (r + 2 <= n) multiply_wide<S, 2>(wide, rows, first + r, c, acc + r), r += 2;
  if (r < n) multiply_wide<S, 1>(wide, rows, first + r, c, acc + r);
}

// Outputs first_o to last_o of a block of rows
template <typename T>
void many(const ProductArgs &p, const Rows &rows, int64_t n_byte, int64_t first, int64_t n, int64_t first_o, int64_t last_o) {
  Panel panel;
  Wide wide;
  static thread_local std::vector<f8> memory(PANELS *ROWS);
  Pair *acc = reinterpret_cast<Pair *>(memory.data());
  std::fill(memory.begin(), memory.end(), all(0.0f));
  for (int64_t c = 0; c < rows.n_chunk; c++)
    for (int64_t o = first_o, k = 0; o < last_o; o += 2 * LANES, k++) {
      for (int side = 0; side < 2; side++) {
        fill<T>(eight(p.weights, n_byte, o + side * LANES, p.n_out), p.n_in, c, p.table, panel);
        widen_panel<ShapeOf<T>>(panel, side, wide);
      }
      wide_rows<ShapeOf<T>>(wide, rows, first, n, c, acc + k * ROWS);
    }
  for (int64_t r = 0; r < n; r++)
    for (int64_t o = first_o, k = 0; o < last_o; o += LANES, k++) put(p, first + r, o, acc[k / 2 * ROWS + r][k % 2]);
}

template <typename T>
void packed(const ProductArgs &p) {
  const Rows rows{p.x, p.q, p.scales, p.sums, p.n_in, (p.n_in + CHUNK - 1) / CHUNK};
  const int64_t n_byte = p.n_in / T::BLOCK * T::BYTES, n_panel = (p.n_out + LANES - 1) / LANES;
  if (p.n_row <= FEW) {
    each_range(n_panel, 2, [&](int64_t a, int64_t b) {
      for (int64_t k = a; k < b; k++) some<T>(p, rows, n_byte, 0, p.n_row, k * LANES);
    });
    return;
  }
  const int64_t fair = n_panel / (8 * n_thread) / 2 * 2, size = std::clamp<int64_t>(fair, 2, PANELS);
  each((n_panel + size - 1) / size, [&](int64_t k) {
    const int64_t a = k * size * LANES, b = std::min(a + size * LANES, p.n_out);
    for (int64_t r = 0; r < p.n_row; r += ROWS) many<T>(p, rows, n_byte, r, std::min(ROWS, p.n_row - r), a, b);
  });
}

template <typename T, int O, int R>
void plain_tile(const ProductArgs &p, const Rows &rows, int64_t n_byte, int64_t r, int64_t o) {
  f8 acc[O][R];
  multiply_plain<T, O, R>(p.weights + o * n_byte, n_byte, rows, r, acc);
  for (int i = 0; i < O; i++)
    for (int k = 0; k < R; k++) p.y[(r + k) * p.stride + o + i] = result(p, r + k, o + i, sum(acc[i][k]));
}

template <typename T, int O>
void plain_rows(const ProductArgs &p, const Rows &rows, int64_t n_byte, int64_t first, int64_t last, int64_t o) {
  int64_t r = first;
  for (; r + 2 <= last; r += 2) plain_tile<T, O, 2>(p, rows, n_byte, r, o);
  for (; r < last; r++) plain_tile<T, O, 1>(p, rows, n_byte, r, o);
}

template <typename T>
void plain(const ProductArgs &p) {
  const Rows rows{p.x, nullptr, nullptr, nullptr, p.n_in, 0};
  const int64_t n_byte = p.n_in * T::BYTES;
  each_range((p.n_out + 3) / 4, 4, [&](int64_t a, int64_t b) {
    for (int64_t first = 0; first < p.n_row; first += ROWS) {
      const int64_t last = std::min(first + ROWS, p.n_row);
      int64_t o = a * 4;
      const int64_t end = std::min(b * 4, p.n_out);
      for (; o + 4 <= end; o += 4) plain_rows<T, 4>(p, rows, n_byte, first, last, o);
      for (; o < end; o++) plain_rows<T, 1>(p, rows, n_byte, first, last, o);
    }
  });
}

struct RowsArgs {
  const float *x;
  int16_t *q;
  float *scales, *sums;
  int64_t n_row, n_in, stride;
};

template <typename T>
void unpacked(const UnpackArgs &p) {
  const int64_t n_byte = p.n_in / T::BLOCK * T::BYTES;
  each_range((p.n_row + LANES - 1) / LANES, 1, [&](int64_t a, int64_t b) {
    Panel panel;
    for (int64_t o = a * LANES; o < b * LANES; o += LANES)
      for (int64_t c = 0; c * CHUNK < p.n_in; c++) {
        fill<T>(eight(p.weights, n_byte, o, p.n_row), p.n_in, c, p.table, panel);
        for (int64_t l = 0; l < LANES && o + l < p.n_row; l++)
          for (int64_t i = 0; i < std::min<int64_t>(CHUNK, p.n_in - c * CHUNK); i++) {
            const uint8_t byte = panel.w[i / 4][4 * l + i % 4];
            float y = (T::SIGNED ? float(int8_t(byte)) : float(byte)) * panel.d[i / T::GROUP][l];
            if (T::MINS) y += panel.m[i * T::MINS / CHUNK][l];
            p.out[(o + l) * p.n_in + c * CHUNK + i] = y;
          }
      }
  });
}

// GGML's numbers of the types
#define FOR_TYPE(type, f, ...)                 \
  switch (type) {                              \
    case 2: f<Q4_0>(__VA_ARGS__); break;       \
    case 3: f<Q4_1>(__VA_ARGS__); break;       \
    case 6: f<Q5_0>(__VA_ARGS__); break;       \
    case 7: f<Q5_1>(__VA_ARGS__); break;       \
    case 8: f<Q8_0>(__VA_ARGS__); break;       \
    case 10: f<Q2_K>(__VA_ARGS__); break;      \
    case 11: f<Q3_K>(__VA_ARGS__); break;      \
    case 12: f<Q4_K>(__VA_ARGS__); break;      \
    case 13: f<Q5_K>(__VA_ARGS__); break;      \
    case 14: f<Q6_K>(__VA_ARGS__); break;      \
    case 16: f<IQ2_XXS>(__VA_ARGS__); break;   \
    case 18: f<IQ3_XXS>(__VA_ARGS__); break;   \
    case 20: f<IQ4_NL>(__VA_ARGS__); break;    \
    case 23: f<IQ4_XS>(__VA_ARGS__); break;    \
    case 39: f<MXFP4>(__VA_ARGS__); break;     \
    case 40: f<NVFP4>(__VA_ARGS__); break;     \
  }

}  // namespace

extern "C" void pyspec_product(const ProductArgs *p) {
  if (p->n_row == 0) return;
  switch (p->type) {
    case 0: plain<F32>(*p); break;
    case 1: plain<F16>(*p); break;
    case 30: plain<BF16>(*p); break;
    default: FOR_TYPE(p->type, packed, *p)
  }
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
