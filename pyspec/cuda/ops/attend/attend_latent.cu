// attend_latent: attention of many heads over one key head, whose keys are their values, too: the first N_VALUE of DIM dims (latent attention).
//
//   q            [row, n_head, DIM]      f32    contiguous, after rope
//   k            [pool row, ...]         codes  K_KIND, see kv_kinds.cuh: any but f32
//   k_scale      [pool row, ...]         f16    factors of kinds that have any
//   page_table   [seq, n_page_col]       int64
//   positions, lo, hi  [row]             int64  row sees lo <= p < hi, and those of `window`, see seen_by
//   row_seq      [row]                   int32  -1: padding; comes out as zeros
//   seq_start    [seq + 1]               int32
//   part         [tile - first_tile, max_part, COLS, N_VALUE]  f32, part_ml [tile - first_tile, max_part, COLS, 2] f32: sums over a
//                part's keys; maximum (log2) and sum of weights
//   out          [row, n_head, N_VALUE]  f32
//   fault        [5]                     int32  see bounds.cuh
//
// A column is a row and a head; a tile is COLS columns of a sequence, one after another. A part is a run of keys at absolute positions:
// `least` of them, or as many times two as leave a row at most `most_part` parts. So parts hang on the row's own length alone, and with
// them its bits; if rows of a tile stand on both sides of such a length, the tile goes over its keys once for each size of parts. A CTA
// takes some parts of a tile, KEYS keys after the other: they come to shared memory once, for S = Q K and for O = P K, while those before
// are multiplied if BUFFERS is 2. For S a warp has MT * 16 columns of 16 keys, for O all columns of WARP_DIMS dims. No build has another
// order of sums.
//
// Rows in shared memory are whole lines of 128 bytes. Their 16-byte pieces are permuted by the row's number, so that eight rows lie in different
// banks.
// Bound by: products with 64 columns (1,088 multiply-adds of a column for the 1,152 bytes of a key); bytes with 16.
//
// Macros: DIM, N_VALUE, COLS (16, 32 or 64), WARPS (4 or 8), BUFFERS (1 or 2), K_KIND, OP_ID, SHARED_BYTES; RUN: keys that lie one behind
// another (16), 1 where each has a page of its own.
#define V_KIND K_KIND
#include "kv_types.cuh"
#include "bounds.cuh"
#include "attend_fold.cuh"
#include "mma.cuh"
#include "matrices.cuh"
#include "overlap.cuh"

#ifndef RUN
#define RUN 16
#endif

constexpr int THREADS = 32 * WARPS, KEYS = 64;
constexpr int ROW = (DIM + 63) / 64 * 64;                     // values of a row in shared memory
constexpr int STEPS = (DIM + 15) / 16, PIECES = 2 * STEPS;    // pieces of 16 bytes that products read; behind DIM they are zeros
constexpr int TILES = COLS / 16, N_WARPS = 4, M_WARPS = WARPS / N_WARPS, MT = TILES / M_WARPS;
constexpr int WARP_DIMS = (N_VALUE / 16 + WARPS - 1) / WARPS * 16, DT = WARP_DIMS / 8;
constexpr u32 ALL = 0xffffffffu;
static_assert(DIM % 8 == 0 && N_VALUE % 16 == 0 && N_VALUE <= DIM, "whole pieces");
static_assert(MT * M_WARPS == TILES && M_WARPS * N_WARPS == WARPS, "tiles do not divide");

#if K_KIND == 2
#define LATENT_MMA mma_bf16
#define LATENT_T "bf16"
#else
#define LATENT_MMA mma_f16
#define LATENT_T "f16"
#endif

__device__ __forceinline__ u32 pack(float low, float high) {
  u32 both;
  asm("cvt.rn." LATENT_T "x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

struct alignas(16) Shared {
  u16 q[COLS][ROW];
  u16 keys[BUFFERS][KEYS][ROW];
  u16 p[COLS][KEYS];
  float top[N_WARPS][COLS], sum[N_WARPS][COLS];
  float run_m[2][COLS], run_l[COLS];  // maxima before this tile and behind it, in turn
  int rows[2][KEYS / RUN];            // pool row of the first key of every run of a tile
  int seq, tile;
  int hull[3];  // of the columns that see keys: least lo, largest and least hi
};
static_assert(sizeof(Shared) == SHARED_BYTES, "the launcher asks for another size");

struct Args {
  const float* q;
  const Codes<K_KIND>::Plane* k;
  const u16* k_scale;
  const i64 *page_table, *positions, *lo, *hi;
  const int *row_seq, *seq_start;
  int* fault;
  int n_row, n_seq, n_head, n_page_col, page_size, n_page, window, most_part, least;
  float scale;  // times log2(e)
};

__device__ __forceinline__ int width_of(const int* seq_start, int n_row, int seq) {
  const int start = seq_start[seq], end = seq_start[seq + 1];
  return start >= 0 && end <= n_row && start < end ? end - start : 0;
}

__device__ __forceinline__ int tiles_of(int width, int n_head) { return (width * n_head + COLS - 1) / COLS; }

// Keys of a part of a row that sees `hi` of them.
__device__ __forceinline__ int part_keys(int hi, int least, int most_part) {
  int keys = least;
  while (static_cast<i64>(keys) * most_part < hi) keys *= 2;
  return keys;
}

// The tile's sequence and its number there; -1: there is none. A warp's work.
__device__ __forceinline__ void find_tile(Shared& s, const Args& a, int tile) {
  const int lane = threadIdx.x;
  int before = 0, found = -1, own = 0;
  for (int i0 = 0; i0 < a.n_seq && found < 0; i0 += 32) {
    const int i = i0 + lane, n = i < a.n_seq ? tiles_of(width_of(a.seq_start, a.n_row, i), a.n_head) : 0;
    int upto = n;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
      const int left = __shfl_up_sync(ALL, upto, d);
      if (lane >= d) upto += left;
    }
    const bool is_own = tile >= before + upto - n && tile < before + upto;
    const u32 who = __ballot_sync(ALL, is_own);
    if (who != 0) found = i0 + __ffs(static_cast<int>(who)) - 1;
    own = __shfl_sync(ALL, tile - (before + upto - n), who != 0 ? __ffs(static_cast<int>(who)) - 1 : 0);
    before += __shfl_sync(ALL, upto, 31);
  }
  if (lane == 0) s.seq = found, s.tile = own;
}

struct Tile {
  int seq, first, n_col;  // first: number of its first column among those of all rows; columns that are real
};

// What a column sees.
__device__ __forceinline__ Seen column(const Args& a, const Tile& t, int c) {
  if (c >= t.n_col) return {0x7fffffff, 0};
  const int row = (t.first + c) / a.n_head;
  if (a.row_seq[row] != t.seq) return {0x7fffffff, 0};
  return seen_by(a.positions[row], a.lo[row], a.hi[row], a.window, a.n_page_col * a.page_size);
}

// The same in a pass over parts of `keys` keys, which may not be the column's.
__device__ __forceinline__ Seen column_of_pass(const Args& a, const Tile& t, int c, int keys) {
  const Seen own = column(a, t, c);
  return part_keys(own.hi, a.least, a.most_part) == keys ? own : Seen{0x7fffffff, 0};
}

__device__ __forceinline__ void find_hull(Shared& s, const Args& a, const Tile& t) {
  if (threadIdx.x >= 32) return;
  int lo = 0x7fffffff, most = 0, least = 0x7fffffff;
  for (int c = threadIdx.x; c < COLS; c += 32) {
    const Seen own = column(a, t, c);
    if (own.hi > 0) lo = min(lo, own.lo), most = max(most, own.hi), least = min(least, own.hi);
  }
  const int hull[3] = {__reduce_min_sync(ALL, lo), __reduce_max_sync(ALL, most), __reduce_min_sync(ALL, least)};
  if (threadIdx.x == 0)
    for (int i = 0; i < 3; i++) s.hull[i] = hull[i];
}

// Where the keys of a tile lie, a thread for each run of them. Pages that no column sees are not looked at.
__device__ __forceinline__ void find_rows(Shared& s, const Args& a, const Tile& t, int base) {
  const int i = threadIdx.x;
  if (i >= KEYS / RUN) return;
  const int p = base + RUN * i;
  int row = 0;
  if (p < s.hull[1] && p + RUN > s.hull[0]) {
    const i64 page = a.page_table[static_cast<i64>(t.seq) * a.n_page_col + p / a.page_size];
    const int safe = clamped(page < 0 || page > 0x7fffffff ? -1 : static_cast<int>(page), a.n_page, OP_ID, t.seq, a.fault);
    row = safe * a.page_size + p % a.page_size;
  }
  s.rows[base / KEYS % 2][i] = row;
}

// The piece's place in a permuted row.
__device__ __forceinline__ int place(int row, int piece) { return 8 * (piece ^ (row & 7)); }

#if K_KIND >= 3
// Eight values of a row from dim on, as tensor cores take them.
__device__ __forceinline__ uint4 widened(const u8* codes, const u16* factors, int dim) {
  float x[8];
#if K_KIND < 5
  const uint2 both = *reinterpret_cast<const uint2*>(codes + dim);
#if K_KIND == 3
  const float by = f16_to_f32(factors[dim / 32]);
#endif
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const u8 code = static_cast<u8>((i < 4 ? both.x : both.y) >> (8 * (i % 4)));
#if K_KIND == 3
    x[i] = static_cast<float>(static_cast<i8>(code)) * by;
#else
    x[i] = e4m3_to_f32(code);
#endif
  }
#else
#pragma unroll
  for (int i = 0; i < 8; i++) x[i] = load_block<K_KIND, DIM>(codes, factors, dim / 32, dim % 32 + i);
#endif
  return make_uint4(pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7]));
}
#endif

// Keys `base` to base + KEYS - 1 on their way to shared memory; zeros where no column sees them.
__device__ __forceinline__ void gather(Shared& s, const Args& a, int base, int buffer) {
  constexpr int CODES = n_code(K_KIND, DIM);
#pragma unroll 4
  for (int i = threadIdx.x; i < KEYS * PIECES; i += THREADS) {
    const int key = i / PIECES, piece = i % PIECES;
    const i64 row = s.rows[base / KEYS % 2][key / RUN] + key % RUN;
    u16* const to = &s.keys[buffer][key][place(key, piece)];
    if (base + key < s.hull[0] || base + key >= s.hull[1] || (DIM % 16 != 0 && 8 * piece >= DIM)) {
      *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
    } else {
#if K_KIND < 3
      copy16(shared_address(to), a.k + row * CODES + 8 * piece);
#else
      *reinterpret_cast<uint4*>(to) = widened(a.k + row * CODES, a.k_scale + row * (DIM / 32 * K_FACTORS), 8 * piece);
#endif
    }
  }
  copies_commit();
}

// Scaled and rounded to the type of keys.
__device__ __forceinline__ void load_queries(Shared& s, const Args& a, const Tile& t) {
#pragma unroll 4
  for (int i = threadIdx.x; i < COLS * PIECES; i += THREADS) {
    const int c = i / PIECES, piece = i % PIECES;
    const float4* const from = reinterpret_cast<const float4*>(a.q + static_cast<i64>(t.first + (c < t.n_col ? c : 0)) * DIM + 8 * piece);
    float4 x = make_float4(0.f, 0.f, 0.f, 0.f), y = x;
    if (DIM % 16 == 0 || 8 * piece < DIM) x = from[0], y = from[1];
    *reinterpret_cast<uint4*>(&s.q[c][place(c, piece)]) = make_uint4(pack(x.x * a.scale, x.y * a.scale), pack(x.z * a.scale, x.w * a.scale),
                                                                     pack(y.x * a.scale, y.y * a.scale), pack(y.z * a.scale, y.w * a.scale));
  }
}

// S of this warp's columns and 16 keys.
__device__ __forceinline__ void scores(const Shared& s, int buffer, int m_warp, int n_warp, float (&acc)[MT][2][4]) {
  const int lane = threadIdx.x % 32, turn = lane % 8;
  const u32 q = shared_address(s.q[m_warp * MT * 16 + lane % 16]);
  const u32 k = shared_address(s.keys[buffer][n_warp * 16 + lane / 16 * 8 + lane % 8]);
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) acc[m][n][e] = 0.f;
#pragma unroll 4
  for (int step = 0; step < STEPS; step++) {
    const Quad y = matrices(k + 16 * ((2 * step + lane / 8 % 2) ^ turn));
#pragma unroll
    for (int m = 0; m < MT; m++) {
      const Quad x = matrices(q + m * 32 * ROW + 16 * ((2 * step + lane / 16) ^ turn));
#pragma unroll
      for (int n = 0; n < 2; n++) {
        float(&d)[4] = acc[m][n];
        LATENT_MMA(d, x.x[0], x.x[1], x.x[2], x.x[3], y.x[2 * n], y.x[2 * n + 1], d[0], d[1], d[2], d[3]);
      }
    }
  }
}

// -inf where a column does not see a key, and the warp's maximum for each column. first: the warp's first key.
__device__ __forceinline__ void mask_and_top(Shared& s, int m_warp, int n_warp, int first, const Seen (&seen)[MT][2],
                                             float (&acc)[MT][2][4]) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float top = none_seen();
#pragma unroll
      for (int n = 0; n < 2; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const int key = first + 8 * n + 2 * t + e;
          float& x = acc[m][n][2 * half + e];
          if (key < seen[m][half].lo || key >= seen[m][half].hi) x = none_seen();
          top = fmaxf(top, x);
        }
      top = fmaxf(top, __shfl_xor_sync(ALL, top, 1));
      top = fmaxf(top, __shfl_xor_sync(ALL, top, 2));
      if (t == 0) s.top[n_warp][(m_warp * MT + m) * 16 + 8 * half + g] = top;
    }
}

// Weights exp2(S - maximum so far) to shared memory, rounded, and the warp's sums of them. turn: which of run_m is the one before.
__device__ __forceinline__ void weigh(Shared& s, int m_warp, int n_warp, int turn, float (&acc)[MT][2][4]) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int c = (m_warp * MT + m) * 16 + 8 * half + g;
      float top = s.run_m[turn][c];
#pragma unroll
      for (int w = 0; w < N_WARPS; w++) top = fmaxf(top, s.top[w][c]);
      const float at = finite_or_zero(top);
      float sum = 0.f;
#pragma unroll
      for (int n = 0; n < 2; n++) {
        const float x = exp2_fast(acc[m][n][2 * half] - at), y = exp2_fast(acc[m][n][2 * half + 1] - at);
        *reinterpret_cast<u32*>(&s.p[c][place(c, 2 * n_warp + n) + 2 * t]) = pack(x, y);
        sum += x + y;
      }
      sum += __shfl_xor_sync(ALL, sum, 1);
      sum += __shfl_xor_sync(ALL, sum, 2);
      if (t == 0) s.sum[n_warp][c] = sum;
      if (t == 0 && n_warp == 0) s.run_m[turn ^ 1][c] = top;
    }
}

__device__ __forceinline__ float kept(const Shared& s, int turn, int c) {
  return exp2_fast(s.run_m[turn][c] - finite_or_zero(s.run_m[turn ^ 1][c]));
}

// O of all columns and this warp's dims: what was there counts less, by how much the maximum has grown.
__device__ __forceinline__ void values(const Shared& s, int buffer, int warp, int turn, float (&out)[TILES][DT][4]) {
  const int lane = threadIdx.x % 32, g = lane / 4, by = lane % 8;
  const u32 p = shared_address(s.p[lane % 16]);
  const u32 v = shared_address(s.keys[buffer][lane % 16]);
#pragma unroll
  for (int m = 0; m < TILES; m++) {
    const float keep[2] = {kept(s, turn, 16 * m + g), kept(s, turn, 16 * m + 8 + g)};
#pragma unroll
    for (int n = 0; n < DT; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) out[m][n][e] *= keep[e / 2];
  }
#pragma unroll 1
  for (int step = 0; step < KEYS / 16; step++) {
    Quad x[TILES];
#pragma unroll
    for (int m = 0; m < TILES; m++) x[m] = matrices(p + m * 32 * KEYS + 16 * ((2 * step + lane / 16) ^ by));
#pragma unroll
    for (int n = 0; n < DT; n += 2) {
      const int piece = (warp * WARP_DIMS + 8 * n) / 8 + lane / 16;
      if (N_VALUE % (16 * WARPS) != 0 && warp * WARP_DIMS + 8 * n >= N_VALUE) break;
      const Quad y = matrices_turned(v + step * 32 * ROW + 16 * (piece ^ by));
#pragma unroll
      for (int m = 0; m < TILES; m++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          float(&d)[4] = out[m][n + i];
          LATENT_MMA(d, x[m].x[0], x[m].x[1], x[m].x[2], x[m].x[3], y.x[2 * i], y.x[2 * i + 1], d[0], d[1], d[2], d[3]);
        }
    }
  }
}

// part, part_ml: of the tile's part. one_size: all columns have parts of this size.
__device__ __forceinline__ void store(const Shared& s, const Args& a, const Tile& of, int keys, bool one_size, int turn, float* part,
                                      float* part_ml, float (&out)[TILES][DT][4]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int m = 0; m < TILES; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int c = 16 * m + 8 * half + g;
      if (c >= of.n_col || (!one_size && column_of_pass(a, of, c, keys).hi == 0)) continue;
      float* const to = part + c * N_VALUE + warp * WARP_DIMS + 2 * t;
#pragma unroll
      for (int n = 0; n < DT; n++)
        if (N_VALUE % (16 * WARPS) == 0 || warp * WARP_DIMS + 8 * n < N_VALUE)
          *reinterpret_cast<float2*>(to + 8 * n) = make_float2(out[m][n][2 * half], out[m][n][2 * half + 1]);
    }
  for (int c = threadIdx.x; c < COLS; c += THREADS)
    if (c < of.n_col && (one_size || column_of_pass(a, of, c, keys).hi != 0))
      *reinterpret_cast<float2*>(part_ml + 2 * c) = make_float2(s.run_m[turn][c], s.run_l[c]);
}

// Keys from `begin` to before `end`, which are of one part.
__device__ __forceinline__ void attend_part(Shared& s, const Args& a, const Tile& of, int keys, int begin, int end, bool one_size, float* part,
                                            float* part_ml) {
  const int warp = threadIdx.x / 32, m_warp = warp / N_WARPS, n_warp = warp % N_WARPS, g = threadIdx.x % 32 / 4;
  float out[TILES][DT][4] = {};
  Seen seen[MT][2];
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) seen[m][half] = column_of_pass(a, of, (m_warp * MT + m) * 16 + 8 * half + g, keys);
  for (int c = threadIdx.x; c < COLS; c += THREADS) s.run_m[0][c] = none_seen(), s.run_l[c] = 0.f;
  const int first = begin / KEYS * KEYS;
  find_rows(s, a, of, first);
  find_rows(s, a, of, first + KEYS);
  __syncthreads();
  if (BUFFERS == 2) gather(s, a, first, 0);
  int turn = 0;
#pragma unroll 1
  for (int base = first; base < end; base += KEYS, turn ^= 1) {
    const int buffer = BUFFERS == 2 ? turn : 0;
    if (BUFFERS == 1) gather(s, a, base, 0);
    copies_wait<0>();
    __syncthreads();  // these keys are there, and those before are multiplied
    if (BUFFERS == 2 && base + KEYS < end) gather(s, a, base + KEYS, buffer ^ 1);
    if (base + 2 * KEYS < end) find_rows(s, a, of, base + 2 * KEYS);  // in place of these keys', which are known no longer
    float acc[MT][2][4];
    scores(s, buffer, m_warp, n_warp, acc);
    mask_and_top(s, m_warp, n_warp, base + 16 * n_warp, seen, acc);
    __syncthreads();
    weigh(s, m_warp, n_warp, turn, acc);
    __syncthreads();
    for (int c = threadIdx.x; c < COLS; c += THREADS) {
      float sum = 0.f;
#pragma unroll
      for (int w = 0; w < N_WARPS; w++) sum += s.sum[w][c];
      s.run_l[c] = fmaf(s.run_l[c], kept(s, turn, c), sum);
    }
    values(s, buffer, warp, turn, out);
    if (BUFFERS == 1) __syncthreads();  // the next keys take their place
  }
  store(s, a, of, keys, one_size, turn, part, part_ml, out);
  __syncthreads();
}

// Grid (some for a tile's parts, tiles from the first one on).
extern "C" __global__ void __launch_bounds__(THREADS, 1)
attend_latent_parts(const float* q, const Codes<K_KIND>::Plane* k,
#if K_FACTORS
                    const u16* k_scale,
#endif
                    const i64* page_table, const i64* positions, const i64* lo, const i64* hi, const int* row_seq, const int* seq_start,
                    float* part, float* part_ml, int* fault, int n_row, int n_seq, int n_head, int n_page_col, int page_size, int n_page,
                    int window, int most_part, int least, int first_tile, int max_part, float scale) {
  let_successor_start();
  extern __shared__ __align__(16) char raw[];
  Shared& s = *reinterpret_cast<Shared*>(raw);
#if !K_FACTORS
  const u16* const k_scale = nullptr;
#endif
  const Args a = {q,     k,      k_scale, page_table, positions, lo,     hi,     row_seq,   seq_start, fault,
                  n_row, n_seq, n_head,  n_page_col, page_size, n_page, window, most_part, least,     scale};
  if (threadIdx.x < 32) find_tile(s, a, first_tile + blockIdx.y);  // the layout was there before
  __syncthreads();
  const int seq = s.seq;
  Tile of = {seq, 0, 0};
  if (seq >= 0) {
    of.first = seq_start[seq] * n_head + s.tile * COLS;
    of.n_col = min(COLS, width_of(seq_start, n_row, seq) * n_head - s.tile * COLS);
    find_hull(s, a, of);
  }
  __syncthreads();
  wait_for_predecessor();
  if (seq < 0 || s.hull[1] == 0) return;
  const int from = s.hull[0], to = s.hull[1], smallest = part_keys(s.hull[2], least, most_part), largest = part_keys(to, least, most_part);
  bool loaded = false;
#pragma unroll 1
  for (i64 keys = smallest; keys <= largest; keys *= 2) {
    const int end = static_cast<int>(min(static_cast<i64>(to), keys * most_part));
#pragma unroll 1
    for (int i = static_cast<int>(from / keys) + blockIdx.x; i * keys < end; i += gridDim.x) {
      if (clamped(i, max_part, OP_ID, seq, fault) != i) break;
      if (!loaded) load_queries(s, a, of), loaded = true;
      const i64 at = static_cast<i64>(blockIdx.y) * max_part + i;
      attend_part(s, a, of, static_cast<int>(keys), max(static_cast<int>(i * keys), from), static_cast<int>(min((i + 1) * keys, static_cast<i64>(end))),
                  smallest == largest, part + at * COLS * N_VALUE, part_ml + at * COLS * 2);
    }
  }
}

// Grid (row, n_head * OF_HEAD / 4), block 128: a warp has 128 dims of a head. Parts are added in order. Rows of other tiles than these are left.
extern "C" __global__ void __launch_bounds__(128)
attend_latent_merge(const float* part, const float* part_ml, const i64* positions, const i64* lo, const i64* hi, const int* row_seq,
                    const int* seq_start, float* out, int* fault, int n_row, int n_seq, int n_head, int max_key, int window, int most_part,
                    int least, int first_tile, int n_tile, int max_part) {
  constexpr int OF_HEAD = (N_VALUE + 127) / 128;
  let_successor_start();
  const int row = blockIdx.x, lane = threadIdx.x % 32, warp = blockIdx.y * 4 + threadIdx.x / 32;
  const int head = warp / OF_HEAD, dim = warp % OF_HEAD * 128 + 4 * lane;
  if (head >= n_head) return;
  int first = 0, end = 0, tile = 0, column = 0;
  bool is_here = first_tile == 0;  // rows of no sequence, and those that see nothing, become zeros
  const int of = row_seq[row], seq = of < 0 ? 0 : clamped(of, n_seq, OP_ID, -1, fault);
  const Seen seen = seen_by(positions[row], lo[row], hi[row], window, max_key);
  const int width = width_of(seq_start, n_row, seq), own = row - seq_start[seq];
  if (of >= 0 && seen.hi > 0 && own >= 0 && own < width) {
    int before = 0;
    for (int i = lane; i < seq; i += 32) before += tiles_of(width_of(seq_start, n_row, i), n_head);
    before = __reduce_add_sync(ALL, before);
    const int at = own * n_head + head, keys = part_keys(seen.hi, least, most_part);
    tile = before + at / COLS - first_tile, column = at % COLS;
    first = seen.lo / keys, end = min((seen.hi - 1) / keys + 1, max_part);
    is_here = tile >= 0 && tile < n_tile;
  }
  wait_for_predecessor();
  if (!is_here || dim >= N_VALUE) return;
  Running<4> sum;
  const i64 base = static_cast<i64>(tile) * max_part * COLS + column;
#pragma unroll 4
  for (int i = first; i < end; i++) {
    const i64 at = base + static_cast<i64>(i) * COLS;
    const float2 ml = __ldcg(reinterpret_cast<const float2*>(part_ml + 2 * at));
    const float4 x = __ldcg(reinterpret_cast<const float4*>(part + at * N_VALUE + dim));
    const float o[4] = {x.x, x.y, x.z, x.w};
    sum.add(ml.x, ml.y, o);
  }
  const float by = sum.l > 0.f ? __frcp_rn(sum.l) : 0.f;
  *reinterpret_cast<float4*>(out + (static_cast<i64>(row) * n_head + head) * N_VALUE + dim) =
      make_float4(sum.o[0] * by, sum.o[1] * by, sum.o[2] * by, sum.o[3] * by);
}
