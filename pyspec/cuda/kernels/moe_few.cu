// moe_few: moe.cu's products for the fewest rows, with neither lists before nor a launch that sums behind. The same bits.
//
// Tensors as in moe.cu, without order and items, and
//   ids      [row, n_used]       i32  the experts of a row: pair = row * n_used + choice; behind those, n_row pairs a piece
//   out      [row, n_out]        f32  unless INNER: the sums of expert_sums.cuh, where the other tensors stand; `shared` is y's
//                                     pieces, or given; tickets [n_out / 16, up] i32 are zero before and after
//
// With few rows a CTA's products with one expert are short, and what lies around them (to look for the pairs, weights' first
// trip, stores) takes longer than their bytes. So a CTA finds all items once, for itself, and goes through units of work: 64
// weight rows with one item's pairs, units blockIdx.x, + gridDim.x, ..., those of an item side by side, the shared expert's
// first. Its ring of stages goes on from one unit to the next: while sums are put together and stored, the next units' weights
// are on their way. Any grid is right; one that is resident at once is what it is made for.
//
// An item is an expert and up to HOLD pairs that took it. Every thread compares its pairs with those before them.
// Downs: a CTA writes what all its units give before it counts them at their columns' tickets, once, at its end: a fence waits
// for everything that is under way. The last warp to count at 16 columns adds what all experts gave, in the order of choice.
//
// Set by the launcher, beside moe.cu's: ROWS and PAIRS at most, ITEMS (pairs and pieces), TABLES (bytes behind the stages).
#include "moe.cuh"
#include "expert_sums.cuh"

struct Tables {
  float4 met[(SPLIT - 1) * kThreads * TILES_N];
  float h[INNER ? HOLD * (kColumns + 4) : 4];
  int ids[PAIRS], runs[PAIRS];  // the expert of a pair; the pair its item begins with, times HOLD, and its place there
  int expert[ITEMS], taken[ITEMS][HOLD];  // of an item: the shared expert's pieces come after the others; its pairs, or -1
  float power[ROWS];
  u32 heads[PAIRS / 32];  // bits of the pairs that items begin with
};
static_assert(sizeof(Tables) <= TABLES && kStage % 16 == 0, "tables fit behind the stages");
static_assert(PAIRS % 32 == 0, "whole words");

// Of all CTAs alike.
struct Sizes {
  int n_used, n_row, n_piece, n_pass, n_pair, n_tile16, n_chunk, n_column;  // n_column: 64 weight rows each
};

__device__ __forceinline__ int bits_before(const u32* words, int i) {
  int n = 0;
  for (int k = 0; k < i / 32; ++k) n += __popc(words[k]);
  return i % 32 == 0 ? n : n + __popc(words[i / 32] & ((1u << i % 32) - 1));
}

// The pieces' items, known before rows have chosen; all others' are empty.
__device__ __forceinline__ void shared_items(Tables& t, const Sizes& s, int n_expert) {
  const int n_shared = s.n_piece * s.n_pass;
  for (int i = threadIdx.x; i < (n_shared + s.n_pair) * HOLD; i += kCta) {
    const int item = i / HOLD, place = i % HOLD, piece = item / s.n_pass, row = item % s.n_pass * HOLD + place;
    t.taken[item][place] = item < n_shared && row < s.n_row ? s.n_pair + piece * s.n_row + row : -1;
    if (item < n_shared && place == 0) t.expert[item] = n_expert + piece;
  }
}

// The items of what rows chose, in the order of their first pairs, behind the `first` shared ones. Returns how many items are
// there in all. They can be read after the next barrier.
__device__ __forceinline__ int find_items(Tables& t, const int* ids, int n_pair, int n_expert, int first) {
  const int end = (n_pair + 31) / 32 * 32;
  for (int i = threadIdx.x; i < end; i += kCta) t.ids[i] = i < n_pair ? expert_of(__ldcg(ids + i), n_expert) : -1;
  __syncthreads();
  for (int i = threadIdx.x; i < end; i += kCta) {
    const int own = t.ids[i];
    int n = 0, head = i;  // pairs before this one that took its expert, and where their last item begins
    for (int from = 0; from <= i; from += 32) {
      u32 same = 0;
#pragma unroll
      for (int j = 0; j < 32; j += 4) {
        const int4 four = *reinterpret_cast<const int4*>(t.ids + from + j);
        same |= (four.x == own ? 1u : 0u) << j | (four.y == own ? 2u : 0u) << j | (four.z == own ? 4u : 0u) << j |
                (four.w == own ? 8u : 0u) << j;
      }
      if (i - from < 32) same &= (1u << (i - from)) - 1;
      const int here = __popc(same), last = (n + here - 1) / HOLD * HOLD - n;  // of those here, the last that begins an item
      if (here > 0 && last >= 0) {
        u32 rest = same;
        for (int k = 0; k < last; ++k) rest &= rest - 1;
        head = from + __ffs(rest) - 1;
      }
      n += here;
    }
    const bool begins = i < n_pair && n % HOLD == 0;
    t.runs[i] = (begins ? i : head) * HOLD + n % HOLD;
    const u32 word = __ballot_sync(0xffffffffu, begins);
    if (threadIdx.x % 32 == 0) t.heads[i / 32] = word;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < n_pair; i += kCta) {
    const int run = t.runs[i], item = first + bits_before(t.heads, run / HOLD);
    t.taken[item][run % HOLD] = i;
    if (run % HOLD == 0) t.expert[item] = t.ids[i];
  }
  return first + bits_before(t.heads, n_pair);
}

// Steps through the stages of a CTA's units.
struct Steps {
  int unit, n_left;  // chunks of the unit

  __device__ __forceinline__ Steps() : unit(static_cast<int>(blockIdx.x) - static_cast<int>(gridDim.x)), n_left(0) {}

  // Calls begin(unit) with the first stage of one, and load(chunks left of it) with each, until units end.
  template <class Begin, class Load>
  __device__ __forceinline__ void next(int n_unit, int n_chunk, Begin begin, Load load) {
    if (n_left <= 0) {
      unit += gridDim.x;
      if (unit >= n_unit) return;
      n_left = n_chunk;
      begin(unit);
    }
    load(n_left);
    n_left -= PER_STAGE;
  }
};

extern "C" __global__ void __launch_bounds__(kCta, RESIDENT)
    moe_few(const u8* weights, const float* scales, const u8* shared_weights, const float* shared_scales, const u8* x,
            const float* sums, const float* powers, const int* ids, float* y, u16* blocks, float* block_sums,
            float* block_powers, const float* row_weights, const float4* shared, const float* gate, const float4* residual,
            float4* out, int* tickets, i64 expert_bytes, int n_scale, int n_expert, int n_used, int n_row, int n_piece,
            int step, int n_out, int n_tile16, int n_chunk) {
  if (!INNER) let_successor_start();
  extern __shared__ uint4 stages[];
  Tables& t = *reinterpret_cast<Tables*>(reinterpret_cast<u8*>(stages) + STAGES * kStage);
  const Sizes s{n_used, n_row, n_piece, (n_row + HOLD - 1) / HOLD, n_row * n_used, n_tile16, n_chunk,
                (n_tile16 + WARPS_M - 1) / WARPS_M};
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, group = warp % WARPS_M, part = warp / WARPS_M;
  const u32 base = shared_address(stages);
  shared_items(t, s, n_expert);

  WeightCopies left;
  RowCopies right;
  Steps left_steps, right_steps;
  auto load_weights = [&](u32 to, int n_unit) {
    left_steps.next(
        n_unit, n_chunk,
        [&](int unit) {
          const int item = unit / s.n_column, column = unit % s.n_column, expert = t.expert[item];
          const bool is_shared = expert >= n_expert;
          const u8* from = is_shared ? shared_weights + (expert - n_expert) * expert_bytes : weights + expert * expert_bytes;
          left = WeightCopies(from, column, min(WARPS_M, n_tile16 - column * WARPS_M), n_tile16, n_chunk);
        },
        [&](int n_left) { left.load(to, n_left); });
  };
  auto row_of = [&](int taken) { return taken < s.n_pair ? taken / n_used : (taken - s.n_pair) % n_row; };
  auto load_rows = [&](u32 to, int n_unit) {
    right_steps.next(
        n_unit, n_chunk,
        [&](int unit) {
          const int taken = t.taken[unit / s.n_column][threadIdx.x / 4 % HOLD], own = max(taken, 0);
          const i64 row = INNER ? row_of(own) : own, block = threadIdx.x / (4 * HOLD);
          const i64 at = INNER ? block * step + row : row * step + block;
          right = RowCopies{x + at * 64 + threadIdx.x % 4 * 16, sums + at, powers + at, INNER ? step : 1, taken >= 0};
        },
        [&](int n_left) { right.load(to, n_left); });
  };

  int n_item = s.n_piece * s.n_pass, n_early = 0;
  if (INNER) {  // the shared expert's weights need not wait
    __syncthreads();
    if (static_cast<int>(blockIdx.x) < n_item * s.n_column)
      for (; n_early < STAGES - 1 && n_early * PER_STAGE < n_chunk; ++n_early) load_weights(base + n_early * kStage, 1 << 30);
    wait_for_predecessor();
    for (int i = threadIdx.x; i < n_row; i += kCta) t.power[i] = powers[i];
  }
  n_item = find_items(t, ids, s.n_pair, n_expert, n_item);
  __syncthreads();
  const int n_unit = n_item * s.n_column;
#pragma unroll 1
  for (int i = n_early; i < STAGES - 1; ++i) load_weights(base + i * kStage, n_unit);
  if (!INNER) wait_for_predecessor();
#pragma unroll 1
  for (int i = 0; i < STAGES - 1; ++i) {
    load_rows(base + i * kStage, n_unit);
    copies_commit();
  }
  if (INNER) let_successor_start();

  int stage = 0, next = STAGES - 1;
#pragma unroll 1
  for (int unit = blockIdx.x; unit < n_unit; unit += gridDim.x) {
    const int item = unit / s.n_column, column = unit % s.n_column;
    const int n_group = min(WARPS_M, n_tile16 - column * WARPS_M);  // of 16 weight rows
    const bool has_sums = part == 0 && group < n_group;
    float scale = kUnit, scale8 = kUnit;
#if ROW_SCALES
    if (has_sums) {
      const int expert = t.expert[item];
      const float* of = expert >= n_expert ? shared_scales + static_cast<i64>(expert - n_expert) * n_scale
                                           : scales + static_cast<i64>(expert) * n_scale;
      of += (column * WARPS_M + group) * 16 + (lane >> 2);
      scale *= of[0];
      scale8 *= of[8];
    }
#endif
    float acc[TILES_N][4] = {};
#pragma unroll 1
    for (int chunk = 0; chunk < n_chunk; chunk += PER_STAGE) {
      copies_wait<STAGES - 2>();
      __syncthreads();
      load_weights(base + next * kStage, n_unit);
      load_rows(base + next * kStage, n_unit);
      copies_commit();
      next = next + 1 == STAGES ? 0 : next + 1;
      add_stage(acc, base + stage * kStage, group, part, n_chunk - chunk);
      stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    add_parts(acc, t.met, part);  // the places are free: all were at a stage since they were read
    const int* taken = t.taken[item];
#if INNER
    store_blocks(acc, t.h, [&](int token) { return t.power[row_of(max(taken[token], 0))]; }, taken, scale, scale8, group,
                 column, has_sums, n_out, blocks, block_sums, block_powers);
#else
    if (!has_sums) continue;
    const int first = (column * WARPS_M + group) * 16 + (lane >> 2);
#pragma unroll
    for (int n = 0; n < TILES_N; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int token = n * 8 + (lane & 3) * 2 + j, target = token < HOLD ? taken[token] : -1;
        if (target < 0) continue;
        float* to = y + static_cast<i64>(target) * n_out + first;
        if (first < n_out) to[0] = acc[n][j] * scale;
        if (first + 8 < n_out) to[8] = acc[n][j + 2] * scale8;
      }
    }
#endif
  }
#if !INNER
  if (part > 0) return;
  const ExpertSums all{reinterpret_cast<const float4*>(y), row_weights, shared, gate, residual, out,
                       n_row, n_used, n_out / 4, max(n_piece, static_cast<int>(shared != nullptr))};
  __syncwarp();
#pragma unroll 1
  for (int first = blockIdx.x; first < n_unit; first += 32 * gridDim.x) {
    const int unit = first + lane * static_cast<int>(gridDim.x), group16 = unit % s.n_column * WARPS_M + group;
    bool is_last = false;
    if (unit < n_unit && group16 < n_tile16) is_last = arrive(tickets + group16) == n_item - 1;
    if (is_last) tickets[group16] = 0;
#pragma unroll 1
    for (u32 rest = __ballot_sync(0xffffffffu, is_last); rest != 0; rest &= rest - 1) {
      const int own = __shfl_sync(0xffffffffu, group16, __ffs(rest) - 1);
#pragma unroll
      for (int i = lane; i < ROWS * 4; i += 32) {  // of so few rows once: as a loop it cost registers (sm_100)
        const int quad = own * 4 + i % 4;
        if (i < n_row * 4 && quad < all.n_quad) all.add(i / 4, quad);
      }
    }
  }
#endif
}
