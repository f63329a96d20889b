// moe: products of rows with the experts that took them. One launch for all gates and ups, one for all downs.
//
//   weights  [expert][tile][chunk][16 rows][record]  u8   each expert as linear_pack.py packs a matrix
//   scales   [expert][n_scale]   f32  second scales of weight rows (ROW_SCALES)
//   shared_weights, shared_scales     the same of the shared expert, cut into n_piece of the others' width
//   x        INNER: [block][step][32] f16, rows.cu's; else [pair][step][32], blocks as below
//   sums     like x, of a block  f32  (HAS_MIN)
//   powers   INNER: [row]; else [pair][step]  f32
//   order    [pair]              i32  pairs by expert (moe_lists): row * n_used + choice; behind those, n_row pairs a piece
//   items    [item]              i32 x 4  {expert, first place in `order`, pairs, 0}
//   y        [pair, n_out]       f32  unless INNER
//   blocks   [pair][n_out / 256, up][256]  f16  INNER: of the activation, a block of 32 columns over a power of two of its
//                                     own; columns in rows.cu's order, what lies past n_out is left alone
//   block_sums, block_powers  [pair][blocks]  f32  INNER: sums of a block's f16 values, and what they are to be multiplied with
//
// Grid (64 weight rows, item). The first items are the shared expert's, of 8 TILES_N rows each; of the others an item has up to
// 8 TILES_N pairs of one expert. The fewest rows go without lists, which cost a launch: moe_few.cu.
//
// A CTA has SPLIT warps for each 16 weight rows: warp k of them multiplies the k-th part of every chunk's blocks (of several
// chunks' where one has too few), and the parts' sums are added in order. That order is the same for all TILES_N, STAGES and
// PER_STAGE, and so a row's bits depend neither on its place nor on its neighbours.
//
// Memory-bound: bytes of the experts in use, once for every 8 TILES_N rows that took one. Weights need the expert alone, so their
// first stages come before it is known which rows they meet, the shared expert's before the predecessor is over; and what the
// stores need is fetched before the sums are made. Gates and ups let the downs start when what rows chose has been written (past
// the first-level cache: a launch that starts early may find there what was chosen before): all but the activations may then be
// fetched beside them. A CTA's gates and ups are whole blocks of the activation: it rounds them for the next launch itself.
//
// Set by the launcher: TYPE, CHUNK, RECORD, TILES_N, SPLIT, PER_STAGE (chunks in a stage), STAGES, RESIDENT (CTAs on a
// multiprocessor that registers must allow), HOLD (pairs of an item: 8 TILES_N), INNER, ACT, and for linear.cuh WARPS_M 4,
// WARPS_N 1, TILES_M 4.
#include "moe.cuh"

constexpr int kEarly = INNER && STAGES > 3 ? 2 : STAGES - 1;  // stages whose weights come before their rows are known
constexpr int kMet = (SPLIT - 1) * kThreads * TILES_N * 16;    // bytes of sums where stages were, before the activation
static_assert(kMet + INNER * kPad * (kColumns + 4) * 4 <= STAGES * kStage, "sums meet where stages were");

struct Item {
  int expert, n;  // the shared expert's pieces come after the others; n pairs, none: nothing to do
};

extern "C" __global__ void __launch_bounds__(kCta, RESIDENT)
    moe(const u8* weights, const float* scales, const u8* shared_weights, const float* shared_scales, const u8* x,
        const float* sums, const float* powers, const int* order, const int4* items, float* y, u16* blocks, float* block_sums,
        float* block_powers, i64 expert_bytes, int n_scale, int n_expert, int n_used, int n_row, int n_piece, int step, int n_out,
        int n_tile16, int n_chunk) {
  if (!INNER) let_successor_start();
  extern __shared__ uint4 stages[];
  __shared__ float power[kPad];
  __shared__ int target[kPad];  // the pair
  const int n_pass = (n_row + kPad - 1) / kPad, n_pair = n_row * n_used;
  const int piece = blockIdx.y / n_pass, first_row = blockIdx.y % n_pass * kPad;
  const bool is_shared = piece < n_piece;
  const int own_item = blockIdx.y - n_piece * n_pass;
  Item item{n_expert + piece, min(n_row - first_row, kPad)};
  int first_place = 0;
  if (!is_shared) {
    if (INNER) wait_for_predecessor();
    const int4 given = __ldcg(items + own_item);
    item = {given.x, given.z}, first_place = given.y;
  }
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, group = warp % WARPS_M, part = warp / WARPS_M;
  const int n_group = min(WARPS_M, n_tile16 - static_cast<int>(blockIdx.x) * WARPS_M);  // of 16 weight rows, the CTA's
  const bool has_sums = part == 0 && group < n_group;
  if (item.n == 0) return;
  const u32 base = shared_address(stages);
  WeightCopies left((is_shared ? shared_weights + piece * expert_bytes : weights + item.expert * expert_bytes), blockIdx.x,
                    n_group, n_tile16, n_chunk);
#pragma unroll
  for (int i = 0; i < kEarly; ++i) left.load(base + i * kStage, n_chunk - i * PER_STAGE);

  const int pair = threadIdx.x / 4 % kPad, own = min(pair, item.n - 1);
  int taken = n_pair + piece * n_row + first_row + own;
  if (!INNER || is_shared) wait_for_predecessor();
  if (!is_shared) taken = __ldcg(order + first_place + own);
  const int row = !INNER ? taken : is_shared ? first_row + own : taken / n_used;
  const i64 block = threadIdx.x / (4 * kPad), at = INNER ? block * step + row : static_cast<i64>(row) * step + block;
  RowCopies right{x + at * 64 + threadIdx.x % 4 * 16, sums + at, powers + at, INNER ? step : 1, pair < item.n};
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) {
    if (i >= kEarly) left.load(base + i * kStage, n_chunk - i * PER_STAGE);
    right.load(base + i * kStage, n_chunk - i * PER_STAGE);
    copies_commit();
  }
  if (INNER) let_successor_start();
  float scale = kUnit, scale8 = kUnit;
#if ROW_SCALES
  if (group < n_group) {
    const float* of = is_shared ? shared_scales + static_cast<i64>(piece) * n_scale
                                : scales + static_cast<i64>(item.expert) * n_scale;
    of += (blockIdx.x * WARPS_M + group) * 16 + (lane >> 2);
    scale *= of[0];
    scale8 *= of[8];
  }
#endif
  if (threadIdx.x < 4 * kPad && threadIdx.x % 4 == 0) {
    if (INNER) power[pair] = powers[row];
    target[pair] = pair < item.n ? taken : -1;
  }

  float acc[TILES_N][4] = {};
  for (int chunk = 0, stage = 0, next = STAGES - 1; chunk < n_chunk; chunk += PER_STAGE) {
    copies_wait<STAGES - 2>();
    __syncthreads();
    const int n_left = n_chunk - chunk - (STAGES - 1) * PER_STAGE;
    if (n_left > 0) {
      left.load(base + next * kStage, n_left);
      right.load(base + next * kStage, n_left);
    }
    copies_commit();
    next = next + 1 == STAGES ? 0 : next + 1;
    add_stage(acc, base + stage * kStage, group, part, n_chunk - chunk);
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }
  __syncthreads();  // stages are read to the end
  add_parts(acc, reinterpret_cast<float4*>(stages), part);
#if INNER
  float* h = reinterpret_cast<float*>(reinterpret_cast<u8*>(stages) + kMet);
  store_blocks(acc, h, [&](int token) { return power[token]; }, target, scale, scale8, group, blockIdx.x, has_sums, n_out,
               blocks, block_sums, block_powers);
#else
  if (!has_sums) return;
  const int column = (blockIdx.x * WARPS_M + group) * 16 + (lane >> 2);
#pragma unroll
  for (int n = 0; n < TILES_N; ++n) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int token = n * 8 + (lane & 3) * 2 + j;
      if (target[token] < 0) continue;
      float* to = y + static_cast<i64>(target[token]) * n_out + column;
      if (column < n_out) to[0] = acc[n][j] * scale;
      if (column + 8 < n_out) to[8] = acc[n][j + 2] * scale8;
    }
  }
#endif
}
