// ring_places: rows and pages of a batch in rings of pages. Meaning: ring_places/ref.py.
//
//   positions  [row]           i64
//   row_seq    [row]           int   -1: padding
//   seq_slot   [place]         int
//   rows       [row]           i64   written
//   pages      [place, n_page] i64   written
//
// A thread a row and a page. Like `angles` it waits for nobody and lets nobody start early, because kernels behind it may read
// rows and pages before they wait for their predecessors.
#include "types.cuh"

constexpr int kThreads = 128;

extern "C" __global__ void __launch_bounds__(kThreads)
    ring_places(const i64* positions, const int* row_seq, const int* seq_slot, i64* rows, i64* pages, i64 null_row, int n_row,
                int n_place, int n_page, int n_ring, int page_size) {
  const i64 at = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
  if (at < n_row) {
    const int seq = row_seq[at];
    const i64 n_seat = static_cast<i64>(n_ring) * page_size;
    rows[at] = seq < 0 || seq >= n_place ? null_row : seq_slot[seq] * n_seat + positions[at] % n_seat;
  }
  if (at < static_cast<i64>(n_place) * n_page) {
    pages[at] = static_cast<i64>(seq_slot[at / n_page]) * n_ring + at % n_page % n_ring;
  }
}
