// Shared by recurrent layers with deferred commit: the sequences of a batch, their cut into pieces of bounded memory, and the convolution
// over a slot's window. The meaning is that of cuda/ops/recurrent/ref.py.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "fault.h"
#include "pool.h"
#include "scratch.h"
#include "sums.h"

namespace pyspec {

constexpr int64_t VERIFY = 0, KEEP = 1, FOLD_ONLY = 2, LATE = 3;  // seq_keep: slots.batch.SeqMode, and fold_only.FOLD_ONLY
constexpr int64_t WIDEST = 512, TAPS_MOST = 8;                    // of a head or a group, and of the convolution
constexpr int64_t PIECE = 256;  // tokens between two loops: 6 MB of 6,144 channels, which stay in L3

struct BatchArgs {
  const int32_t *slot, *start, *fold, *keep;
  int32_t *fault;  // {tripped, op, slot, index, limit}
  int64_t op, n_seq, n_slot, width, n_row;
};

struct ConvArgs {
  const float *m;
  int64_t m_stride;
  const float *w, *bias;  // [taps, channel]; bias may be null
  float *window;          // [slot, taps - 1 + width, channel]
  int64_t taps, n_channel;
};

// A sequence, or a part of the rows of a long kept one.
struct Seq {
  int64_t slot, start, n, mode;
  int64_t fold;         // records that come before its rows
  int64_t record;       // its first row is this record of the slot
  int64_t row, at = 0;  // the first row of this part, and the place of its first token in the piece
  bool ends = true;
  bool keeps() const { return mode == KEEP || mode == FOLD_ONLY; }
  int64_t n_token() const { return fold + n; }
};

// A bad index is reported, and its sequence is skipped: clamping it to a real slot would spoil that slot's state.
inline bool within(int64_t index, int64_t limit, int64_t slot, const BatchArgs &b) {
  return inside(index, limit, slot, b.op, b.fault);
}

// False: nothing to do. A sequence without rows is padding, unless it is there to be folded.
inline bool read_seq(const BatchArgs &b, int64_t s, Seq &q) {
  q = {b.slot[s], b.start[s], int64_t(b.start[s + 1]) - b.start[s], b.keep[s], b.fold[s], 0, 0};
  if (q.n <= 0 && !(q.n == 0 && q.mode == FOLD_ONLY)) return false;
  if (!within(q.slot, b.n_slot, q.slot, b) || !within(q.fold, b.width + 1, q.slot, b)) return false;
  if (q.n == 0) return true;
  if (!within(q.start, b.n_row, q.slot, b) || !within(q.start + q.n - 1, b.n_row, q.slot, b)) return false;
  if (q.mode == LATE) q.record = q.fold;
  return q.mode == KEEP || within(q.record + q.n, b.width + 1, q.slot, b);
}

// All sequences in pieces: of at most PIECE tokens, but those that are recorded stay whole.
class Pieces {
 public:
  explicit Pieces(const BatchArgs &b) : b_(b) {}

  bool next() {
    seqs.clear(), n_token = 0;
    for (; s_ < b_.n_seq; s_++, row_ = 0) {
      Seq q;
      if (!read_seq(b_, s_, q)) continue;
      if (row_ > 0) q.fold = 0;
      const int64_t room = PIECE - n_token - q.fold, left = q.n - row_;
      if (n_token > 0 && room < (q.mode == KEEP ? std::min(left, TAPS_MOST) : left)) return true;
      q.row = row_;
      q.at = n_token;
      q.n = q.mode == KEEP ? std::min(left, std::max(room, TAPS_MOST)) : left;  // the next part looks back at no window
      q.ends = q.n == left;
      seqs.push_back(q);
      n_token += q.n_token();
      if (!q.ends) {
        row_ += q.n;
        return true;
      }
    }
    return !seqs.empty();
  }

  std::vector<Seq> seqs;
  int64_t n_token = 0;

 private:
  const BatchArgs &b_;
  int64_t s_ = 0, row_ = 0;
};

inline void copy(float *to, const float *from, int64_t n) { std::memcpy(to, from, size_t(n) * 4); }

// Values of a row: x[i] are the rows before it and itself, from this channel on. TAPS: their number, if it is known.
template <int TAPS, bool SILU>
inline void convolve_row(const ConvArgs &c, const float *const *x, int64_t first, int64_t n, float *out) {
  const float *w = c.w + first;
  for (int64_t j = 0; j < n; j += 8) {
    f8 y = c.bias == nullptr ? all(0.0f) : load(c.bias + first + j);
    for (int64_t i = 0; i < (TAPS ? TAPS : c.taps); i++) y = fma(load(x[i] + j), load(w + i * c.n_channel + j), y);
    store(out + j, SILU ? silu(y) : y);
  }
}

// out [q.n, n]: silu, unless SILU is false, of the convolution over `n` channels, a multiple of 8, of the sequence's rows. Moves the window, keeps raw rows.
template <bool SILU = true>
inline void convolve(const ConvArgs &c, int64_t width, const Seq &q, int64_t first, int64_t n, float *out) {
  const int64_t back = c.taps - 1;
  float *own = c.window + q.slot * (back + width) * c.n_channel + first;
  float old[(TAPS_MOST - 1) * WIDEST];
  for (int64_t i = 0; i < back && q.row == 0; i++) copy(old + i * n, own + (q.fold + i) * c.n_channel, n);
  const auto row = [&](int64_t t) { return t < 0 ? old + (t + back) * n : c.m + (q.start + t) * c.m_stride + first; };
  for (int64_t t = 0; t < q.n; t++) {
    const float *x[TAPS_MOST];
    for (int64_t i = 0; i < c.taps; i++) x[i] = row(q.row + t - back + i);
    if (c.taps == 4) convolve_row<4, SILU>(c, x, first, n, out + t * n);
    else convolve_row<0, SILU>(c, x, first, n, out + t * n);
  }
  if (q.keeps()) {
    for (int64_t i = 0; i < back && q.ends; i++) copy(own + i * c.n_channel, row(q.row + q.n - back + i), n);
    return;
  }
  for (int64_t i = 0; i < back && q.mode == VERIFY && q.fold > 0; i++) copy(own + i * c.n_channel, old + i * n, n);
  for (int64_t t = 0; t < q.n; t++) copy(own + (back + q.record + t) * c.n_channel, row(t), n);
}

// The tokens of a sequence in the piece, of one head or group among `n_head`: its records, then its rows, which are recorded if they are
// not kept. record [slot, width, n_head, n]; tokens [token of the piece, n], the rows are there already.
inline void join_records(float *record, int64_t width, int64_t n_head, const Seq &q, int64_t head, int64_t n, float *tokens) {
  float *own = record + (q.slot * width * n_head + head) * n;
  float *here = tokens + q.at * n;
  for (int64_t t = 0; t < q.fold; t++) copy(here + t * n, own + t * n_head * n, n);
  for (int64_t t = 0; t < q.n && !q.keeps(); t++) copy(own + (q.record + t) * n_head * n, here + (q.fold + t) * n, n);
}

// Rows behind the last sequence's, a bucket's padding, are nobody's. The next kernel reads them all the same: zeros.
inline void clear_rest(const BatchArgs &b, float *out, int64_t n_out) {
  const int64_t first = std::clamp<int64_t>(b.start[b.n_seq], 0, b.n_row);
  std::memset(out + first * n_out, 0, size_t(b.n_row - first) * size_t(n_out) * 4);
}

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

}  // namespace pyspec
