// linear: y = x W^T for packed quantised weights and few rows; the weights stream through once.
//
//   weights   [tile][chunk][16 rows][record]  u8   linear_pack.py; a tile is 256 output rows; behind them
//                                                  a scale for each row, f32, for types that have one
//   x         [block][PAD][32]                f16  linear_rows.cu: rows over a power of two, blocks of 32 columns
//   sums      [block][PAD]                    f32  sums over the 32 columns (read for types with minima only)
//   powers    [PAD]                           f32  the rows' powers of two
//   residual  [row, n_out]                    f32  added when EPILOGUE == RESIDUAL; may be `out`
//   out       [row, n_out]                    f32  rows below n_row are written; silu(gate) * up halves n_out
//   partial   [2 grid][256 PAD]               f32  sums of tiles that several CTAs share
//   tickets   [n_tile][warps]                 i32  zero before and after
//
// Swapped operands: weight rows are the M of m16n8k16, tokens its N. Work is the line of all (tile, chunk) units, cut
// into gridDim.x equal runs; a run's share of a tile it does not finish alone goes through `partial`, and the last
// warp to arrive adds the shares in the order of the columns. Order and cuts do not depend on the number of rows, so a
// row's result has the same bits whatever runs beside it.
//
// Memory-bound up to about 64 rows: bytes of the weights. Set by the launcher: TYPE, CHUNK, RECORD, WARPS_M, WARPS_N,
// TILES_M (16-row tiles of a warp), TILES_N (8-token tiles of a warp), STAGES, EPILOGUE; PART_TILES where every so many tiles
// are a matrix of their own, for its part of x: then x has the blocks of all parts, one after the other. HANDS_POWER where the product goes
// to the next one's rows (linear_block.cuh): then `out` is their blocks, and `residual` their powers.
#include "linear.cuh"

__device__ __forceinline__ void load_stage(u32 to, const u8* weights, const u16* x, const float* sums, Shape s, int tile,
                                           int chunk) {
  const int n16 = min(kTile, s.n_tile16 - tile * kTile);
  const u8* from = weights + (static_cast<i64>(tile) * kTile * s.n_chunk + static_cast<i64>(chunk) * n16) * RECORD;
  const int n_weight = n16 * (RECORD / 16), own = chunk_of_rows(tile, chunk, s.n_chunk);
#pragma unroll
  for (int i = threadIdx.x; i < kWeightBytes / 16; i += kThreads)
    if (i < n_weight) copy16(to + i * 16, from + i * 16);
  const u8* rows = reinterpret_cast<const u8*>(x) + static_cast<i64>(own) * kRowBytes;
#pragma unroll
  for (int i = threadIdx.x; i < kRowBytes / 16; i += kThreads) copy16(to + kWeightBytes + i * 16, rows + i * 16);
  const u8* block_sums = reinterpret_cast<const u8*>(sums) + static_cast<i64>(own) * kSumBytes;
#pragma unroll
  for (int i = threadIdx.x; i < kSumBytes / 16; i += kThreads)
    copy16(to + kWeightBytes + kRowBytes + i * 16, block_sums + i * 16);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    linear(const u8* __restrict__ weights, const u16* __restrict__ x, const float* __restrict__ sums,
           const float* __restrict__ powers, const float* residual, float* out, float* partial, int* tickets, int n_row,
           int n_out, int n_tile16, int n_chunk, int) {
  extern __shared__ uint4 stages[];
  const u32 base = shared_address(stages);
  const Shape s{n_row, n_out, n_tile16, n_chunk};
  const i64 total = static_cast<i64>((n_tile16 + kTile - 1) / kTile) * n_chunk;
  const int grid = gridDim.x, cta = blockIdx.x;
  const int begin = static_cast<int>(total * cta / grid), end = static_cast<int>(total * (cta + 1) / grid);

  int next = begin, next_tile = begin / n_chunk, next_chunk = begin % n_chunk, next_stage = 0;
  auto load_next = [&] {
    if (next < end) {
      load_stage(base + next_stage * kStageBytes, weights, x, sums, s, next_tile, next_chunk);
      next_stage = next_stage + 1 == STAGES ? 0 : next_stage + 1;
      ++next;
      if (++next_chunk == n_chunk) {
        next_chunk = 0;
        ++next_tile;
      }
    }
    copies_commit();
  };
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) load_next();

  Accumulator acc;
  clear(acc);
  int tile = begin / n_chunk, chunk = begin % n_chunk, stage = 0, run = begin;
  for (int unit = begin; unit < end; ++unit) {
    copies_wait<STAGES - 2>();
    __syncthreads();
    load_next();
    const u32 from = base + stage * kStageBytes;
#pragma unroll 2
    for (int block = 0; block < CHUNK; ++block) {
      Left left;
      Right right;
      fetch(left, from, block);
      fetch(right, from, block);
      multiply(acc, left, right);
    }
    stage = stage + 1 == STAGES ? 0 : stage + 1;
    if (++chunk < n_chunk && unit + 1 < end) continue;

    const Sharers who = sharers(tile, n_chunk, total, grid);
    finish(acc, s, tile, who, 2 * cta + (run != begin), weights, powers, residual, out, partial, tickets);
    clear(acc);
    run = unit + 1;
    chunk = 0;
    ++tile;
  }
}
