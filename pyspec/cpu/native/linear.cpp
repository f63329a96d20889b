// linear: rows times a packed matrix, from the bytes of the file.
#include <algorithm>
#include <vector>

#include "pool.h"
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

constexpr int64_t ROWS = 64;   // of a block: their 256 values lie in L1 and L2 while weights pass
constexpr int64_t PANEL = 16;  // rows of the matrix that are unpacked at a time for many rows

struct Out {
  const ProductArgs *p;
  void operator()(int64_t row, int64_t o, f8 acc) const {
    float y = sum(acc) * float(p->scale);
    if (p->bias) y += p->bias[o];
    if (p->residual) y += p->residual[row * p->residual_stride + o];
    p->y[row * p->stride + o] = y;
  }
};

template <typename T, int R>
void few(const ProductArgs &p, const Rows &rows, int64_t n_byte, int64_t first, int64_t o) {
  Unpacked<T> weights;
  f8 acc[R];
  for (int r = 0; r < R; r++) acc[r] = all(0.0f);
  for (int64_t c = 0; c < rows.n_chunk; c++) {
    weights.read(p.weights + o * n_byte, c, p.n_in, p.table);
    multiply<T, 1, R>(&weights, rows, first, c, acc, R);
  }
  for (int r = 0; r < R; r++) Out{&p}(first + r, o, acc[r]);
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

// PANEL rows of the matrix with a block of rows
template <typename T>
void many(const ProductArgs &p, const Rows &rows, int64_t n_byte, int64_t first, int64_t n, int64_t o, int64_t n_o) {
  static thread_local std::vector<Unpacked<T>> panel(PANEL);
  static thread_local std::vector<f8> acc(ROWS *PANEL);
  std::fill(acc.begin(), acc.end(), all(0.0f));
  for (int64_t c = 0; c < rows.n_chunk; c++) {
    for (int64_t k = 0; k < n_o; k++) panel[k].read(p.weights + (o + k) * n_byte, c, p.n_in, p.table);
    for (int64_t k = 0; k < n_o; k += 4) {
      int64_t r = 0;
      if (k + 4 <= n_o) {
        for (; r + 2 <= n; r += 2) multiply<T, 4, 2>(&panel[k], rows, first + r, c, &acc[k * ROWS + r], ROWS);
        for (; r < n; r++) multiply<T, 4, 1>(&panel[k], rows, first + r, c, &acc[k * ROWS + r], ROWS);
      } else {
        for (int64_t j = k; j < n_o; j++)
          for (r = 0; r < n; r++) multiply<T, 1, 1>(&panel[j], rows, first + r, c, &acc[j * ROWS + r], ROWS);
      }
    }
  }
  for (int64_t r = 0; r < n; r++)
    for (int64_t k = 0; k < n_o; k++) Out{&p}(first + r, o + k, acc[k * ROWS + r]);
}

template <typename T>
void packed(const ProductArgs &p) {
  const Rows rows{p.x, p.q, p.scales, p.sums, p.n_in, (p.n_in + CHUNK - 1) / CHUNK};
  const int64_t n_byte = p.n_in / T::BLOCK * T::BYTES;
  if (p.n_row <= 8) {
    each_range(p.n_out, 16, [&](int64_t a, int64_t b) {
      for (int64_t o = a; o < b; o++) some<T>(p, rows, n_byte, 0, p.n_row, o);
    });
    return;
  }
  const int64_t panels = (p.n_out + PANEL - 1) / PANEL;
  each(panels, [&](int64_t k) {
    const int64_t o = k * PANEL, n_o = std::min(PANEL, p.n_out - o);
    for (int64_t r = 0; r < p.n_row; r += ROWS) many<T>(p, rows, n_byte, r, std::min(ROWS, p.n_row - r), o, n_o);
  });
}

template <typename T, int O, int R>
void plain_tile(const ProductArgs &p, const Rows &rows, int64_t n_byte, int64_t r, int64_t o) {
  f8 acc[O][R];
  multiply_plain<T, O, R>(p.weights + o * n_byte, n_byte, rows, r, acc);
  for (int i = 0; i < O; i++)
    for (int k = 0; k < R; k++) Out{&p}(r + k, o + i, acc[i][k]);
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

struct UnpackArgs {
  const uint8_t *weights;
  float *out;
  const void *table;
  int64_t type, n_row, n_in;
};

template <typename T>
void unpacked(const UnpackArgs &p) {
  const int64_t n_byte = p.n_in / T::BLOCK * T::BYTES;
  each_range(p.n_row, 4, [&](int64_t a, int64_t b) {
    Unpacked<T> u;
    for (int64_t o = a; o < b; o++)
      for (int64_t c = 0; c * CHUNK < p.n_in; c++) {
        u.read(p.weights + o * n_byte, c, p.n_in, p.table);
        for (int64_t i = 0; i < std::min<int64_t>(CHUNK, p.n_in - c * CHUNK); i++) {
          float y = float(u.w[i]) * u.d[i / T::GROUP];
          if (T::MINS) y += u.m[i * T::MINS / CHUNK];
          p.out[o * p.n_in + c * CHUNK + i] = y;
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
