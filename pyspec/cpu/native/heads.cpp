// Each head's part of the rows times a matrix of its own (cuda/ops/heads/ref.py), from the bytes of the file: rows as whole numbers, then the
// outputs of all heads as one loop. A result's bits depend on its row and the matrix alone.
#include <algorithm>

#include "linear.h"
#include "pool.h"
#include "scratch.h"

using namespace pyspec;

namespace {

constexpr int64_t MOST = 4096;  // heads of rows between the loops
constexpr int64_t N_OUT = 64;   // of a task at most

struct HeadsArgs {
  const float *x;  // [row, head, n_in], strided
  const uint8_t *weights;
  const void *table;
  float *y;  // [row, head, n_out]
  int64_t row_step, head_step, type, n_row, n_head, n_in, n_out, head_bytes;
};

// Memory between the loops. Rows of a head lie together.
struct Room {
  float *x, *scales, *sums;
  int16_t *q;
  Room(int64_t n, int64_t n_in, int64_t n_chunk) {
    float *from = scratch(n * (n_in + n_chunk * (1 + N_SUM + CHUNK / 2)));
    x = from, scales = x + n * n_in, sums = scales + n * n_chunk, q = reinterpret_cast<int16_t *>(sums + n * n_chunk * N_SUM);
  }
};

void run(const HeadsArgs &p) {
  const int64_t n_chunk = (p.n_in + CHUNK - 1) / CHUNK, n = p.n_row * p.n_head;
  const bool plain = is_plain(p.type);
  const Room room(n, p.n_in, n_chunk);
  each_range(n, 4, [&](int64_t a, int64_t b) {
    for (int64_t i = a; i < b; i++) {
      const float *from = p.x + i % p.n_row * p.row_step + i / p.n_row * p.head_step;
      if (plain) std::memcpy(room.x + i * p.n_in, from, size_t(p.n_in) * 4);
      for (int64_t c = 0; c < n_chunk && !plain; c++) {
        const int64_t at = i * n_chunk + c, left = std::min<int64_t>(CHUNK, p.n_in - c * CHUNK);
        quantise(from + c * CHUNK, int(left), room.q + at * CHUNK, room.scales + at, room.sums + at * N_SUM);
      }
    }
  });
  const int64_t n_panel = p.n_head * ((p.n_out + LANES - 1) / LANES);
  const int64_t size = std::clamp<int64_t>(n_panel / (8 * n_thread) / 2, 1, N_OUT / (2 * LANES)) * 2 * LANES;
  const int64_t n_part = (p.n_out + size - 1) / size;
  each(p.n_head * n_part, [&](int64_t i) {
    const int64_t h = i / n_part, o = i % n_part * size, first = h * p.n_row;
    ProductArgs own{};
    own.weights = p.weights + h * p.head_bytes, own.table = p.table, own.type = p.type, own.scale = 1.0;
    own.y = p.y + h * p.n_out, own.n_in = p.n_in, own.n_out = p.n_out, own.stride = p.n_head * p.n_out;
    const Rows rows{room.x + first * p.n_in, room.q + first * n_chunk * CHUNK, room.scales + first * n_chunk,
                    room.sums + first * n_chunk * N_SUM, p.n_in, n_chunk};
    product_part(own, rows, {0, p.n_row, o, std::min(o + size, p.n_out)});
  });
}

}  // namespace

extern "C" void pyspec_heads(const HeadsArgs *args) {
  const int64_t step = std::max<int64_t>(1, MOST / args->n_head);
  for (int64_t first = 0; first < args->n_row; first += step) {
    HeadsArgs p = *args;
    p.n_row = std::min(step, p.n_row - first);
    p.x += first * p.row_step, p.y += first * p.n_head * p.n_out;
    run(p);
  }
}
