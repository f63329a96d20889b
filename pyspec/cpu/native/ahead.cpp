// Rows of a batch one position farther on, as cuda/ops/ahead/ref.py defines it.
#include <cstdint>

struct StepArgs {
  int64_t *positions, *rope_at, *kv_rows, *hi;
  const int64_t *page_table;  // [seq, n_page]
  const int32_t *row_seq;     // -1: padding, which stays
  int64_t n_row, n_page, page_size;
};

extern "C" void pyspec_ahead_step(const StepArgs *p) {
  for (int64_t r = 0; r < p->n_row; r++) {
    if (p->row_seq[r] < 0) continue;
    const int64_t at = ++p->positions[r], page = at / p->page_size, last = p->n_page - 1;
    p->kv_rows[r] = p->page_table[p->row_seq[r] * p->n_page + (page < last ? page : last)] * p->page_size + at % p->page_size;
    p->hi[r]++;
    p->rope_at[r]++;
  }
}
