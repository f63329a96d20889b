// What the product behind a kernel reads, on its way to L2: a kernel that hands few rows on leaves memory idle for some
// microseconds, in which the product can not start for want of shared memory.
#pragma once
#include "bulk.cuh"

struct Prefetch {
  const u8* weights;
  i64 share;             // bytes of a CTA of the product
  int n_share, n_piece;  // CTAs; pieces that each begins with, 0: nothing is fetched

  // One of n_thread threads' part.
  __device__ __forceinline__ void fetch(int thread, int n_thread) const {
    constexpr int kPiece = 2048;
    for (int i = thread; i < n_share * n_piece; i += n_thread)
      bulk_prefetch(weights + i / n_piece * share + i % n_piece * kPiece, kPiece);
  }
};
