// compress: rows that stand for RATIO tokens each, made when their last token runs; and what the tokens gave, kept in rings.
//
//   values, scores  [row, (1 + OVERLAPS) * DIM]      f32  of the batch's tokens; rows lie `value_step`, `score_step` apart
//   places          [RATIO, (1 + OVERLAPS) * DIM]    f32  the scores' bias, by a token's place in its block; in rings they have it.
//                                                         Without WEIGHED there are neither, and all tokens of a block count alike
//   norm, freq      [DIM], [n_rot / 2]               f32, f64; without NORMED rows have no norm
//   ring_values, ring_scores  [slot, n_ring, (1 + OVERLAPS) * DIM]  f32  of the tokens before
//   rows            [pool row, DIM]                  KV   KV_KIND 0: f32, 1: f16, 2: bf16, 4: f8_e4m3
//   positions, kv_rows  [row]                        int64  the row of a block is that of its last token: page * page_size + offset
//   row_seq         [row]                            int32  -1: padding
//   seq_start, seq_slot  [seq + 1], [seq]            int32
//   fault           [5]                              int32  see bounds.cuh
//
// Grid (row), a CTA for each, of which most have no block to make. GROUPS share a block's tokens, in an order that hangs on nothing; a
// thread has four channels, and folds its tokens' weights and values as attention does.
//
// A ring is read as it was before the batch. Rows of few tokens overwrite none that is read: a sequence of up to `n_direct` rows is kept at
// once, longer ones by a launch of their own.
//
// beside: this runs beside a product that reads nothing of it and lets it start when all before the product is over (linear_pair.cu,
// `late`). So it reads at once, and is not over before the product is. What tokens gave is read past L1: nobody may have waited for it.
//
// Macros: ROW_DIM and ROW_GROUPS (DIM and GROUPS of what a build makes), RATIO, OVERLAPS, N_ROT, WEIGHED, NORMED, KV_KIND, OP_ID; where two are made
// at once BESIDE_DIM, BESIDE_GROUPS.
#include "kv_types.cuh"
#include "bounds.cuh"
#include "overlap.cuh"
#include "partial.cuh"
#include "ring_rows.cuh"
#include "turns.cuh"

#ifndef BESIDE_DIM
#define BESIDE_DIM 0
#endif

struct Given {  // what the tokens gave: in the batch, and in the rings
  const float *values, *scores, *places;
  i64 value_step, score_step;
  float *ring_values, *ring_scores;
  int n_ring;
};

// Rows of DIM channels; GROUPS share a block's tokens.
template <int DIM, int GROUPS>
struct Compressor {
  static constexpr int WIDTH = (1 + OVERLAPS) * DIM, LANES = DIM / 4, THREADS = LANES * GROUPS, TOKENS = (1 + OVERLAPS) * RATIO;
  static constexpr int EACH = TOKENS / GROUPS, AT_ONCE = EACH % 8 == 0 ? 8 : EACH % 4 == 0 ? 4 : EACH % 2 == 0 ? 2 : 1;
  static_assert(DIM % 4 == 0 && TOKENS % GROUPS == 0 && THREADS <= 1024 && THREADS % 32 == 0 && N_ROT % 2 == 0, "tokens do not divide");

  static __device__ __forceinline__ float4 biased(const Given& given, i64 row, i64 at, int channel) {
    if (!WEIGHED) return make_float4(0.f, 0.f, 0.f, 0.f);
    const float4 s = __ldcg(reinterpret_cast<const float4*>(given.scores + row * given.score_step + channel));
    const float4 p = *reinterpret_cast<const float4*>(given.places + at % RATIO * WIDTH + channel);
    return make_float4(s.x + p.x, s.y + p.y, s.z + p.z, s.w + p.w);
  }

  static __device__ __forceinline__ void keep(const Given& given, const Own& o, int row, int n_thread) {
    const i64 to = (static_cast<i64>(o.slot) * given.n_ring + o.at % given.n_ring) * WIDTH;
    for (int i = threadIdx.x * 4; i < WIDTH; i += n_thread * 4) {
      const float4 v = __ldcg(reinterpret_cast<const float4*>(given.values + row * given.value_step + i));
      *reinterpret_cast<float4*>(given.ring_values + to + i) = v;
      if (WEIGHED) *reinterpret_cast<float4*>(given.ring_scores + to + i) = biased(given, row, o.at, i);
    }
  }

  struct Channels {  // softmax sums of four channels
    float m[4], l[4], sum[4];
  };

  static __device__ __forceinline__ void clear(Channels& c) {
#pragma unroll
    for (int e = 0; e < 4; e++) c.m[e] = none_seen(), c.l[e] = c.sum[e] = 0.f;
  }

  // Tokens `first` and every GROUPS'th behind it, AT_ONCE of them: loaded together, weighed, added.
  static __device__ __forceinline__ void add_tokens(Channels& c, const Given& given, const Own& o, i64 block, int first, int lane) {
    float4 s[AT_ONCE], v[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const int token = first + i * GROUPS;  // of those before the block, then of its own
      const i64 at = (block - OVERLAPS) * RATIO + token;
      const int channel = (OVERLAPS && token >= RATIO ? DIM : 0) + 4 * lane;
      s[i] = make_float4(none_seen(), none_seen(), none_seen(), none_seen());
      v[i] = make_float4(0.f, 0.f, 0.f, 0.f);
      if (at >= o.n_past) {
        const i64 row = o.start + (at - o.n_past);
        s[i] = biased(given, row, at, channel);
        v[i] = __ldcg(reinterpret_cast<const float4*>(given.values + row * given.value_step + channel));
      } else if (at >= 0) {
        const i64 from = (static_cast<i64>(o.slot) * given.n_ring + at % given.n_ring) * WIDTH + channel;
        s[i] = WEIGHED ? __ldcg(reinterpret_cast<const float4*>(given.ring_scores + from)) : make_float4(0.f, 0.f, 0.f, 0.f);
        v[i] = __ldcg(reinterpret_cast<const float4*>(given.ring_values + from));
      }
    }
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const auto of = [&](const float4& x) { return e == 0 ? x.x : e == 1 ? x.y : e == 2 ? x.z : x.w; };
      float top = none_seen(), l = 0.f, sum = 0.f;
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) top = fmaxf(top, of(s[i]) * 1.44269504f);  // log2(e): sums count in log2
      const float at = finite_or_zero(top);
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) {
        const float w = exp2_fast(of(s[i]) * 1.44269504f - at);
        l += w;
        sum = fmaf(w, of(v[i]), sum);
      }
      const Fold f = fold_of(c.m[e], top);
      c.m[e] = f.m;
      c.l[e] = folded(c.l[e], l, f);
      c.sum[e] = folded(c.sum[e], sum, f);
    }
  }

  static __device__ __forceinline__ void make_row(const Given& given, const Own& o, const float* norm, const double* freq, Kv* to, float eps) {
    __shared__ Channels shared[GROUPS > 1 ? GROUPS - 1 : 1][LANES];
    __shared__ float squares[(LANES + 31) / 32];
    const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
    const i64 block = o.at / RATIO;
    Channels c;
    clear(c);
#pragma unroll 1
    for (int i = 0; i < EACH; i += AT_ONCE) add_tokens(c, given, o, block, group + i * GROUPS, lane);
    if (group > 0) shared[group - 1][lane] = c;
    __syncthreads();
    float x[4] = {}, square = 0.f;
    if (group == 0) {
#pragma unroll 1
      for (int g = 0; g < GROUPS - 1; g++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const Fold f = fold_of(c.m[e], shared[g][lane].m[e]);
          c.m[e] = f.m;
          c.l[e] = folded(c.l[e], shared[g][lane].l[e], f);
          c.sum[e] = folded(c.sum[e], shared[g][lane].sum[e], f);
        }
#pragma unroll
      for (int e = 0; e < 4; e++) {
        x[e] = __fdiv_rn(c.sum[e], c.l[e]);
        square = fmaf(x[e], x[e], square);
      }
    }
    square = warp_sum(square);  // lanes of other groups bring nothing
    if (threadIdx.x % 32 == 0 && threadIdx.x < LANES) squares[threadIdx.x / 32] = square;
    __syncthreads();
    if (group > 0) return;
    float all = 0.f;
#pragma unroll
    for (int w = 0; w < (LANES + 31) / 32; w++) all += squares[w];
    if (NORMED) {
      const float by = __fdiv_rn(1.f, __fsqrt_rn(all / DIM + eps));
      const float4 n = *reinterpret_cast<const float4*>(norm + 4 * lane);
      const float scale[4] = {n.x, n.y, n.z, n.w};
#pragma unroll
      for (int e = 0; e < 4; e++) x[e] = x[e] * by * scale[e];
    }
#pragma unroll
    for (int e = 0; e < 4; e += 2) {
      const int pair = (4 * lane + e - (DIM - N_ROT)) / 2;
      if (4 * lane + e >= DIM - N_ROT) {
        const float2 y = turned(x[e], x[e + 1], turn_of(static_cast<double>(block * RATIO), freq[pair]));
        x[e] = y.x, x[e + 1] = y.y;
      }
    }
#pragma unroll
    for (int e = 0; e < 4; e++) to[4 * lane + e] = to_kv(x[e]);
  }
};

struct Pages {  // where rows go
  int page_size, per_page, n_page;
};

// A batch's row: what its token gave is kept, if it is at once, and a row is made if the token ends a block. `place`: of the token.
template <class C>
__device__ __forceinline__ void compress_row(const Given& given, const Own& o, int row, const float* norm, const double* freq, Kv* rows,
                                             i64 place, Pages p, int n_direct, float eps, int* fault) {
  if (o.n <= n_direct) C::keep(given, o, row, C::THREADS);
  if ((o.at + 1) % RATIO != 0) return;
  const i64 limit = static_cast<i64>(p.n_page) * p.page_size;
  const int safe = static_cast<int>(limit < 0x7fffffff ? limit : 0x7fffffff), index = place < 0 || place >= safe ? -1 : static_cast<int>(place);
  if (clamped(index, safe, OP_ID, o.seq, fault) != index) return;
  const i64 to = static_cast<i64>(index / p.page_size) * p.per_page + index % p.page_size / RATIO;
  C::make_row(given, o, norm, freq, rows + to * (4 * C::LANES), eps);
}

using Main = Compressor<ROW_DIM, ROW_GROUPS>;

extern "C" __global__ void __launch_bounds__(Main::THREADS)
compress_rows(const float* values, const float* scores, const float* places, const float* norm, const double* freq, float* ring_values, float* ring_scores,
              Kv* rows, const i64* positions, const i64* kv_rows, const int* row_seq, const int* seq_start, const int* seq_slot,
              int* fault, i64 value_step, i64 score_step, int n_slot, int n_ring, int n_direct, int n_all, int page_size, int per_page,
              int n_page, int beside, float eps) {
  let_successor_start();
  const int row = blockIdx.x;
  const Given given = {values, scores, places, value_step, score_step, ring_values, ring_scores, n_ring};
  const Own o = own_of(row, n_all, n_slot, positions, row_seq, seq_start, seq_slot, fault);
  const i64 place = o.seq < 0 ? 0 : kv_rows[row];
  if (!beside) wait_for_predecessor();
  if (o.seq >= 0) compress_row<Main>(given, o, row, norm, freq, rows, place, {page_size, per_page, n_page}, n_direct, eps, fault);
  if (beside) wait_for_predecessor();
}

#if BESIDE_DIM > 0
// Grid (row, 2): the same, and beside it another compressor's of the same tokens, whose rows are BESIDE_DIM wide; rings and pages are as large.
using Beside = Compressor<BESIDE_DIM, BESIDE_GROUPS>;
constexpr int MOST_THREADS = Main::THREADS > Beside::THREADS ? Main::THREADS : Beside::THREADS;

extern "C" __global__ void __launch_bounds__(MOST_THREADS)
compress_both(const float* values, const float* scores, const float* places, const float* norm, float* ring_values, float* ring_scores, Kv* rows,
              const float* values2, const float* scores2, const float* places2, const float* norm2, float* ring_values2, float* ring_scores2,
              Kv* rows2, const double* freq, const i64* positions, const i64* kv_rows, const int* row_seq, const int* seq_start,
              const int* seq_slot, int* fault, i64 step, int n_slot, int n_ring, int n_direct, int n_all, int page_size, int per_page,
              int n_page, int beside, float eps) {
  let_successor_start();
  const int row = blockIdx.x;
  const bool is_beside = blockIdx.y == 1;
  if (static_cast<int>(threadIdx.x) >= (is_beside ? Beside::THREADS : Main::THREADS)) return;
  const Own o = own_of(row, n_all, n_slot, positions, row_seq, seq_start, seq_slot, fault);
  const i64 place = o.seq < 0 ? 0 : kv_rows[row];
  const Pages pages = {page_size, per_page, n_page};
  if (!beside) wait_for_predecessor();
  if (o.seq >= 0 && is_beside)
    compress_row<Beside>({values2, scores2, places2, step, step, ring_values2, ring_scores2, n_ring}, o, row, norm2, freq, rows2, place, pages,
                         n_direct, eps, fault);
  if (o.seq >= 0 && !is_beside)
    compress_row<Main>({values, scores, places, step, step, ring_values, ring_scores, n_ring}, o, row, norm, freq, rows, place, pages,
                       n_direct, eps, fault);
  if (beside) wait_for_predecessor();
}
#endif

// Grid (row), block KEEPERS: rows of sequences that are not kept at once; of more than the ring has the last ones stay.
constexpr int KEEPERS = 128;

extern "C" __global__ void __launch_bounds__(KEEPERS)
compress_keep(const float* values, const float* scores, const float* places, float* ring_values, float* ring_scores, const i64* positions, const int* row_seq,
              const int* seq_start, const int* seq_slot, int* fault, i64 value_step, i64 score_step, int n_slot, int n_ring, int n_direct,
              int n_all) {
  let_successor_start();
  const int row = blockIdx.x;
  const Own o = own_of(row, n_all, n_slot, positions, row_seq, seq_start, seq_slot, fault);
  wait_for_predecessor();
  if (stays(o, row, n_ring, n_direct))
    Main::keep({values, scores, places, value_step, score_step, ring_values, ring_scores, n_ring}, o, row, KEEPERS);
}

#if BESIDE_DIM > 0
// Grid (row, 2): the same of both.
extern "C" __global__ void __launch_bounds__(KEEPERS)
compress_keep_both(const float* values, const float* scores, const float* places, float* ring_values, float* ring_scores,
                   const float* values2, const float* scores2, const float* places2, float* ring_values2, float* ring_scores2,
                   const i64* positions, const int* row_seq, const int* seq_start, const int* seq_slot, int* fault, i64 step, int n_slot,
                   int n_ring, int n_direct, int n_all) {
  let_successor_start();
  const int row = blockIdx.x;
  const Own o = own_of(row, n_all, n_slot, positions, row_seq, seq_start, seq_slot, fault);
  wait_for_predecessor();
  if (!stays(o, row, n_ring, n_direct)) return;
  if (blockIdx.y == 1)
    Beside::keep({values2, scores2, places2, step, step, ring_values2, ring_scores2, n_ring}, o, row, KEEPERS);
  else
    Main::keep({values, scores, places, step, step, ring_values, ring_scores, n_ring}, o, row, KEEPERS);
}
#endif
