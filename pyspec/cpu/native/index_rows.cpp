// The compressed rows that a token attends to: cuda/ops/index_rows/ref.py defines them. A score is one chain of sums over columns, then over
// heads, so a row's choice depends on itself alone.
#include <functional>
#include <vector>

#include "attend_tiles.h"
#include "tokens.h"

using namespace pyspec;

namespace {

constexpr int64_t HEADS = 8;       // whose scores are made at once
constexpr int64_t STEP = 256;      // keys of a task
constexpr int64_t MOST = 1024;     // columns of a key
constexpr int64_t ROOM = 4 << 20;  // scores between the loops

struct IndexArgs {
  const float *q, *w;  // [row, head, dim]; [row, head], strided, or null for ones
  const double *freq;
  int32_t *out;
  TokensArgs rows;
  PoolArgs pool;
  int64_t q_step, w_step, n_head, top_k, n_rot;
};

struct Row {
  int64_t seq = -1, n = 0, at = 0;  // n: blocks that it sees
};

Row read_row(const IndexArgs &p, int64_t r) {
  const int64_t seq = p.rows.row_seq[r];
  if (seq < 0 || !inside(seq, p.rows.n_seq, 0, p.rows.op, p.rows.fault)) return {};
  const int64_t at = p.rows.positions[r], n = (at + 1) / p.pool.ratio;
  if (n && !inside(p.pool.ratio * n - 1, p.rows.n_col * p.rows.page_size, seq, p.rows.op, p.rows.fault)) return {};
  return {seq, n, at};
}

// A row's queries turned, with zeros up to whole HEADS.
void turned(const IndexArgs &p, int64_t r, int64_t at, float *to) {
  const int64_t dim = p.pool.dim, n_head = (p.n_head + HEADS - 1) / HEADS * HEADS;
  std::memcpy(to, p.q + r * p.q_step, size_t(p.n_head * dim) * 4);
  std::memset(to + p.n_head * dim, 0, size_t((n_head - p.n_head) * dim) * 4);
  turn_tails(to, p.n_head, dim, p.n_rot, at, p.freq, 1.0);
}

template <typename T>
float score_of(const IndexArgs &p, const float *q, const float *w, const T *key) {
  f8 total = {};
  for (int64_t h = 0; h < p.n_head; h += HEADS) {
    float s[HEADS];
    score<HEADS>(q + h * p.pool.dim, &key, p.pool.dim, s, 1);
    total = fma(max(load(s), all(0.0f)), load(w + h), total);
  }
  return sum(total) + 0.0f;  // no minus zero
}

void score_keys(const IndexArgs &p, const Row &row, const float *q, const float *w, int64_t first, int64_t last, float *to) {
  alignas(32) float key[MOST];
  for (int64_t block = first; block < last; block++) {
    const int64_t at = block_row(p.rows, p.pool, row.seq, block);
    if (at < 0) { to[block] = -__builtin_inff(); continue; }
    const char *codes = p.pool.row(at);
    if (p.pool.kind == KV_F16) to[block] = score_of(p, q, w, reinterpret_cast<const Half *>(codes));
    else if (p.pool.kind == KV_BF16) to[block] = score_of(p, q, w, reinterpret_cast<const Bf16 *>(codes));
    else {
      unpack_row(p.pool.kind, codes, p.pool.factors(at), key, p.pool.dim);
      to[block] = score_of(p, q, w, static_cast<const float *>(key));
    }
  }
}

// Numbers in the order of scores; one that is not a number is the largest.
uint32_t ordered(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  if (x != x) return 0xffffffffu;
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}

// The best top_k of n scores, ascending; the earlier of equal ones.
void choose(const float *scores, int64_t n, int64_t top_k, int32_t *out) {
  static thread_local std::vector<uint32_t> kept;
  kept.resize(size_t(n));
  for (int64_t i = 0; i < n; i++) kept[size_t(i)] = ordered(scores[i]);
  std::nth_element(kept.begin(), kept.begin() + (top_k - 1), kept.end(), std::greater<>());
  const uint32_t least = kept[size_t(top_k - 1)];
  int64_t equal = std::count(kept.begin(), kept.begin() + top_k, least);
  for (int64_t i = 0, at = 0; i < n && at < top_k; i++) {
    const uint32_t own = ordered(scores[i]);
    if (own > least || (own == least && equal-- > 0)) out[at++] = int32_t(i);
  }
}

// Rows first..last-1, of which each sees up to n_most blocks.
void run(const IndexArgs &p, int64_t first, int64_t last, int64_t n_most) {
  const int64_t n = last - first, dim = p.pool.dim, n_head = (p.n_head + HEADS - 1) / HEADS * HEADS;
  float *q = scratch(n * (n_head * (dim + 1) + n_most)), *w = q + n * n_head * dim, *scores = w + n * n_head;
  each_range(n, 1, [&](int64_t a, int64_t b) {
    for (int64_t i = a; i < b; i++) {
      const int64_t r = first + i;
      const Row row = read_row(p, r);
      int32_t *out = p.out + r * p.top_k;
      if (row.n <= p.top_k) {
        for (int64_t j = 0; j < p.top_k; j++) out[j] = j < row.n ? int32_t(j) : -1;
        continue;
      }
      float *own = w + i * n_head;
      for (int64_t h = 0; h < n_head; h++) own[h] = h >= p.n_head ? 0.0f : p.w ? p.w[r * p.w_step + h] : 1.0f;
      turned(p, r, row.at, q + i * n_head * dim);
    }
  });
  const int64_t n_part = (n_most + STEP - 1) / STEP;
  each(n * n_part, [&](int64_t unit) {
    const int64_t i = unit / n_part, from = unit % n_part * STEP;
    const Row row = read_row(p, first + i);
    if (row.n <= p.top_k || from >= row.n) return;
    score_keys(p, row, q + i * n_head * dim, w + i * n_head, from, std::min(from + STEP, row.n), scores + i * n_most);
  });
  each(n, [&](int64_t i) {
    const Row row = read_row(p, first + i);
    if (row.n > p.top_k) choose(scores + i * n_most, row.n, p.top_k, p.out + (first + i) * p.top_k);
  });
}

}  // namespace

extern "C" void pyspec_index_rows(const IndexArgs *p) {
  const int64_t n_row = p->rows.n_row;
  int64_t n_most = 1;
  for (int64_t r = 0; r < n_row; r++) n_most = std::max(n_most, read_row(*p, r).n);
  if (n_most <= p->top_k) n_most = 1;
  const int64_t step = std::max<int64_t>(1, ROOM / n_most);
  for (int64_t first = 0; first < n_row; first += step) run(*p, first, std::min(first + step, n_row), n_most);
}
