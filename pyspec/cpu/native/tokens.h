// The tokens of a batch as kernels read them (slots/batch.py), rings of the tokens before (slots/ring.py), and rows of several tokens in a pool.
#pragma once
#include <algorithm>
#include <cmath>

#include "fault.h"
#include "kv.h"
#include "pool.h"
#include "prep.h"
#include "scratch.h"

namespace pyspec {

struct TokensArgs {
  const int64_t *positions, *kv_rows, *page_table;
  const int32_t *row_seq, *seq_start, *seq_slot;
  int32_t *fault;
  int64_t op, n_row, n_seq, n_col, page_size;
};

struct Token {
  int64_t seq, at, slot;     // at: its position
  int64_t row, first, last;  // its sequence's first row; positions of that one and of the last one
};

// False: padding, or a sequence whose numbers are wrong, which is reported.
inline bool read_token(const TokensArgs &b, int64_t r, int64_t n_slot, Token &t) {
  const int64_t seq = b.row_seq[r];
  if (seq < 0 || !inside(seq, b.n_seq, 0, b.op, b.fault)) return false;
  const int64_t row = b.seq_start[seq], end = b.seq_start[seq + 1];
  t = {seq, b.positions[r], b.seq_slot[seq], row, 0, 0};
  if (!inside(t.slot, n_slot, seq, b.op, b.fault) || !inside(row, r + 1, seq, b.op, b.fault)) return false;
  if (end <= r || !inside(end - 1, b.n_row, seq, b.op, b.fault)) return false;
  t.first = t.at - (r - row), t.last = t.first + (end - row) - 1;
  return inside(t.first, INT64_MAX, seq, b.op, b.fault);
}

// Rows [slot, n_row, width] of a ring, and rows of the batch with `stride` columns from one to the next.
struct Kept {
  float *ring;
  const float *batch;
  int64_t n_ring, width, stride;
  float *place(const Token &t, int64_t at) const { return ring + (t.slot * n_ring + at % n_ring) * width; }
  // That of the token's sequence at this position: of the batch, or of the ring
  const float *row(const Token &t, int64_t at) const {
    return at >= t.first ? batch + (t.row + at - t.first) * stride : place(t, at);
  }
  // The token's own row into the ring, where a later one of the batch does not take its place
  void keep(const Token &t) const {
    if (t.at + n_ring > t.last) std::memcpy(place(t, t.at), row(t, t.at), size_t(width) * 4);
  }
};

// Rows of a pool with one head that stand for `ratio` tokens each.
struct PoolArgs {
  void *k;
  uint16_t *scale;
  int64_t n_row, per_page, kind, dim, ratio;
  char *row(int64_t i) const { return static_cast<char *>(k) + i * head_bytes(kind, dim); }
  uint16_t *factors(int64_t i) const { return scale ? scale + i * head_factors(kind, dim) : nullptr; }
};

// The row of a sequence's block, or -1, reported.
inline int64_t block_row(const TokensArgs &b, const PoolArgs &p, int64_t seq, int64_t block) {
  const int64_t last = p.ratio * (block + 1) - 1, col = last / b.page_size;
  if (!inside(col, b.n_col, seq, b.op, b.fault)) return -1;
  const int64_t row = b.page_table[seq * b.n_col + col] * p.per_page + last % b.page_size / p.ratio;
  return inside(row, p.n_row, seq, b.op, b.fault) ? row : -1;
}

// Pairs of the last n_rot dims of each head turned by at * freq. sign -1 turns back.
inline void turn_tails(float *x, int64_t n_head, int64_t dim, int64_t n_rot, int64_t at, const double *freq, double sign) {
  for (int64_t i = 0; i < n_rot / 2; i++) {
    const double angle = double(at) * freq[i];
    const float c = float(std::cos(angle)), s = float(sign * std::sin(angle));
    float *pair = x + dim - n_rot + 2 * i;
    for (int64_t h = 0; h < n_head; h++, pair += dim) {
      const float a = pair[0], b = pair[1];
      pair[0] = a * c - b * s, pair[1] = a * s + b * c;
    }
  }
}

}  // namespace pyspec
