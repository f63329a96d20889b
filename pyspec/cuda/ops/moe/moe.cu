// moe: products of rows with the experts that took them. One launch for all gates and ups, one for all downs.
//
//   weights  [expert][tile][chunk][16 rows][record]  u8   each expert as linear_pack.py packs a matrix
//   scales   [expert][n_scale]   f32  second scales of weight rows (ROW_SCALES)
//   shared_weights, shared_scales     the same of the shared expert, cut into n_piece of the others' width
//   x        INNER: [block][step][32] f16, rows.cu's; else [pair][step][32], blocks as below
//   sums     like x, of a block  f32  (HAS_MIN)
//   powers   INNER: [row]; else [pair][step]  f32
//            PLANES: x is [row, or pair][unit of 64 columns][144 or (PLANES 2) 160] u8, whole numbers with sums and powers
//            (prepared.cuh; PLANES 2: halved); no others
//   ids      [row, n_used]       i32  the experts of a row (-1: none, whose output is not written): pair = row * n_used + choice; behind
//                                     those, n_row pairs a piece
//   order    [pair]              i32  LISTED: pairs by expert (moe_lists)
//   items    [item]              i32 x 4  LISTED: {expert, first place in `order`, pairs, 0}
//   biases   [expert][tile16][16]  f32  BIASED: what is added to an expert's products, in the order of its weight rows
//   y        [pair, n_out]       f32  unless INNER
//   out      [row, n_out]        f32  ADDS: the sums of expert_sums.cuh, where the other tensors stand; `shared` is y's pieces,
//                                     or given; tickets [n_out / 16, up] i32 are zero before and after
//   blocks   [pair][n_out / 256, up][256]  f16  INNER: of the activation, a block of 32 columns over a power of two of its
//                                     own; columns in rows.cu's order, what lies past n_out is left alone. NEXT_PLANES: as x
//   block_sums, block_powers  [pair][blocks]  f32  INNER: sums of a block's f16 values, and what they are to be multiplied with
//
// Grid (64 weight rows, item). The first items are the shared expert's, of kPad rows each. Of the others, LISTED or not,
// an item has up to kPad pairs (TILES_N of TILE_ROWS). Without lists, which cost a launch, there is a CTA for each pair: it looks for
// the others that took the same expert, and ends unless it is the first of them, or the first after kPad others.
//
// A warp has 16 weight rows and all their columns (SPLIT 2: or half of them), block after block: the order of sums is the same for all
// TILES_N, STAGES, PER_STAGE and SPLIT, and so a row's bits depend neither on its place nor on its neighbours.
//
// Memory-bound: bytes of the experts in use, once for every kPad rows that took one. With few rows a CTA's work is
// short and latency is what there is to hide: weights need the expert alone, so their first stages come before it is known
// which rows they meet, the shared expert's before the predecessor is over; and what the stores need is fetched before the
// sums are made. Gates and ups let the downs start when what rows chose has been written (past the first-level cache: a launch
// that starts early may find there what was chosen before): all but the activations may then be fetched beside them. A CTA's gates and
// ups are whole blocks of the activation: it rounds them for the next launch itself. What experts gave a row is summed by the
// launch after, or (ADDS: downs of the fewest rows) in the order of choice by the last warp to have its share of 16 columns.
//
// How products are made and what a warp waits for: expert_planes.cuh (PLANES) or expert_products.cuh with expert_copies.cuh.
//
// Set by the launcher: TYPE, CHUNK, RECORD, TILES_N, TILE_ROWS, PER_STAGE (chunks in a stage), STAGES, RESIDENT (CTAs on a
// multiprocessor that registers must allow), LISTED, INNER, ADDS, ACT, PLANES, NEXT_PLANES, and for linear.cuh WARPS_M 4, WARPS_N 1,
// TILES_M 4. PARTS, and SPLIT with twice as many warps: see expert_planes.cuh. LIMIT where there is one: gates are cut at it before
// silu, ups at plus and minus it. BIASED, which no shared expert is.
#ifndef PARTS
#define PARTS 1
#endif
#ifndef SPLIT
#define SPLIT 1
#endif
#include "linear.cuh"
#include "expert_sums.cuh"
#include "overlap.cuh"
#include "prepared.cuh"
#if INT_SCALES
#include "int_scales.cuh"
#endif

#define NONE 0
#define SWIGLU 1  // rows 0-7 of each 16 are gates, 8-15 the ups of the same features
#define RELU2 2
#define GEGLU 3  // rows as of SWIGLU
#define OAI 4    // so, too
#define SITU 5   // and so, with BETA and LINEAR_BETA
#ifndef BETA
#define BETA 1.f
#define LINEAR_BETA 0.f
#endif
#ifndef BIASED
#define BIASED 0
#endif

constexpr int kBlock = SPLIT * kThreads;
constexpr bool kGated = ACT != NONE && ACT != RELU2;
constexpr int kColumns = WARPS_M * (kGated ? 8 : 16);  // of the activation, a CTA's
static_assert(!INNER || kColumns % 32 == 0, "a CTA has whole blocks of the activation");

// A CTA's records of an expert: the first chunk's, and bytes from one chunk's to the next one's.
struct Records {
  const u8* first;
  int step;

  __device__ __forceinline__ Records(const u8* expert, int n_tile16, int n_chunk) {
    const int own = blockIdx.x * WARPS_M, tile = own / kTile;
    first = expert + (static_cast<i64>(tile * kTile) * n_chunk + own % kTile) * RECORD;
    step = min(kTile, n_tile16 - tile * kTile) * RECORD;
  }
};

#if PLANES
#include "expert_planes.cuh"
#else
#include "expert_products.cuh"
#include "expert_copies.cuh"
#endif

static_assert(INNER * kPad * (kColumns + 4) * 4 <= STAGES * kStage, "the activation lies where stages were");

struct Item {
  int expert, n;  // the shared expert's pieces come after the others; n pairs, none: nothing to do
};

// pair / n_used: exact for pairs below 2^17, and quicker than a division of integers.
__device__ __forceinline__ int row_of(int pair, int n_used) {
  return static_cast<int>((static_cast<float>(pair) + 0.5f) * __fdividef(1.f, static_cast<float>(n_used)));
}

constexpr int kNone = -1;  // of a pair that takes no expert: its y is not written

__device__ __forceinline__ int expert_of(int id, int n_expert) { return id == kNone ? kNone : min(max(id, 0), n_expert - 1); }

// Every warp finds the pairs that took the expert of `pair`, from it on, at most kPad, and writes them down for itself. Of one
// row all pairs are looked at apart: no expert is taken twice.
__device__ __forceinline__ Item find_pairs(const int* ids, int pair, int n_pair, int n_row, int n_expert, int* found) {
  constexpr int kBatch = 8;  // loads of a lane under way
  const int lane = threadIdx.x & 31, expert = expert_of(__ldcg(ids + pair), n_expert);
  if (n_row == 1) {
    if (lane == 0) found[0] = pair;
    __syncwarp();
    return {expert, expert != kNone};
  }
  if (expert == kNone) return {expert, 0};
  int n_before = 0, n = 0;
#pragma unroll 1
  for (int first = 0; first < n_pair; first += 32 * kBatch) {
    int own[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      const int at = first + 32 * k + lane;
      own[k] = at < n_pair ? expert_of(__ldcg(ids + at), n_expert) : kNone;
    }
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      const int start = first + 32 * k;
      if (start >= n_pair) break;
      const u32 same = __ballot_sync(0xffffffffu, own[k] == expert);
      if (same == 0) continue;
      const u32 before = pair <= start ? 0u : pair - start >= 32 ? 0xffffffffu : (1u << (pair - start)) - 1;
      const u32 here = same & ~before;
      const int place = n + __popc(here & ((1u << lane) - 1));
      if ((here >> lane & 1) && place < kPad) found[place] = start + lane;
      n_before += __popc(same & before);
      n += __popc(here);
    }
  }
  __syncwarp();
  return {expert, n_before % kPad ? 0 : min(n, kPad)};
}

// Of a gate and its up.
__device__ __forceinline__ float activated(float gate, float up) {
  if (ACT == SITU) {
    if (LINEAR_BETA > 0.f) up = LINEAR_BETA * tanhf(up / LINEAR_BETA);
    return BETA * tanhf(gate / BETA) / (1.f + __expf(-gate)) * up;
  }
  gate = cut_gate(gate), up = cut_up(up);
  if (ACT == OAI) return gate / (1.f + __expf(-1.702f * gate)) * (up + 1.f);
  if (ACT == GEGLU) return gate / (1.f + __expf(-1.5957691216f * gate * fmaf(0.044715f * gate, gate, 1.f))) * up;
  return silu(gate) * up;
}

// Added to products (BIASED): of rows g and g + 8 of a warp's 16.
struct Biases {
  float low, high;

  __device__ __forceinline__ float to_low(float sum, float by) const { return BIASED ? fmaf(sum, by, low) : sum * by; }
  __device__ __forceinline__ float to_high(float sum, float by) const { return BIASED ? fmaf(sum, by, high) : sum * by; }
};

// What warps summed, activated, to shared memory; then into blocks, a power of two each.
__device__ __forceinline__ void store_blocks(const Acc& acc, float* h, const float* power, const int* target,
                                             float scale, float scale8, Biases biases, int group, bool has_sums, int n, int n_out,
                                             u16* blocks, float* block_sums, float* block_powers) {
  const int lane = threadIdx.x & 31, row16 = lane >> 2;
  each_pair(acc, [&](int token, float own, float own8) {
    const float by = PLANES ? 1.f : power[token], y = biases.to_low(own * scale, by), y8 = biases.to_high(own8 * scale8, by);
    float* to = h + token * (kColumns + 4) + row16;
    const float r = fmaxf(y, 0.f), r8 = fmaxf(y8, 0.f);
    if (!has_sums) return;
    if (kGated) to[group * 8] = activated(y, y8);
    if (ACT == RELU2) to[group * 16] = r * r, to[group * 16 + 8] = r8 * r8;
  });
  __syncthreads();
  constexpr int kQuads = kColumns / 4;
  const int step = (n_out + 255) / 256 * 8;
#pragma unroll
  for (int i = threadIdx.x; i < kPad * kQuads; i += kBlock) {
    if ((i & ~31) / kQuads >= n) break;  // of a warp's tokens none is there
    const int token = i / kQuads, column = blockIdx.x * kColumns + i % kQuads * 4;
    const float4 v = *reinterpret_cast<const float4*>(h + token * (kColumns + 4) + i % kQuads * 4);
    const bool is_in = token < n && column < n_out;
#if NEXT_PLANES
    constexpr bool kHalved = NEXT_PLANES == 2;
    u8* row = reinterpret_cast<u8*>(blocks) + target[token] * static_cast<i64>(plane_bytes<kHalved>(n_out));
    put_in_planes<8, kHalved>(row, column, v, is_in);
#else
    float largest = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
#pragma unroll
    for (int hop = 4; hop > 0; hop >>= 1) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, hop));
    const Power own = power_of(largest);
    put_in_block(blocks, block_sums, 1, target[token] * step, column, halves_of(v, own.factor), is_in);
    if (is_in && column % 32 == 0) block_powers[static_cast<i64>(target[token]) * step + column / 32] = own.power;
#endif
  }
}

#if ADDS
// A warp has written its share of y's 16 columns of a group, or had none. The last one to say so adds for all rows: `add`(row, quad).
template <typename Add>
__device__ __forceinline__ void add_experts(const Add& add, int n_row, int n_quad, int group16, int* tickets) {
  const int lane = threadIdx.x & 31;
  __syncwarp();
  int n_before = 0;
  if (lane == 0) n_before = arrive(tickets + group16);
  if (__shfl_sync(0xffffffffu, n_before, 0) != static_cast<int>(gridDim.y) - 1) return;
  if (lane == 0) tickets[group16] = 0;
  for (int i = lane; i < n_row * 4; i += 32) {
    const int quad = group16 * 4 + i % 4;
    if (quad < n_quad) add(i / 4, quad);
  }
}
#endif

// But for 9.0 and 10.0, whole numbers need more registers.
constexpr int kResident = RESIDENT - (PLANES && (__CUDA_ARCH__ < 900 || __CUDA_ARCH__ >= 1200));

extern "C" __global__ void __launch_bounds__(kBlock, kResident)
    moe(const u8* weights, const float* scales, const u8* shared_weights, const float* shared_scales, const u8* x,
        const float* sums, const float* powers, const int* ids, const int* order, const int4* items, float* y, u16* blocks,
        float* block_sums, float* block_powers, const float* row_weights, const float4* shared, const float* gate,
        const float4* residual, float4* out, int* tickets, const float* biases, i64 expert_bytes, int n_scale, int n_expert, int n_used, int n_row,
        int n_piece, int step, int n_out, int n_tile16, int n_chunk) {
  if (!INNER) let_successor_start();
  extern __shared__ uint4 stages[];
  __shared__ float power[kPad];
  __shared__ int target[kPad];  // the pair
  __shared__ int found[LISTED ? 1 : kBlock / 32][kPad];
  const int n_pass = (n_row + kPad - 1) / kPad, n_pair = n_row * n_used;
  const int own_item = static_cast<int>(blockIdx.y) - n_piece * n_pass;
  const bool is_shared = own_item < 0;
  int piece = 0, first_row = 0;
  if (is_shared) piece = blockIdx.y / n_pass, first_row = (blockIdx.y - piece * n_pass) * kPad;
  Item item{n_expert + piece, min(n_row - first_row, kPad)};
  int first_place = 0;
  if (!is_shared) {
    if (INNER) wait_for_predecessor();
#if LISTED
    const int4 given = __ldcg(items + own_item);
    item = {given.x, given.z}, first_place = given.y;
#else
    item = find_pairs(ids, own_item, n_pair, n_row, n_expert, found[threadIdx.x >> 5]);
#endif
  }
  const int lane = threadIdx.x & 31, group = SPLIT == 1 ? threadIdx.x >> 5 : threadIdx.x / 32 % WARPS_M;
  const bool is_first = SPLIT == 1 || threadIdx.x < kThreads;
  const int n_group = min(WARPS_M, n_tile16 - static_cast<int>(blockIdx.x) * WARPS_M);  // of 16 weight rows, the CTA's
  const bool has_sums = is_first && group < n_group;
#if ADDS
  auto add = [&](int at, int quad) {  // made where it is used, from the launch's arguments: until then it takes no registers
    const ExpertSums experts(reinterpret_cast<const float4*>(y), row_weights, shared, gate, residual, at, n_row, n_used, n_out / 4,
                             max(n_piece, static_cast<int>(shared != nullptr)));
    out[static_cast<i64>(at) * (n_out / 4) + quad] = experts.of<8, false>(quad, experts.before(quad));
  };
  if (item.n == 0 && has_sums) {
    wait_for_predecessor();  // it may be the one that adds for all
    add_experts(add, n_row, n_out / 4, blockIdx.x * WARPS_M + group, tickets);
  }
#endif
  if (item.n == 0) return;
  const u32 base = shared_address(stages);
  clear_place(stages, item.n);
  const u8* expert = is_shared ? shared_weights + piece * expert_bytes : weights + item.expert * expert_bytes;
  Line line(base, Records(expert, n_tile16, n_chunk), n_group, n_chunk);
  line.load_early();

  const int pair = threadIdx.x / kSide % kPad, own = min(pair, item.n - 1);
  int taken = n_pair + piece * n_row + first_row + own;
  if (!INNER || is_shared) wait_for_predecessor();
#if LISTED
  if (!is_shared) taken = __ldcg(order + first_place + own);
#else
  if (!is_shared) taken = found[threadIdx.x >> 5][own];
#endif
  const int row = !INNER ? taken : is_shared ? first_row + own : row_of(taken, n_used);
  line.load_first(x, sums, powers, row, step, pair, item.n);
  if (INNER) let_successor_start();
  float scale = kUnit, scale8 = kUnit;
#if ROW_SCALES
  if (group < n_group) {
    const float* of = is_shared ? shared_scales + static_cast<i64>(piece) * n_scale : scales + static_cast<i64>(item.expert) * n_scale;
    of += (blockIdx.x * WARPS_M + group) * 16 + (lane >> 2);
    scale *= of[0];
    scale8 *= of[8];
  }
#endif
  constexpr bool kEarlyBiases = TILES_N == 1 && !PLANES;  // else registers are scarce
  auto fetch_biases = [&]() -> Biases {
    if (!BIASED || group >= n_group) return {0.f, 0.f};
    const int own = LISTED && !kEarlyBiases ? __ldcg(&items[blockIdx.y].x) : item.expert;
    const float* of = biases + (static_cast<i64>(own) * n_tile16 + blockIdx.x * WARPS_M + group) * 16 + (lane >> 2);
    return {of[0], of[8]};
  };
  Biases own_biases = {0.f, 0.f};
  if (kEarlyBiases) own_biases = fetch_biases();
  if (threadIdx.x < kSide * kPad && threadIdx.x % kSide == 0) {
    if (INNER && !PLANES) power[pair] = powers[row];
    target[pair] = taken;
  }

  Acc acc = {};
#if PARTS > 1
  __shared__ float rest[2 * kTiles * kThreads];
  line.multiply(acc, item.n, rest);
#if SPLIT > 1
  if (!is_first) keep(acc, rest);
  __syncthreads();
  if (is_first) add_kept(acc, rest);
#endif
#elif PLANES
  line.multiply(acc, item.n, nullptr);
#else
  line.multiply(acc, item.n);
#endif
  if (!kEarlyBiases) own_biases = fetch_biases();
#if INNER
  __syncthreads();  // stages are read to the end
  float* h = reinterpret_cast<float*>(stages);
  store_blocks(acc, h, power, target, scale, scale8, own_biases, group, has_sums, item.n, n_out, blocks, block_sums, block_powers);
#else
  if (!has_sums) return;
  const int column = (blockIdx.x * WARPS_M + group) * 16 + (lane >> 2);
  each_pair(acc, [&](int token, float sum, float sum8) {
    if (token >= item.n) return;
    float* to = y + static_cast<i64>(target[token]) * n_out + column;
    if (column < n_out) to[0] = own_biases.to_low(sum, scale);
    if (column + 8 < n_out) to[8] = own_biases.to_high(sum8, scale8);
  });
#if ADDS
  add_experts(add, n_row, n_out / 4, blockIdx.x * WARPS_M + group, tickets);
#endif
#endif
}
