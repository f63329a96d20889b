// Rows and pages of a batch in rings of pages, as cuda/ops/ring_places/ref.py defines them.
#include <cstdint>

struct RingPlacesArgs {
  const int64_t *positions;             // [row]
  const int32_t *row_seq, *seq_slot;    // [row] -1: padding; [place]
  int64_t *rows, *pages;                // [row], [place, n_page] written
  int64_t n_row, n_place, n_page, n_ring, page_size, null_row;
};

extern "C" void pyspec_ring_places(const RingPlacesArgs *p) {
  const int64_t n_seat = p->n_ring * p->page_size;
  for (int64_t r = 0; r < p->n_row; r++) {
    const int32_t seq = p->row_seq[r];
    p->rows[r] = seq < 0 ? p->null_row : p->seq_slot[seq] * n_seat + p->positions[r] % n_seat;
  }
  for (int64_t s = 0; s < p->n_place; s++) {
    const int64_t first = p->seq_slot[s] * p->n_ring;
    int64_t *to = p->pages + s * p->n_page;
    for (int64_t i = 0, at = 0; i < p->n_page; i++, at = at + 1 == p->n_ring ? 0 : at + 1) to[i] = first + at;
  }
}
