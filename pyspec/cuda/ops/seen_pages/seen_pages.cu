// seen_pages: pages of what each row sees of chosen blocks. Meaning: seen_pages/ref.py.
//
//   chosen      [row, top_k]   int    blocks of `ratio` tokens, ascending, -1 behind the last
//   page_table  [seq, n_col]   i64    of pages of `page_size` tokens
//   positions   [row]          i64
//   row_seq     [row]          int    -1: padding
//   pages       [row, n_page]  i64    written: pages of `of` tokens
//   lo, hi      [row]          i64    written
//   own_seq     [row]          int    written: the row's number, -1 for padding
//   fault       [5]            int    see bounds.cuh
//
// Grid (row), a thread for every THREADS'th page. It lets nobody start early: kernels behind it read a batch's layout before they wait.
// Macro: OP_ID.
#include "bounds.cuh"
#include "overlap.cuh"
#include "types.cuh"

constexpr int THREADS = 128;

extern "C" __global__ void __launch_bounds__(THREADS)
seen_pages(const int* chosen, const i64* page_table, const i64* positions, const int* row_seq, i64* pages, i64* lo, i64* hi, int* own_seq,
           int* fault, int n_seq, int n_col, int page_size, int ratio, int of, int top_k, int n_page, int n_row) {
  __shared__ int n_own;
  const int row = blockIdx.x, seq = row_seq[row], each = ratio / of;
  const bool is_real = seq >= 0 && seq < n_seq;
  if (threadIdx.x == 0) n_own = 0;
  __syncthreads();
  wait_for_predecessor();
  const int* own = chosen + static_cast<i64>(row) * top_k;
  for (int i = threadIdx.x; i < top_k; i += THREADS)
    if (is_real && own[i] >= 0 && (i + 1 == top_k || own[i + 1] < 0)) n_own = i + 1;
  __syncthreads();
  const i64 at = positions[row], end = is_real ? static_cast<i64>(n_own) * ratio + (at + 1) % ratio : 0;
  if (threadIdx.x == 0) {
    lo[row] = 0;
    hi[row] = end;
    own_seq[row] = is_real ? row : -1;
  }
  for (int i = threadIdx.x; i < n_page; i += THREADS) {
    i64 first = 0;
    if (static_cast<i64>(i) * of < end) {
      const i64 block = i / each < n_own ? own[i / each] : (at + 1) / ratio;
      first = block * ratio + i % each * of;
    }
    const i64 col = first / page_size;
    const int safe = clamped(col > 0x7fffffff ? -1 : static_cast<int>(col), n_col, OP_ID, seq, fault);
    pages[static_cast<i64>(row) * n_page + i] =
        is_real ? page_table[static_cast<i64>(seq) * n_col + safe] * (page_size / of) + first % page_size / of : 0;
  }
}
