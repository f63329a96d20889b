// sparse_attend: heads that share one key, which is its value, too, over a window of raw rows and chosen compressed ones. Launches: the
// batch's keys; parts of rows; their sums, and the ring, which parts read as it was before.
//
//   q, out       [row, n_head, DIM]         f32    q as a product gives it, rows `q_step` apart: heads are normed and turned on their way
//   kv, own      [row, DIM]                 f32, T the batch's keys, rows `kv_step` apart; normed, turned and rounded, as the ring has them
//   norm, freq   [DIM], [N_ROT / 2]         f32, f64
//   ring         [slot, n_ring, DIM]        T      KV_KIND 1: f16, 2: bf16
//   rows         [pool row, DIM]            T      compressed rows; null where a layer has none
//   page_table   [seq, n_col]               int64
//   positions    [row]                      int64  the first of a sequence tells how many tokens the ring holds
//   row_seq      [row]                      int32  -1: padding; comes out as zeros
//   seq_start, seq_slot  [seq + 1], [seq]   int32
//   chosen       [row, top_k]               int32  -1 behind the last; null: all rows whose blocks are complete
//   sinks        [n_head]                   f32
//   part         [row - first, max_part, n_head, DIM]  f32, part_ml [row - first, max_part, n_head, 2] f32: sums over a part's keys,
//                maximum (log2) and sum of weights
//   fault        [5]                        int32  see bounds.cuh
//
// A row's keys stand in a list: `window` places that end at the row itself, filled up to whole units, then its compressed rows. A unit is
// UNIT of them, a part as many units as leave a row at most MAX_PART parts, and `per_part` at least. So parts hang on the row's own length
// alone, and with them its bits; but where there are rows enough for all multiprocessors, each is one part. A CTA takes HEADS heads of a
// part, a tile of KEYS after the other: its keys are gathered to shared memory once, for S = Q K and for O = P K, while the tile before is
// multiplied if BUFFERS is 2. SUB keys at once are weighed by the largest score so far, whatever KEYS is, and so all tiles give the same
// bits. For S a warp has MT * 16 heads of some keys, for O all heads of DIM / WARPS dims.
//
// Macros: DIM, N_ROT, HEADS (16, 32 or 64), KEYS, SUB, UNIT, WARPS, BUFFERS, MAX_ROW, KV_KIND, OP_ID, SHARED_BYTES, MIN_BLOCKS.
#include "blocks.cuh"
#include "bulk.cuh"
#include "mma.cuh"
#include "matrices.cuh"
#include "overlap.cuh"
#include "partial.cuh"
#include "prepared.cuh"
#include "turns.cuh"

constexpr int THREADS = 32 * WARPS, MAX_PART = 16;
constexpr int STRIDE = DIM + 8, P_STRIDE = KEYS + 8;        // in values: eight rows lie in different banks
constexpr int TILES = HEADS / 16, M_WARPS = TILES > 2 ? TILES / 2 : 1, MT = TILES / M_WARPS;
constexpr int N_WARPS = WARPS / M_WARPS, WARP_KEYS = KEYS / N_WARPS, NT = WARP_KEYS / 8;
constexpr int WARP_DIMS = DIM / WARPS, DT = WARP_DIMS / 8;
constexpr int SUBS = KEYS / SUB, SUB_WARPS = N_WARPS / SUBS;  // of a tile; that have keys of one
constexpr int CHUNKS = DIM % 128 == 0 ? DIM / 128 : 1, CHUNK_DIMS = DIM / CHUNKS;  // of dims, copied one after another
constexpr u32 ALL = 0xffffffffu;
static_assert(WARP_KEYS % 16 == 0 && WARP_DIMS % 16 == 0 && CHUNKS <= 4 && HEADS <= THREADS && KEYS <= MAX_ROW, "tiles do not divide");
static_assert(KEYS % SUB == 0 && SUB_WARPS * SUBS == N_WARPS && UNIT % KEYS == 0, "nor do units");

#if KV_KIND == 2
#define SPARSE_MMA mma_bf16
#define SPARSE_T "bf16"
#else
#define SPARSE_MMA mma_f16
#define SPARSE_T "f16"
#endif

__device__ __forceinline__ u32 pack(float low, float high) {
  u32 both;
  asm("cvt.rn." SPARSE_T "x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

// Dims dim to dim + 3 of a head with their turns, of which those before the tail have none.
struct Turns {
  float2 low, high;
};

__device__ __forceinline__ float4 turned4(float4 x, int dim, const Turns& by) {
  if (dim >= DIM - N_ROT) {
    const float2 y = turned(x.x, x.y, by.low);
    x.x = y.x, x.y = y.y;
  }
  if (dim + 2 >= DIM - N_ROT) {
    const float2 y = turned(x.z, x.w, by.high);
    x.z = y.x, x.w = y.y;
  }
  return x;
}

__device__ __forceinline__ Turns turns_of(i64 position, const double* freq, int dim) {
  const int pair = (dim - (DIM - N_ROT)) / 2;
  const double at = static_cast<double>(position);
  Turns out = {make_float2(1.f, 0.f), make_float2(1.f, 0.f)};
  if (dim >= DIM - N_ROT && dim < DIM) out.low = turn_of(at, freq[pair]);
  if (dim + 2 >= DIM - N_ROT && dim < DIM) out.high = turn_of(at, freq[dim + 2 == DIM - N_ROT ? 0 : pair + 1]);
  return out;
}

__device__ __forceinline__ float square_of(float4 x) { return (x.x * x.x + x.y * x.y) + (x.z * x.z + x.w * x.w); }

__device__ __forceinline__ float scale_of(float squares, float eps) { return __fdiv_rn(1.f, __fsqrt_rn(squares / DIM + eps)); }

__device__ __forceinline__ uint2 pack4(float4 x) { return make_uint2(pack(x.x, x.y), pack(x.z, x.w)); }

struct alignas(16) Shared {
  u16 q[HEADS][STRIDE];
  u16 keys[BUFFERS][KEYS][STRIDE];
  u16 p[HEADS][P_STRIDE];
  const u16* source[BUFFERS][KEYS];  // null: nobody
  float2 angles[N_ROT / 2];  // of the row
  float top[N_WARPS][HEADS], sum[KEYS / 16][HEADS];
  float run_m[HEADS], run_l[HEADS], new_m[SUBS][HEADS], keep[SUBS][HEADS];
  int n_tile[MAX_ROW];     // of each row of this launch
  int first[MAX_ROW + 1];  // its first part
  int warp_sum[WARPS];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "the launcher asks for another size");

struct Args {
  const float* q;
  const double* freq;
  const u16 *own, *ring, *rows;
  Blocks blocks;
  const i64* positions;
  const int *row_seq, *seq_start, *seq_slot, *chosen;
  float *part, *part_ml;
  int* fault;
  i64 q_step;
  int top_k, n_head, n_slot, n_ring, window, first, n_row, n_all, max_part, per_part;
  float scale, eps;
};

// Compressed rows that a row may have in its list.
__device__ __forceinline__ int n_listed(const Args& a, int row, int seq) {
  if (a.blocks.ratio == 0) return 0;
  const int seen = a.blocks.seen(a.positions[row], OP_ID, seq, a.fault);
  return a.chosen == nullptr ? seen : min(seen, a.top_k);
}

__device__ __forceinline__ int window_tiles(int window) { return (window + UNIT - 1) / UNIT * (UNIT / KEYS); }

__device__ __forceinline__ int tiles_of(int window, int n_list) { return window_tiles(window) + (n_list + KEYS - 1) / KEYS; }

__device__ __forceinline__ int tiles_per_part(int n_tile, int least) {
  constexpr int EACH = UNIT / KEYS;
  return max(least, ((n_tile + EACH - 1) / EACH + MAX_PART - 1) / MAX_PART) * EACH;
}

// Parts of every row, and those before it.
__device__ __forceinline__ void find_parts(Shared& s, const Args& a) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int before = 0;
  for (int base = 0; base < a.n_row; base += THREADS) {
    const int i = base + threadIdx.x, row = a.first + i, seq = i < a.n_row ? a.row_seq[row] : -1;
    const int n_tile = seq < 0 ? 0 : tiles_of(a.window, n_listed(a, row, seq));
    const int per = tiles_per_part(n_tile, a.per_part);
    int mine = (n_tile + per - 1) / per;
    if (clamped(mine, a.max_part + 1, OP_ID, seq, a.fault) != mine) mine = 0;
    int sum = mine;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int other = __shfl_up_sync(ALL, sum, d);
      if (lane >= d) sum += other;
    }
    if (lane == 31) s.warp_sum[warp] = sum;
    __syncthreads();
    int all = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      sum += w < warp ? s.warp_sum[w] : 0;
      all += s.warp_sum[w];
    }
    if (i < a.n_row) s.first[i] = before + sum - mine, s.n_tile[i] = n_tile;
    before += all;
    __syncthreads();
  }
  if (threadIdx.x == 0) s.first[a.n_row] = before;
  __syncthreads();
}

// Where key i of tile `tile` of a row's list is.
__device__ __forceinline__ const u16* source_of(const Args& a, int row, int seq, int tile, int i) {
  const int start = clamped(a.seq_start[seq], a.n_all, OP_ID, seq, a.fault), n_window = window_tiles(a.window);
  if (tile < n_window) {
    const int back = tile * KEYS + i;  // places of the window, counted from its first
    const i64 at = a.positions[row] - (a.window - 1) + back, n_past = a.positions[start];
    if (back >= a.window || at < 0) return nullptr;
    if (at >= n_past) {
      const int own = clamped(at - n_past > a.n_all ? -1 : start + static_cast<int>(at - n_past), a.n_all, OP_ID, seq, a.fault);
      return a.own + static_cast<i64>(own) * DIM;
    }
    const int slot = clamped(a.seq_slot[seq], a.n_slot, OP_ID, seq, a.fault);
    return a.ring + (static_cast<i64>(slot) * a.n_ring + at % a.n_ring) * DIM;
  }
  int j = (tile - n_window) * KEYS + i;
  const int seen = a.blocks.seen(a.positions[row], OP_ID, seq, a.fault);
  if (a.chosen != nullptr) j = j < a.top_k ? a.chosen[static_cast<i64>(row) * a.top_k + j] : -1;
  if (j == -1 || (a.chosen == nullptr && j >= seen)) return nullptr;
  if (clamped(j, seen, OP_ID, seq, a.fault) != j) return nullptr;
  return a.rows + a.blocks.row(seq, j, OP_ID, a.fault) * DIM;
}

// The tile's keys on their way to shared memory, a chunk of dims after another.
__device__ __forceinline__ void gather(Shared& s, int buffer) {
  constexpr int PIECES = CHUNK_DIMS / 8;
#pragma unroll 1
  for (int c = 0; c < CHUNKS; c++) {
#pragma unroll 4
    for (int i = threadIdx.x; i < KEYS * PIECES; i += THREADS) {
      const int key = i / PIECES, dim = c * CHUNK_DIMS + i % PIECES * 8;
      const u16* const from = s.source[buffer][key];
      u16* const to = &s.keys[buffer][key][dim];
      if (from == nullptr)
        *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
      else
        copy16(shared_address(to), from + dim);
    }
    copies_commit();
  }
}

__device__ __forceinline__ void wait_for_chunk(int c) {  // the wait's number is part of the instruction
  constexpr int BEHIND = BUFFERS == 2 ? CHUNKS : 0;       // the next tile's
  const int left = CHUNKS - 1 - c;
  if (left >= 3)
    copies_wait<3 + BEHIND>();
  else if (left == 2)
    copies_wait<2 + BEHIND>();
  else if (left == 1)
    copies_wait<1 + BEHIND>();
  else
    copies_wait<BEHIND>();
}

// Normed, turned and rounded: a warp has a head at a time. The row's angles are there.
__device__ __forceinline__ void load_queries(Shared& s, const Args& a, int row, int head) {
  constexpr int QUADS = DIM / 4, EACH = (QUADS + 31) / 32;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 2
  for (int h = warp; h < HEADS; h += WARPS) {
    const float* const from = a.q + row * a.q_step + (head + h) * DIM;
    float4 x[EACH];
    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const bool real = head + h < a.n_head && lane + 32 * i < QUADS;
      x[i] = make_float4(0.f, 0.f, 0.f, 0.f);
      if (real) x[i] = reinterpret_cast<const float4*>(from)[lane + 32 * i];
      squares += square_of(x[i]);
    }
    const float by = scale_of(warp_sum(squares), a.eps);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int dim = 4 * (lane + 32 * i), pair = max((dim - (DIM - N_ROT)) / 2, 0);
      if (dim >= DIM) break;
      Turns turns = {make_float2(1.f, 0.f), make_float2(1.f, 0.f)};
      if (dim >= DIM - N_ROT) turns.low = s.angles[pair];
      if (dim + 2 >= DIM - N_ROT) turns.high = s.angles[dim + 2 == DIM - N_ROT ? 0 : pair + 1];
      const float4 y = make_float4(x[i].x * by, x[i].y * by, x[i].z * by, x[i].w * by);
      *reinterpret_cast<uint2*>(&s.q[h][dim]) = pack4(turned4(y, dim, turns));
    }
  }
}

// S of this warp's heads and keys.
__device__ __forceinline__ void scores(const Shared& s, int buffer, int m_warp, int n_warp, float (&acc)[MT][NT][4]) {
  const int lane = threadIdx.x % 32;
  const u32 q = shared_address(&s.q[m_warp * MT * 16 + lane % 16][lane / 16 * 8]);
  const u32 k = shared_address(&s.keys[buffer][n_warp * WARP_KEYS + lane / 16 * 8 + lane % 8][lane / 8 % 2 * 8]);
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) acc[m][n][e] = 0.f;
#pragma unroll 1
  for (int c = 0; c < CHUNKS; c++) {
    wait_for_chunk(c);
    __syncthreads();
#pragma unroll
    for (int step = 0; step < CHUNK_DIMS / 16; step++) {
      const u32 at = 2 * (c * CHUNK_DIMS + 16 * step);
      Quad x[MT];
#pragma unroll
      for (int m = 0; m < MT; m++) x[m] = matrices(q + at + m * 32 * STRIDE);
#pragma unroll
      for (int n = 0; n < NT; n += 2) {
        const Quad y = matrices(k + at + n * 16 * STRIDE);
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
          for (int i = 0; i < 2; i++) {
            float(&d)[4] = acc[m][n + i];
            SPARSE_MMA(d, x[m].x[0], x[m].x[1], x[m].x[2], x[m].x[3], y.x[2 * i], y.x[2 * i + 1], d[0], d[1], d[2], d[3]);
          }
      }
    }
  }
}

// Scores in log2 units, -inf where there is no key, and the warp's maximum for each head.
__device__ __forceinline__ void mask_and_top(Shared& s, int buffer, int m_warp, int n_warp, float scale, float (&acc)[MT][NT][4]) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  float top[MT][2];
#pragma unroll
  for (int m = 0; m < MT; m++) top[m][0] = top[m][1] = none_seen();
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const bool real = s.source[buffer][n_warp * WARP_KEYS + 8 * n + 2 * t + e] != nullptr;
#pragma unroll
      for (int m = 0; m < MT; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          float& x = acc[m][n][2 * half + e];
          x = real ? x * scale : none_seen();
          top[m][half] = fmaxf(top[m][half], x);
        }
    }
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float& x = top[m][half];
      x = fmaxf(x, __shfl_xor_sync(ALL, x, 1));
      x = fmaxf(x, __shfl_xor_sync(ALL, x, 2));
      if (t == 0) s.top[n_warp][(m_warp * MT + m) * 16 + 8 * half + g] = x;
    }
}

// Weights exp2(S - maximum so far) to shared memory, as T, and sums of them over 16 keys each, whoever has how many.
__device__ __forceinline__ void weigh(Shared& s, int m_warp, int n_warp, float (&acc)[MT][NT][4]) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, sub = n_warp / SUB_WARPS;
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int head = (m_warp * MT + m) * 16 + 8 * half + g;
      float top = s.run_m[head], before = top;
#pragma unroll
      for (int w = 0; w < N_WARPS; w++) {
        if (w / SUB_WARPS > sub) break;
        if (w % SUB_WARPS == 0) before = top;
        top = fmaxf(top, s.top[w][head]);
      }
      const float at = finite_or_zero(top);
#pragma unroll
      for (int n = 0; n < NT; n += 2) {
        float sum = 0.f;
#pragma unroll
        for (int i = n; i < n + 2; i++) {
          const float x = exp2_fast(acc[m][i][2 * half] - at), y = exp2_fast(acc[m][i][2 * half + 1] - at);
          *reinterpret_cast<u32*>(&s.p[head][n_warp * WARP_KEYS + 8 * i + 2 * t]) = pack(x, y);
          sum += x + y;
        }
        sum += __shfl_xor_sync(ALL, sum, 1);
        sum += __shfl_xor_sync(ALL, sum, 2);
        if (t == 0) s.sum[(n_warp * WARP_KEYS + 8 * n) / 16][head] = sum;
      }
      if (t == 0 && n_warp % SUB_WARPS == 0) s.new_m[sub][head] = top, s.keep[sub][head] = exp2_fast(before - at);
    }
}

// O of all heads and this warp's dims: what was there counts less, by how much the maximum has grown.
__device__ __forceinline__ void values(const Shared& s, int buffer, int warp, float (&out)[TILES][DT][4]) {
  const int lane = threadIdx.x % 32, g = lane / 4;
  const u32 p = shared_address(&s.p[lane % 16][lane / 16 * 8]);
  const u32 v = shared_address(&s.keys[buffer][lane % 16][warp * WARP_DIMS + lane / 16 * 8]);
#pragma unroll 1
  for (int step = 0; step < KEYS / 16; step++) {
    if (step % (SUB / 16) == 0) {
#pragma unroll
      for (int m = 0; m < TILES; m++) {
        const float* const of = s.keep[step / (SUB / 16)];
        const float keep[2] = {of[16 * m + g], of[16 * m + 8 + g]};
#pragma unroll
        for (int n = 0; n < DT; n++)
#pragma unroll
          for (int e = 0; e < 4; e++) out[m][n][e] *= keep[e / 2];
      }
    }
    Quad x[TILES];
#pragma unroll
    for (int m = 0; m < TILES; m++) x[m] = matrices(p + 32 * step + m * 32 * P_STRIDE);
#pragma unroll
    for (int n = 0; n < DT; n += 2) {
      const Quad y = matrices_turned(v + step * 32 * STRIDE + 16 * n);
#pragma unroll
      for (int m = 0; m < TILES; m++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          float(&d)[4] = out[m][n + i];
          SPARSE_MMA(d, x[m].x[0], x[m].x[1], x[m].x[2], x[m].x[3], y.x[2 * i], y.x[2 * i + 1], d[0], d[1], d[2], d[3]);
        }
    }
  }
}

__device__ __forceinline__ void store(const Shared& s, const Args& a, i64 part, int head, float (&out)[TILES][DT][4]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int m = 0; m < TILES; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int h = head + 16 * m + 8 * half + g;
      float* const to = a.part + (part * a.n_head + h) * DIM + warp * WARP_DIMS + 2 * t;
      if (h < a.n_head) {
#pragma unroll
        for (int n = 0; n < DT; n++)
          *reinterpret_cast<float2*>(to + 8 * n) = make_float2(out[m][n][2 * half], out[m][n][2 * half + 1]);
      }
    }
  for (int i = threadIdx.x; i < HEADS && head + i < a.n_head; i += THREADS)
    *reinterpret_cast<float2*>(a.part_ml + (part * a.n_head + head + i) * 2) = make_float2(s.run_m[i], s.run_l[i]);
}

// The tile's keys to L2, while the predecessor ends. What it writes is read later all the same.
__device__ __forceinline__ void ask_for_keys(const Shared& s, int buffer) {
#if __CUDA_ARCH__ >= 900
  for (int k = threadIdx.x; k < KEYS; k += THREADS)  // those whose sources the thread has found
    if (s.source[buffer][k] != nullptr) bulk_prefetch(s.source[buffer][k], DIM * 2);
#endif
}

// waited: for the predecessor, on which sources hang only where rows are chosen.
__device__ __forceinline__ void attend_part(Shared& s, const Args& a, int i, int part, int head, bool load_q, bool& waited) {
  const int warp = threadIdx.x / 32, m_warp = warp / N_WARPS, n_warp = warp % N_WARPS;
  const int row = a.first + i, seq = a.row_seq[row], per = tiles_per_part(s.n_tile[i], a.per_part);
  const int begin = part * per, end = min(s.n_tile[i], begin + per);
  float out[TILES][DT][4] = {};
  for (int h = threadIdx.x; h < HEADS; h += THREADS) s.run_m[h] = none_seen(), s.run_l[h] = 0.f;
#pragma unroll 1
  for (int tile = begin; tile < end; tile++) {
    const int buffer = BUFFERS == 2 ? (tile - begin) % 2 : 0;
    if (BUFFERS == 1 || tile == begin) {
      if (!waited && a.chosen != nullptr && tile >= window_tiles(a.window)) wait_for_predecessor(), waited = true;
      for (int k = threadIdx.x; k < KEYS; k += THREADS) s.source[buffer][k] = source_of(a, row, seq, tile, k);
      if (load_q)
        for (int k = THREADS - 1 - threadIdx.x; k < N_ROT / 2; k += THREADS)  // other threads than the sources'
          s.angles[k] = turn_of(static_cast<double>(a.positions[row]), a.freq[k]);
      if (!waited) ask_for_keys(s, buffer), wait_for_predecessor(), waited = true;
      __syncthreads();
      gather(s, buffer);
    }
    if (load_q) load_queries(s, a, row, head);
    load_q = false;
    if (BUFFERS == 2) {
      const bool more = tile + 1 < end;
      for (int k = threadIdx.x; more && k < KEYS; k += THREADS) s.source[buffer ^ 1][k] = source_of(a, row, seq, tile + 1, k);
      __syncthreads();  // sources are known, and the tile before is multiplied
      if (more) gather(s, buffer ^ 1);
      for (int c = 0; !more && c < CHUNKS; c++) copies_commit();  // of nothing: waits count
    }
    float acc[MT][NT][4];
    scores(s, buffer, m_warp, n_warp, acc);
    mask_and_top(s, buffer, m_warp, n_warp, a.scale, acc);
    __syncthreads();
    weigh(s, m_warp, n_warp, acc);
    __syncthreads();
    for (int h = threadIdx.x; h < HEADS; h += THREADS) {
#pragma unroll
      for (int sub = 0; sub < SUBS; sub++) {
        float sum = 0.f;
#pragma unroll
        for (int w = 0; w < SUB / 16; w++) sum += s.sum[sub * (SUB / 16) + w][h];
        s.run_l[h] = fmaf(s.run_l[h], s.keep[sub][h], sum);
      }
      s.run_m[h] = s.new_m[SUBS - 1][h];
    }
    values(s, buffer, warp, out);  // keys are replaced no sooner than all know their sources
  }
  store(s, a, static_cast<i64>(i) * a.max_part + part, head, out);
  __syncthreads();
}

// Grid: any number of CTAs; each finds its items, a part of a row for HEADS of its heads.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
sparse_parts(const float* q, const double* freq, const u16* own, const u16* ring, const u16* rows, const i64* table, const i64* positions,
             const int* row_seq, const int* seq_start, const int* seq_slot, const int* chosen, float* part, float* part_ml, int* fault,
             i64 q_step, int n_col, int page_size, int ratio, int per_page, int n_page, int top_k, int n_head, int n_slot, int n_ring,
             int window, int first, int n_row, int n_all, int max_part, int per_part, float scale, float eps) {
  let_successor_start();
  extern __shared__ __align__(16) char raw[];
  Shared& s = *reinterpret_cast<Shared*>(raw);
  const Args a = {q, freq, own, ring, rows, {table, n_col, page_size, ratio, per_page, n_page}, positions, row_seq, seq_start, seq_slot,
                  chosen, part, part_ml, fault, q_step, top_k, n_head, n_slot, n_ring, window, first, n_row, n_all, max_part, per_part, scale, eps};
  find_parts(s, a);  // the layout was there before
  bool waited = false;
  const int groups = (n_head + HEADS - 1) / HEADS, total = s.first[n_row] * groups;
  int loaded = -1;
#pragma unroll 1
  for (int index = static_cast<int>(static_cast<i64>(total) * blockIdx.x / gridDim.x);
       index < static_cast<int>(static_cast<i64>(total) * (blockIdx.x + 1) / gridDim.x); index++) {  // side by side: queries stay
    const int at = index / groups, group = index % groups;
    int i = 0;
#pragma unroll
    for (int step = MAX_ROW / 2; step > 0; step /= 2)  // the last row whose parts begin at or before this one
      if (i + step < n_row && s.first[i + step] <= at) i += step;
    attend_part(s, a, i, at - s.first[i], group * HEADS, loaded != i * groups + group, waited);
    loaded = i * groups + group;
  }
  if (!waited) wait_for_predecessor();  // who comes behind counts on it
}

#include "sparse_merge.cuh"
