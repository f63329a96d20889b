// Products with weights as they are: f32, f16 and bf16. Lane l of a sum takes weights l, l + 8, ... in order.
#include "linear.h"
#include "pool.h"

namespace pyspec {
namespace {

constexpr int64_t ROWS = 48;  // of a block: they lie in L2 while weights pass
constexpr int TILE_O = 4, TILE_R = 3;

struct F32 {
  static constexpr int BYTES = 4;
  static ALWAYS f8 at(const uint8_t *row, int64_t i) { return load(reinterpret_cast<const float *>(row) + i); }
  static float one(const uint8_t *row, int64_t i) { return reinterpret_cast<const float *>(row)[i]; }
};
struct F16 {
  static constexpr int BYTES = 2;
  static ALWAYS f8 at(const uint8_t *row, int64_t i) { return halves(reinterpret_cast<const uint16_t *>(row) + i); }
  static float one(const uint8_t *row, int64_t i) { return half_to_float(reinterpret_cast<const uint16_t *>(row)[i]); }
};
struct BF16 {
  static constexpr int BYTES = 2;
  static ALWAYS f8 at(const uint8_t *row, int64_t i) { return bf16s(reinterpret_cast<const uint16_t *>(row) + i); }
  static float one(const uint8_t *row, int64_t i) {
    const uint32_t b = uint32_t(reinterpret_cast<const uint16_t *>(row)[i]) << 16;
    float x;
    std::memcpy(&x, &b, 4);
    return x;
  }
};

// to[o * stride + r] = weights[o] . row first + r
template <typename T, int O, int R>
NEVER void tile(const uint8_t *weights, int64_t n_byte, const Rows &rows, int64_t first, f8 *to, int64_t stride) {
  const int64_t n_in = rows.n_in;
  const float *x[R];
  for (int r = 0; r < R; r++) x[r] = rows.values(first + r);
  f8 acc[O][R];
  UNROLL(8)
  for (int o = 0; o < O; o++)
    UNROLL(8)
    for (int r = 0; r < R; r++) acc[o][r] = all(0.0f);
  int64_t i = 0;
  for (; i + 8 <= n_in; i += 8) {
    f8 xs[R];
    UNROLL(8)
    for (int r = 0; r < R; r++) xs[r] = load(x[r] + i);
    UNROLL(8)
    for (int o = 0; o < O; o++) {
      const f8 w = T::at(weights + o * n_byte, i);
      UNROLL(8)
      for (int r = 0; r < R; r++) acc[o][r] = fma(w, xs[r], acc[o][r]);
    }
  }
  UNROLL(8)
  for (int o = 0; o < O; o++)
    UNROLL(8)
    for (int r = 0; r < R; r++) to[o * stride + r] = acc[o][r];
  if (i == n_in) return;
  for (int o = 0; o < O; o++) {
    float tail[8] = {};
    for (int64_t k = i; k < n_in; k++) tail[k - i] = T::one(weights + o * n_byte, k);
    for (int r = 0; r < R; r++) {
      f8 &sum = to[o * stride + r];
      sum = fma(load(tail), load_tail(x[r] + i, n_in - i), sum);
    }
  }
}

// The same for n rows
template <typename T, int O>
void tiles(const uint8_t *weights, int64_t n_byte, const Rows &rows, int64_t first, int64_t n, f8 *to, int64_t stride) {
  int64_t r = 0;
  for (; r + TILE_R <= n; r += TILE_R) tile<T, O, TILE_R>(weights, n_byte, rows, first + r, to + r, stride);
  if (r + 2 == n) tile<T, O, 2>(weights, n_byte, rows, first + r, to + r, stride);
  if (r + 1 == n) tile<T, O, 1>(weights, n_byte, rows, first + r, to + r, stride);
}

void put_sums(const ProductArgs &p, int64_t first, int64_t n, int64_t o, int64_t n_o, const f8 *acc, int64_t stride) {
  for (int64_t r = 0; r < n; r++)
    for (int64_t k = 0; k < n_o; k++) p.y[(first + r) * p.stride + o + k] = result(p, first + r, o + k, sum(acc[k * stride + r]));
}

template <typename T>
void part_of(const ProductArgs &p, const Rows &rows, const Part &part) {
  const int64_t n_byte = p.n_in * T::BYTES, last = part.first + part.n;
  f8 acc[TILE_O * ROWS];
  for (int64_t r = part.first; r < last; r += ROWS) {
    const int64_t n = std::min(ROWS, last - r);
    for (int64_t o = part.first_o, n_o; o < part.last_o; o += n_o) {
      n_o = o + TILE_O <= part.last_o ? TILE_O : 1;
      const uint8_t *w = p.weights + o * n_byte;
      if (n_o == 1) tiles<T, 1>(w, n_byte, rows, r, n, acc, ROWS);
      else tiles<T, TILE_O>(w, n_byte, rows, r, n, acc, ROWS);
      put_sums(p, r, n, o, n_o, acc, ROWS);
    }
  }
}

template <typename T>
void product(const ProductArgs &p) {
  const Rows rows{p.x, nullptr, nullptr, nullptr, p.n_in, 0};
  each_range((p.n_out + TILE_O - 1) / TILE_O, 4, [&](int64_t a, int64_t b) {
    part_of<T>(p, rows, {0, p.n_row, a * TILE_O, std::min(b * TILE_O, p.n_out)});
  });
}

}  // namespace

void product_plain(const ProductArgs &p) {
  switch (p.type) {
    case 0: product<F32>(p); break;
    case 1: product<F16>(p); break;
    default: product<BF16>(p);
  }
}

void product_plain_part(const ProductArgs &p, const Rows &rows, const Part &part) {
  switch (p.type) {
    case 0: part_of<F32>(p, rows, part); break;
    case 1: part_of<F16>(p, rows, part); break;
    default: part_of<BF16>(p, rows, part);
  }
}

}  // namespace pyspec
