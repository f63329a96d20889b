// Products with weights as they are: f32, f16 and bf16. Lane l of a sum takes weights l, l + 8, ... in order.
#include <vector>

#include "linear.h"
#include "pool.h"

namespace pyspec {
namespace {

constexpr int64_t ROWS = 60;      // of a block: their columns lie in L2 while weights pass
constexpr int64_t COLUMNS = 512;  // of a block
constexpr int64_t OUT = 16;       // outputs of a task: their columns lie in L1 and L2
constexpr int64_t FEW = 8;        // rows for which weights are read where they are
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

// acc[o][r] += weights[o] . row r over columns a to b; acc has `stride` sums for each o
template <typename T, int O, int R>
NEVER void tile(const uint8_t *weights, int64_t n_byte, const float *x, int64_t n_in, int64_t a, int64_t b, f8 *to, int64_t stride) {
  f8 acc[O][R];
  UNROLL(8)
  for (int o = 0; o < O; o++)
    UNROLL(8)
    for (int r = 0; r < R; r++) acc[o][r] = to[o * stride + r];
  int64_t i = 0;
  for (; a + i + 8 <= b; i += 8) {
    f8 xs[R];
    UNROLL(8)
    for (int r = 0; r < R; r++) xs[r] = load(x + r * n_in + a + i);
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
  if (a + i == b) return;
  for (int o = 0; o < O; o++) {
    float tail[8] = {};
    for (int64_t k = a + i; k < b; k++) tail[k - a - i] = T::one(weights + o * n_byte, k - a);
    for (int r = 0; r < R; r++) {
      f8 &sum = to[o * stride + r];
      sum = fma(load(tail), load_tail(x + r * n_in + a + i, b - a - i), sum);
    }
  }
}

// The same for n rows
template <typename T, int O>
void tiles(const uint8_t *weights, int64_t n_byte, const float *x, int64_t n, int64_t n_in, int64_t a, int64_t b, f8 *to, int64_t stride) {
  int64_t r = 0;
  for (; r + TILE_R <= n; r += TILE_R) tile<T, O, TILE_R>(weights, n_byte, x + r * n_in, n_in, a, b, to + r, stride);
  if (r + 2 == n) tile<T, O, 2>(weights, n_byte, x + r * n_in, n_in, a, b, to + r, stride);
  if (r + 1 == n) tile<T, O, 1>(weights, n_byte, x + r * n_in, n_in, a, b, to + r, stride);
}

void put_sums(const ProductArgs &p, int64_t first, int64_t n, int64_t o, int64_t n_o, const f8 *acc, int64_t stride) {
  for (int64_t r = 0; r < n; r++)
    for (int64_t k = 0; k < n_o; k++) p.y[(first + r) * p.stride + o + k] = result(p, first + r, o + k, sum(acc[k * stride + r]));
}

template <typename T>
void few(const ProductArgs &p, int64_t o, int64_t last) {
  const int64_t n_byte = p.n_in * T::BYTES;
  while (o < last) {
    const int64_t n_o = o + TILE_O <= last ? TILE_O : 1;
    f8 acc[TILE_O * FEW] = {};
    if (n_o == 1) tiles<T, 1>(p.weights + o * n_byte, n_byte, p.x, p.n_row, p.n_in, 0, p.n_in, acc, FEW);
    else tiles<T, TILE_O>(p.weights + o * n_byte, n_byte, p.x, p.n_row, p.n_in, 0, p.n_in, acc, FEW);
    put_sums(p, 0, p.n_row, o, n_o, acc, FEW);
    o += n_o;
  }
}

// Columns a to b of n_o rows of the matrix as f32 [n_o, COLUMNS]
template <typename T>
void to_f32(const ProductArgs &p, int64_t o, int64_t n_o, int64_t a, int64_t b, float *out) {
  for (int64_t k = 0; k < n_o; k++, out += COLUMNS) {
    const uint8_t *row = p.weights + ((o + k) * p.n_in + a) * T::BYTES;
    int64_t i = 0;
    for (; a + i + 8 <= b; i += 8) store(out + i, T::at(row, i));
    for (; a + i < b; i++) out[i] = T::one(row, i);
  }
}

template <typename T>
void many(const ProductArgs &p, int64_t o, int64_t n_o) {
  static thread_local std::vector<float> weights(OUT *COLUMNS);
  static thread_local std::vector<f8> acc(OUT *ROWS);
  constexpr int64_t N_BYTE = COLUMNS * 4;
  for (int64_t r = 0; r < p.n_row; r += ROWS) {
    const int64_t n = std::min(ROWS, p.n_row - r);
    const float *x = p.x + r * p.n_in;
    std::fill(acc.begin(), acc.end(), all(0.0f));
    for (int64_t a = 0; a < p.n_in; a += COLUMNS) {
      const int64_t b = std::min(a + COLUMNS, p.n_in);
      to_f32<T>(p, o, n_o, a, b, weights.data());
      const uint8_t *w = reinterpret_cast<const uint8_t *>(weights.data());
      int64_t k = 0;
      for (; k + TILE_O <= n_o; k += TILE_O) tiles<F32, TILE_O>(w + k * N_BYTE, N_BYTE, x, n, p.n_in, a, b, &acc[k * ROWS], ROWS);
      for (; k < n_o; k++) tiles<F32, 1>(w + k * N_BYTE, N_BYTE, x, n, p.n_in, a, b, &acc[k * ROWS], ROWS);
    }
    put_sums(p, r, n, o, n_o, acc.data(), ROWS);
  }
}

template <typename T>
void product(const ProductArgs &p) {
  if (p.n_row <= FEW) {
    each_range((p.n_out + TILE_O - 1) / TILE_O, 4, [&](int64_t a, int64_t b) { few<T>(p, a * TILE_O, std::min(b * TILE_O, p.n_out)); });
    return;
  }
  each((p.n_out + OUT - 1) / OUT, [&](int64_t k) { many<T>(p, k * OUT, std::min(OUT, p.n_out - k * OUT)); });
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
