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

// to[o * stride + r] = weights[o] . row r
template <typename T, int O, int R>
NEVER void tile(const uint8_t *weights, int64_t n_byte, const float *x, int64_t n_in, f8 *to, int64_t stride) {
  f8 acc[O][R];
  UNROLL(8)
  for (int o = 0; o < O; o++)
    UNROLL(8)
    for (int r = 0; r < R; r++) acc[o][r] = all(0.0f);
  int64_t i = 0;
  for (; i + 8 <= n_in; i += 8) {
    f8 xs[R];
    UNROLL(8)
    for (int r = 0; r < R; r++) xs[r] = load(x + r * n_in + i);
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
      sum = fma(load(tail), load_tail(x + r * n_in + i, n_in - i), sum);
    }
  }
}

// The same for n rows
template <typename T, int O>
void tiles(const uint8_t *weights, int64_t n_byte, const float *x, int64_t n, int64_t n_in, f8 *to, int64_t stride) {
  int64_t r = 0;
  for (; r + TILE_R <= n; r += TILE_R) tile<T, O, TILE_R>(weights, n_byte, x + r * n_in, n_in, to + r, stride);
  if (r + 2 == n) tile<T, O, 2>(weights, n_byte, x + r * n_in, n_in, to + r, stride);
  if (r + 1 == n) tile<T, O, 1>(weights, n_byte, x + r * n_in, n_in, to + r, stride);
}

void put_sums(const ProductArgs &p, int64_t first, int64_t n, int64_t o, int64_t n_o, const f8 *acc, int64_t stride) {
  for (int64_t r = 0; r < n; r++)
    for (int64_t k = 0; k < n_o; k++) p.y[(first + r) * p.stride + o + k] = result(p, first + r, o + k, sum(acc[k * stride + r]));
}

// Outputs first_o to last_o of all rows
template <typename T>
void outputs(const ProductArgs &p, int64_t first_o, int64_t last_o) {
  const int64_t n_byte = p.n_in * T::BYTES;
  f8 acc[TILE_O * ROWS];
  for (int64_t r = 0; r < p.n_row; r += ROWS) {
    const int64_t n = std::min(ROWS, p.n_row - r);
    const float *x = p.x + r * p.n_in;
    for (int64_t o = first_o, n_o; o < last_o; o += n_o) {
      n_o = o + TILE_O <= last_o ? TILE_O : 1;
      const uint8_t *w = p.weights + o * n_byte;
      if (n_o == 1) tiles<T, 1>(w, n_byte, x, n, p.n_in, acc, ROWS);
      else tiles<T, TILE_O>(w, n_byte, x, n, p.n_in, acc, ROWS);
      put_sums(p, r, n, o, n_o, acc, ROWS);
    }
  }
}

template <typename T>
void product(const ProductArgs &p) {
  each_range((p.n_out + TILE_O - 1) / TILE_O, 4, [&](int64_t a, int64_t b) { outputs<T>(p, a * TILE_O, std::min(b * TILE_O, p.n_out)); });
}

}  // namespace

void product_plain(const ProductArgs &p) {
  switch (p.type) {
    case 0: product<F32>(p); break;
    case 1: product<F16>(p); break;
    default: product<BF16>(p);
  }
}

}  // namespace pyspec
