// Rows as sequences over the blocks that they chose: cuda/ops/seen_pages/ref.py defines them.
#include "fault.h"
#include "pool.h"

using namespace pyspec;

namespace {

struct SeenPagesArgs {
  const int32_t *chosen;  // [row, top_k]
  const int64_t *page_table, *positions;
  const int32_t *row_seq;
  int64_t *pages, *lo, *hi;
  int32_t *seqs, *starts, *fault;
  int64_t op, n_row, n_seq, n_col, page_size, ratio, of, top_k, n_page;
};

void run_row(const SeenPagesArgs &p, int64_t r) {
  const int64_t seq = p.row_seq[r], each = p.ratio / p.of;
  int64_t *pages = p.pages + r * p.n_page;
  const bool is_real = seq >= 0 && inside(seq, p.n_seq, 0, p.op, p.fault);
  p.lo[r] = p.hi[r] = 0, p.seqs[r] = is_real ? int32_t(r) : -1, p.starts[r + 1] = int32_t(r + 1);
  if (!is_real) {
    for (int64_t i = 0; i < p.n_page; i++) pages[i] = 0;
    return;
  }
  const int64_t *table = p.page_table + seq * p.n_col, at = p.positions[r];
  const auto page = [&](int64_t first) {
    const int64_t col = first / p.page_size;
    return inside(col, p.n_col, seq, p.op, p.fault) ? table[col] * (p.page_size / p.of) + first % p.page_size / p.of : 0;
  };
  const int32_t *chosen = p.chosen + r * p.top_k;
  int64_t n = 0, to = 0;
  while (n < p.top_k && chosen[n] >= 0) n++;
  const int64_t ends = n * p.ratio + (at + 1) % p.ratio;
  for (int64_t i = 0; i <= n && i <= p.top_k; i++) {
    const int64_t block = i < n ? chosen[i] : (at + 1) / p.ratio;
    for (int64_t j = 0; j < each && to * p.of < ends; j++) pages[to++] = page(block * p.ratio + j * p.of);
  }
  const int64_t first = page(0);  // what stands behind a row's last token is never read
  while (to < p.n_page) pages[to++] = first;
  p.hi[r] = ends;
}

}  // namespace

extern "C" void pyspec_seen_pages(const SeenPagesArgs *p) {
  p->starts[0] = 0;
  each_range(p->n_row, 8, [&](int64_t a, int64_t b) {
    for (int64_t r = a; r < b; r++) run_row(*p, r);
  });
}
