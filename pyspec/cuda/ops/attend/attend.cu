// attend: paged attention of few rows over long keys; decode, verify and drafter blocks alike.
//
//   q            [row, n_head, dim]          f32    contiguous, after rope
//   k, v         [pool row, n_kv, ...]       codes  K_KIND and V_KIND, see kv_kinds.cuh: any but f32
//   k_scale, v_scale  [pool row, n_kv, ...]  f16    factors of kinds that have any
//   page_table   [seq, n_page_col]           int64
//   positions, lo, hi  [row]                 int64  row sees lo <= p < hi, and those of `window`, see seen_by
//   row_seq      [row]                       int32  -1: padding, skipped here and written as zeros by the merge
//   seq_start    [seq + 1]                   int32
//   part         [item, column, dim]         f32    unnormalised sums of an item
//   part_ml      [item, column, 2]           f32    maximum (log2) and sum of weights
//   plan         [1 + 3 * MAX_SEQ]           int32  ranges per item; first item, first split, tiles by sequence
//   sinks        [n_head]                    f32    with HAS_SINKS: a logit of each head, of a key without value
//   out          [row, n_head, dim]          f32
//   fault        [5]                         int32  see bounds.cuh
//
// Swap form: keys on the M side of m16n8k16, packed (row, head of the group) columns on N in eights, so a group of 6 and
// one of 16 waste fewer than 8 columns. A block has DIM / 32 warps and takes RANGE = DIM keys at a time: for S = K Q each
// warp owns 32 keys, for O = V P each owns 32 dims, so every K and V element is loaded by one warp, through a queue in
// shared memory that only this warp writes and reads (cp.async, no block barrier, no bank conflict).
//
// Bits: a column never mixes with another; a range starts at a multiple of RANGE and is reduced in one order; ranges are
// folded in order into splits of 1,024 keys and splits in order into the row. An item is one range or one split, whichever
// fills the machine, and both give the same bits, so a row's result does not depend on its neighbours or on the batch.
//
// Grid: any number of blocks (a static one, for graphs); each finds its items in the metadata. Memory-bound: K and V are
// read once per tile of COLS columns. Products with keys and with values are of f16, or of bf16 if they are: q is rounded to
// the first type after scaling, and weights to the second, errors of 2^-11 or 2^-8 each. Bytes and codes of fewer bits become
// f16 on their way from shared memory to the product. How keys and values are queued, and multiplied, hangs on their size:
// attend_halves.cuh, attend_bytes.cuh and attend_bits.cuh have a part for keys and one for values.
//
// Macros: DIM, N_TILE (eights of columns), COLUMNS (8 * N_TILE, or 4 of 8), K_KIND, V_KIND, F8_CVT (the GPU has an instruction for
// it), HAS_SINKS, CAP (of scores, a float; 0: none), DEPTH (queue steps), OP_ID, MIN_BLOCKS, SHARED_BYTES, L2_FETCH (a string: how much a miss brings into L2; all of it is used by the same block
// soon), MERGE_FINDS (1 thin, 2 long, 4 wide).
#include "kv_kinds.cuh"
#include "bounds.cuh"
#include "attend_fold.cuh"
#include "overlap.cuh"

constexpr int WARPS = DIM / 32, THREADS = 32 * WARPS, RANGE = DIM, FOLD = SPLIT / RANGE, COLS = COLUMNS;
constexpr int ROOM = 8 * N_TILE, LANES = COLS < 8 ? 4 * COLS : 32;  // a tile may leave columns of its products empty: less of q and p is kept
static_assert(COLS == ROOM || (N_TILE == 1 && COLS % 2 == 0 && COLS < ROOM), "columns of a tile");
__device__ constexpr int most(int a, int b) { return a > b ? a : b; }
// Bytes of a step of a warp: 2 KB of halves or bytes, and what attend_bits.cuh says.
__device__ constexpr int step_bytes(int kind, bool is_keys) {
  if (kind < 5) return 2048 + (kind == 3 ? 256 : 0);  // the scales of up to 64 keys, of 64 dims
  const int keys = is_keys ? 32 : 64;
  const int factors = 4 * keys * (is_keys ? n_factor(kind) : 1);
  return 1024 + (n_bit(kind) == 5 ? 256 : 0) + factors;
}
constexpr int STEP_BYTES = most(step_bytes(K_KIND, true), step_bytes(V_KIND, false));
constexpr u32 ALL = 0xffffffffu;

struct Items {  // of a launch, see attend_items.cuh
  int first[MAX_SEQ + 1];                                // first item of each sequence
  int seq_lo[MAX_SEQ], seq_hi[MAX_SEQ], width[MAX_SEQ];  // first split, tiles and rows of each
  int per_item;                                          // ranges per item
};

struct alignas(16) Shared {
  uint2 q[WARPS][2][N_TILE][LANES]; // fragment order: 4 of 32 dims of a column per lane and half
  uint2 p[WARPS][2][N_TILE][LANES]; // 4 of 32 keys of a column per lane and half
  char queue[WARPS][DEPTH][STEP_BYTES];
  float top[WARPS][ROOM], sum[WARPS][ROOM];
  float run_m[ROOM], run_l[ROOM], keep[ROOM], take[ROOM];
  int lo[ROOM], hi[ROOM];
  int q_row[ROOM];                  // row * n_head + head of a column; -1: none
  int row16[SPLIT / 16];            // pool row of every 16th key of the item
  Items items;
  int hull[4];                      // of the tile: min lo, max hi, max lo, min hi
};
static_assert(sizeof(Shared) == SHARED_BYTES, "the launcher asks for another size");

// Two numbers in one word, and a product of 16 by 8, of f16 or, for keys or values of that KIND, of bf16.
template <int KIND>
__device__ __forceinline__ u32 pack(float low, float high) {
  u32 both;
  if constexpr (KIND == 2) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  }
  return both;
}

template <int KIND>
__device__ __forceinline__ void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  if constexpr (KIND == 2) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}

__device__ __forceinline__ u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ void copy16(u32 to, const void* from, bool real) {  // zeros when not real
  asm volatile("cp.async.cg.shared.global.L2::" L2_FETCH " [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(real ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ __forceinline__ void wait_oldest() { asm volatile("cp.async.wait_group %0;" ::"n"(DEPTH - 1) : "memory"); }

typedef Codes<K_KIND>::Plane KeyCode;
typedef Codes<V_KIND>::Plane ValueCode;

struct Lane {
  int warp, g, t;  // g = lane / 4 and t = lane % 4, as in the fragment layouts
};

__device__ __forceinline__ void clear(float (&acc)[2][N_TILE][4]) {
#pragma unroll
  for (int i = 0; i < 2; i++)
#pragma unroll
    for (int n = 0; n < N_TILE; n++)
#pragma unroll
      for (int j = 0; j < 4; j++) acc[i][n][j] = 0.f;
}

// A lane's part of a column's q or weights.
__device__ __forceinline__ uint2 kept(const uint2 (&of)[LANES], int lane) {
  return LANES == 32 || lane < LANES ? of[lane] : make_uint2(0, 0);
}

#include "attend_stream.cuh"

// The step in `slot` is in registers: its place takes the step DEPTH later.
__device__ __forceinline__ void advance(const Shared& s, const Stream& f, const Lane& me, int& step, int& slot) {
  fetch(s, f, me, step + DEPTH, slot);
  step++;
  slot = slot + 1 == DEPTH ? 0 : slot + 1;
}

#include "attend_halves.cuh"
#include "attend_bytes.cuh"
#include "attend_bits.cuh"

// Scores are capped, and -inf where a column does not see the key; then the warp's maximum of each column.
__device__ __forceinline__ void mask_and_top(Shared& s, const Lane& me, int key, bool all_seen,
                                             float (&acc)[2][N_TILE][4]) {
#pragma unroll
  for (int n = 0; n < N_TILE; n++) {
    const int col = 8 * n + 2 * me.t;
    float top[2];
#pragma unroll
    for (int e = 0; e < 2; e++) {
      if constexpr (CAP > 0.f) {
#pragma unroll
        for (int x = 0; x < 4; x++) acc[x / 2][n][2 * (x % 2) + e] = capped(acc[x / 2][n][2 * (x % 2) + e], CAP);
      }
      if (!all_seen) {
        const int lo = s.lo[col + e], hi = s.hi[col + e];
#pragma unroll
        for (int x = 0; x < 4; x++)
          if (key + x < lo || key + x >= hi) acc[x / 2][n][2 * (x % 2) + e] = none_seen();
      }
      top[e] = fmaxf(fmaxf(acc[0][n][e], acc[0][n][2 + e]), fmaxf(acc[1][n][e], acc[1][n][2 + e]));
#pragma unroll
      for (int d = 4; d < 32; d <<= 1) top[e] = fmaxf(top[e], __shfl_xor_sync(ALL, top[e], d));
    }
    if (me.g == 0) *reinterpret_cast<float2*>(&s.top[me.warp][col]) = make_float2(top[0], top[1]);
  }
}

// Weights exp2(S - maximum of the range) to shared memory, as the type of values, and the warp's sums of them.
__device__ __forceinline__ void weights(Shared& s, const Lane& me, float (&acc)[2][N_TILE][4]) {
#pragma unroll
  for (int n = 0; n < N_TILE; n++) {
    const int col = 8 * n + 2 * me.t;
    float top[2] = {none_seen(), none_seen()}, sum[2];
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float2 other = *reinterpret_cast<const float2*>(&s.top[w][col]);
      top[0] = fmaxf(top[0], other.x);
      top[1] = fmaxf(top[1], other.y);
    }
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const float m = finite_or_zero(top[e]);
      float w[4];
#pragma unroll
      for (int x = 0; x < 4; x++) w[x] = exp2_fast(acc[x / 2][n][2 * (x % 2) + e] - m);
      if (LANES == 32 || col < COLS)
        s.p[me.warp][me.g % 2][n][(2 * me.t + e) * 4 + me.g / 2] =
            make_uint2(pack<V_KIND>(w[0], w[1]), pack<V_KIND>(w[2], w[3]));
      sum[e] = (w[0] + w[1]) + (w[2] + w[3]);
#pragma unroll
      for (int d = 4; d < 32; d <<= 1) sum[e] += __shfl_xor_sync(ALL, sum[e], d);
    }
    if (me.g == 0) *reinterpret_cast<float2*>(&s.sum[me.warp][col]) = make_float2(sum[0], sum[1]);
  }
}

#include "attend_items.cuh"
#if __CUDA_ARCH__ >= 900
#include "prefetch.cuh"
#endif

// Scaled, rounded to the type of keys, in fragment order: a thread has 8 dims of one column of every N tile.
__device__ __forceinline__ void load_q(Shared& s, const Args& a) {
  const int in_tile = threadIdx.x / (DIM / 8), piece = threadIdx.x % (DIM / 8);
  float4 x[N_TILE][2];
#pragma unroll
  for (int n = 0; n < N_TILE; n++) {
    const int row = s.q_row[8 * n + in_tile];
    const float4* at = reinterpret_cast<const float4*>(a.q + static_cast<i64>(max(row, 0)) * DIM + 8 * piece);
    x[n][0] = row < 0 ? make_float4(0.f, 0.f, 0.f, 0.f) : at[0];
    x[n][1] = row < 0 ? make_float4(0.f, 0.f, 0.f, 0.f) : at[1];
  }
#pragma unroll
  for (int n = 0; n < N_TILE; n++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
#if K_KIND < 5
      const float4 y = x[n][half];
#else  // dims that lie four apart meet in a word of codes
      const float4 a0 = x[n][0], a1 = x[n][1];
      const float4 y = half ? make_float4(a0.z, a1.z, a0.w, a1.w) : make_float4(a0.x, a1.x, a0.y, a1.y);
#endif
      if (LANES == 32 || in_tile < COLS)
        s.q[q_step(piece)][half][n][in_tile * 4 + q_lane(piece)] =
            make_uint2(pack<K_KIND>(y.x * a.scale, y.y * a.scale), pack<K_KIND>(y.z * a.scale, y.w * a.scale));
    }
}

// How the running sums and the range's weigh, by column; the running maximum and sum move on. A thread per column.
__device__ __forceinline__ void weigh(Shared& s) {
  if (const int c = threadIdx.x; c < ROOM) {
    float top = none_seen(), sum = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      top = fmaxf(top, s.top[w][c]);
      sum += s.sum[w][c];
    }
    const Fold fold = fold_of(s.run_m[c], top);
    s.run_m[c] = fold.m;
    s.run_l[c] = folded(s.run_l[c], sum, fold);
    s.keep[c] = fold.keep;
    s.take[c] = fold.take;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
attend_split(const float* q, const KeyCode* k, const ValueCode* v,
#if K_FACTORS
             const u16* k_scale,
#endif
#if V_FACTORS
             const u16* v_scale,
#endif
             const i64* page_table, const i64* positions, const i64* lo, const i64* hi, const int* row_seq,
             const int* seq_start, float* part, float* part_ml, int* plan, int* fault, int n_row, int n_seq, int n_head,
             int n_kv, int n_page_col, int page_size, int n_page, int window, int max_item, float scale,
             const u8* next, i64 next_share, int n_share, int n_piece) {
  let_successor_start();
  extern __shared__ __align__(16) char raw[];
  Shared& s = *reinterpret_cast<Shared*>(raw);
  const Args a = {q,     k,     v,      page_table, positions,  lo,        hi,     row_seq, seq_start, plan, fault,
                  n_row, n_seq, n_head, n_kv,       n_page_col, page_size, n_page, window,  max_item,  scale};
  const int lane = static_cast<int>(threadIdx.x % 32);
  const Lane me = {static_cast<int>(threadIdx.x / 32), lane / 4, lane % 4};
  find_items<THREADS>(s.items, a, n_row, gridDim.x);
  __syncthreads();
  const int per_item = s.items.per_item, total = s.items.first[n_seq];
  const auto begin = [&] {  // the batch's layout was there before the forward: q, k, v and readers of the last plan are not
    wait_for_predecessor();
    if (blockIdx.x == 0) tell_items(s.items, a);
  };

  for (int index = blockIdx.x; index < total; index += gridDim.x) {
    const Item item = item_of(s.items, a, index);
    const int base = item.split * per_item * RANGE;
    find_columns(s, a, item, base, per_item * RANGE);
    if (index == blockIdx.x) begin();
    Stream f;
    f.k = k;
    f.v = v;
    f.head = item.head;
    f.row_stride = n_kv * DIM;
#if K_FACTORS
    f.k_scale = k_scale + item.head * (K_FACTORS * WARPS);
#endif
#if V_FACTORS == 1
    f.v_scale = v_scale + item.head * WARPS + me.warp / 2 * 2;
#elif V_FACTORS == 2
    f.v_scale = v_scale + item.head * (2 * WARPS) + 2 * me.warp;
#endif
    f.lo = s.hull[0] - base;
    f.n_key = s.hull[1] - s.hull[0];
    f.first = max(f.lo, 0) / RANGE;
    const int n_range = min(per_item, (s.hull[1] - base + RANGE - 1) / RANGE) - f.first;
    if (n_range <= 0) continue;  // no column of this tile sees the item (the same in every thread); nobody reads its part
    f.n_step = n_range * STEPS;
    f.queue = shared_address(s.queue[me.warp]);
#pragma unroll
    for (int i = 0; i < DEPTH; i++) fetch(s, f, me, i, i);
    load_q(s, a);
    __syncthreads();

    float run[2][N_TILE][4] = {};
    int step = 0, slot = 0;
#pragma unroll 1
    for (int r = 0; r < n_range; r++) {
      const int first_key = base + (f.first + r) * RANGE + 32 * me.warp;
      float acc[2][N_TILE][4];
      scores(s, f, me, step, slot, acc);
      mask_and_top(s, me, first_key + 4 * me.g, first_key >= s.hull[2] && first_key + 32 <= s.hull[3], acc);
      __syncthreads();
      weights(s, me, acc);
      __syncthreads();
      weigh(s);
      values(s, f, me, step, slot, acc);
      __syncthreads();
#pragma unroll
      for (int n = 0; n < N_TILE; n++) {
        const float2 keep = *reinterpret_cast<const float2*>(&s.keep[8 * n + 2 * me.t]);
        const float2 take = *reinterpret_cast<const float2*>(&s.take[8 * n + 2 * me.t]);
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
          for (int j = 0; j < 4; j++)
            run[i][n][j] = folded(run[i][n][j], acc[i][n][j], {0.f, j % 2 ? keep.y : keep.x, j % 2 ? take.y : take.x});
      }
    }
    float* to = part + static_cast<i64>(index) * COLS * DIM + 32 * me.warp + 4 * me.g;
#pragma unroll
    for (int n = 0; n < N_TILE; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int c = 8 * n + 2 * me.t + e;
        if (c < min(COLS, item.n_col))
          *reinterpret_cast<float4*>(to + c * DIM) =
              make_float4(run[0][n][e], run[0][n][2 + e], run[1][n][e], run[1][n][2 + e]);
      }
    for (int c = threadIdx.x; c < min(COLS, item.n_col); c += THREADS)
      *reinterpret_cast<float2*>(part_ml + (static_cast<i64>(index) * COLS + c) * 2) = make_float2(s.run_m[c], s.run_l[c]);
    __syncthreads();  // q and the columns are replaced by the next item's
  }
  if (static_cast<int>(blockIdx.x) >= total) {  // these have nothing else to do
#if __CUDA_ARCH__ >= 900
    const Prefetch product = {next, next_share, n_share, n_piece};
    product.fetch((blockIdx.x - total) * THREADS + threadIdx.x, (gridDim.x - total) * THREADS);
#endif
    begin();
  }
}

#include "attend_merge.cuh"
