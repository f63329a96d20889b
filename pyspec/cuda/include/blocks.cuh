// Rows that stand for several tokens each: how many a token sees, and where they are. A block's row stands in the page of its last token.
#pragma once
#include "types.cuh"
#include "bounds.cuh"

struct Blocks {
  const i64* table;  // [seq, n_col] pages
  int n_col, page_size, ratio, per_page, n_page;  // per_page: rows of one page

  // Blocks that are complete with the token at `position`; 0 and a report if there are no pages for them.
  __device__ __forceinline__ int seen(i64 position, int op, int seq, int* fault) const {
    const i64 most = static_cast<i64>(n_col) * page_size, limit = most < 0x7fffffff ? most : 0x7fffffff;
    const int at = position < 0 || position > 0x7fffffff ? -1 : static_cast<int>(position);
    if (clamped(at, static_cast<int>(limit), op, seq, fault) != at) return 0;
    return (at + 1) / ratio;
  }

  // The row of block j of a sequence.
  __device__ __forceinline__ i64 row(int seq, int j, int op, int* fault) const {
    const int last = ratio * (j + 1) - 1, col = last / page_size;
    const i64 page = table[static_cast<i64>(seq) * n_col + min(col, n_col - 1)];
    const int safe = clamped(page < 0 || page > 0x7fffffff ? -1 : static_cast<int>(page), n_page, op, seq, fault);
    return static_cast<i64>(safe) * per_page + (last - col * page_size) / ratio;
  }
};
