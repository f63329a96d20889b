// streams: hyper-connections of four streams. Meaning: streams/ref.py. All f32.
//
//   x      [row, 4, COLUMNS]            the streams
//   fn     [COEFFICIENTS, 4 * COLUMNS]  24, or 4 of the head
//   parts  [row, CHUNKS, 32]            of each 512 columns: products with each row of fn, then the sum of squares
//   scale  [3], or [1] of the head      base [COEFFICIENTS]
//   y      [row, COLUMNS]               what is read from the streams; of streams_merge what goes back
//   post   [row, 4]                     comb [row, from, to]
//
// streams_parts has a CTA for each 512 columns, whose share of fn stays in registers for all rows of the CTA. streams_read adds
// the shares up, makes coefficients of them, and has a CTA for each row and 1024 columns; streams_merge, too. Sums
// have one order whatever the grid is: a row's bits depend on no other row. streams_merge_parts is streams_merge and the next streams_parts
// in one (streams_merge_sums_parts of what experts gave, not summed yet), streams_read_rows streams_read and the norm of what is read (rows.cu, to the bit): of few rows launches are most of their time.
// Macros: COLUMNS, COEFFICIENTS, N_ITER (of the head 0).
#include "expert_sums.cuh"
#include "overlap.cuh"
#include "prefetch.cuh"
#include "prepared.cuh"

constexpr int kStreams = 4;
constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kQuads = COLUMNS;  // of 4 columns, of all streams
constexpr int kChunks = (kQuads + kThreads - 1) / kThreads;
constexpr int kSlots = 32;  // of a part: a lane each
constexpr u32 kAll = 0xffffffffu;
static_assert(COLUMNS % 4 == 0 && COEFFICIENTS < kSlots, "whole quads, and a lane for the squares");

__device__ __forceinline__ float dot(float4 a, float4 b) { return fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, a.w * b.w))); }

// Each lane keeps the sums of half of its values, over itself and the lane that keeps the others. (A template: in a loop over halves the
// compiler puts values into local memory.)
template <int kHalf>
__device__ __forceinline__ void halve(float (&v)[kSlots]) {
  const bool is_upper = threadIdx.x & kHalf;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float kept = is_upper ? v[i + kHalf] : v[i], sent = is_upper ? v[i] : v[i + kHalf];
    v[i] = kept + __shfl_xor_sync(kAll, sent, kHalf);
  }
}

// Each lane has 32 values; afterwards lane i has the sum of all lanes' i-th, in one order.
__device__ __forceinline__ float sums_by_lane(float (&v)[kSlots]) {
  halve<16>(v), halve<8>(v), halve<4>(v), halve<2>(v), halve<1>(v);
  return v[0];
}

#if N_ITER > 0
// How a row's stream `to` is written and mixed.
__device__ __forceinline__ void fetch_mixing(float& by, float (&of)[kStreams], const float* post, const float* comb, int row, int to) {
  by = post[static_cast<i64>(row) * kStreams + to];
#pragma unroll
  for (int s = 0; s < kStreams; ++s) of[s] = comb[(static_cast<i64>(row) * kStreams + s) * kStreams + to];
}

// What goes back to a stream, four columns: `made` times post, and all streams as they were, by comb.
__device__ __forceinline__ float4 merged(float4 made, const float4 (&v)[kStreams], float by, const float (&of)[kStreams]) {
  float4 sum = make_float4(made.x * by, made.y * by, made.z * by, made.w * by);
#pragma unroll
  for (int s = 0; s < kStreams; ++s) {
    const float c = of[s];
    sum = make_float4(fmaf(v[s].x, c, sum.x), fmaf(v[s].y, c, sum.y), fmaf(v[s].z, c, sum.z), fmaf(v[s].w, c, sum.w));
  }
  return sum;
}

__device__ __forceinline__ void fetch_streams(float4 (&v)[kStreams], const float4* x, int row, int quad) {
#pragma unroll
  for (int s = 0; s < kStreams; ++s) v[s] = x[(static_cast<i64>(row) * kStreams + s) * (COLUMNS / 4) + quad];
}
#endif

// Own: fetches what the thread's quad of a row is made of, then makes it (loads may not pass stores that may be to their place); so many rows
// of a CTA are under way together.
template <typename Own>
__device__ __forceinline__ void parts_of(const Own& rows, const float4* fn, float* parts, int n_row, int per_cta) {
  constexpr int kBatch = Own::kBatch;
  __shared__ float of_warp[2][kBatch][kWarps][kSlots];
  let_successor_start();
  const int quad = blockIdx.x * kThreads + threadIdx.x, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const bool is_in = quad < kQuads;
  const float4 none = make_float4(0.f, 0.f, 0.f, 0.f);
  float4 w[COEFFICIENTS];
#pragma unroll
  for (int k = 0; k < COEFFICIENTS; ++k) w[k] = is_in ? fn[static_cast<i64>(k) * kQuads + quad] : none;
  wait_for_predecessor();
  const int first = blockIdx.y * per_cta, end = min(n_row, first + per_cta);
  int turn = 0;
#pragma unroll 1
  for (int batch = first; batch < end; batch += kBatch, turn ^= 1) {
    typename Own::Fetched fetched[kBatch];  // under way together
    float4 own[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) rows.fetch(fetched[b], is_in ? min(batch + b, end - 1) : first, is_in ? quad : 0);
#pragma unroll
    for (int b = 0; b < kBatch; ++b) own[b] = is_in && batch + b < end ? rows.make(fetched[b], batch + b, quad) : none;
    float(&to)[kBatch][kWarps][kSlots] = of_warp[turn];  // the batch before may still be read
#pragma unroll 1
    for (int b = 0; b < kBatch; ++b) {
      if (batch + b >= end) break;
      float4 mine = own[0];
#pragma unroll
      for (int other = 1; other < kBatch; ++other)
        if (b == other) mine = own[other];
      float v[kSlots];
#pragma unroll
      for (int k = 0; k < kSlots; ++k) v[k] = k < COEFFICIENTS ? dot(mine, w[k < COEFFICIENTS ? k : 0]) : 0.f;
      v[COEFFICIENTS] = dot(mine, mine);
      to[b][warp][lane] = sums_by_lane(v);
    }
    __syncthreads();
    for (int b = warp; b < kBatch && batch + b < end; b += kWarps) {
      float sum = to[b][0][lane];
#pragma unroll
      for (int i = 1; i < kWarps; ++i) sum += to[b][i][lane];
      parts[(static_cast<i64>(batch + b) * kChunks + blockIdx.x) * kSlots + lane] = sum;
    }
  }
}

struct Given {
  static constexpr int kBatch = 4;
  using Fetched = float4;
  const float4* x;

  __device__ __forceinline__ void fetch(float4& to, int row, int quad) const { to = x[static_cast<i64>(row) * kQuads + quad]; }
  __device__ __forceinline__ float4 make(const float4& of, int, int) const { return of; }
};

extern "C" __global__ void __launch_bounds__(kThreads)
    streams_parts(const float4* x, const float4* fn, float* parts, int n_row, int per_cta) {
  parts_of(Given{x}, fn, parts, n_row, per_cta);
}

__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

#if N_ITER > 0
__device__ __forceinline__ float one_over(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float product(const float (&a)[kStreams], const float (&b)[kStreams]) {
  return fmaf(a[0], b[0], a[1] * b[1]) + fmaf(a[2], b[2], a[3] * b[3]);
}

// Factors of rows (or columns) after a step that divides each by its sum.
__device__ __forceinline__ void divide(float (&factor)[kStreams], const float (&of)[kStreams][kStreams], const float (&other)[kStreams],
                                       float floor) {
#pragma unroll
  for (int i = 0; i < kStreams; ++i) factor[i] *= one_over(fmaf(factor[i], product(of[i], other), floor));
}

// Of a warp, lane 4 * from + to of the lower half has an element (the upper half has them once more). Twenty steps wait for each other, so
// every lane goes through them with the whole matrix: it stays as it was, times a factor of each row and of each column.
__device__ __forceinline__ float doubly_stochastic(float logit, float floor) {
  float most = fmaxf(logit, __shfl_xor_sync(kAll, logit, 1));
  most = fmaxf(most, __shfl_xor_sync(kAll, most, 2));
  const float e = expf(logit - most);
  float sum = e + __shfl_xor_sync(kAll, e, 1);
  sum += __shfl_xor_sync(kAll, sum, 2);
  const float own = __fdividef(e, sum) + floor;
  float rows[kStreams][kStreams], columns[kStreams][kStreams];
#pragma unroll
  for (int i = 0; i < kStreams * kStreams; ++i)
    rows[i / kStreams][i % kStreams] = columns[i % kStreams][i / kStreams] = __shfl_sync(kAll, own, i);
  float by_row[kStreams] = {1.f, 1.f, 1.f, 1.f}, by_column[kStreams] = {1.f, 1.f, 1.f, 1.f};
  divide(by_column, columns, by_row, floor);
#pragma unroll 1
  for (int i = 1; i < N_ITER; ++i) {
    divide(by_row, rows, by_column, floor);
    divide(by_column, columns, by_row, floor);
  }
  float y = 0.f;
#pragma unroll
  for (int i = 0; i < kStreams * kStreams; ++i)
    if ((threadIdx.x & 15) == i) y = own * by_row[i / kStreams] * by_column[i % kStreams];
  return y;
}
#endif

constexpr int kOwn = COLUMNS / 4;  // quads of a row

// Lane i's coefficient i of a row.
__device__ __forceinline__ float coefficient(const float* parts, const float* scale, const float* base, int row, float eps) {
  const int lane = threadIdx.x & 31;
  const float* from = parts + static_cast<i64>(row) * kChunks * kSlots + lane;
  float sum = 0.f;
#pragma unroll 32
  for (int i = 0; i < kChunks; ++i) sum += from[i * kSlots];
  const float squares = __shfl_sync(kAll, sum, COEFFICIENTS);
  const float m = sum * rsqrtf(squares / (kStreams * COLUMNS) + eps);
  const int kind = COEFFICIENTS == kStreams ? 0 : min(lane / kStreams, 2);  // reads, writes, mixes
  return lane < COEFFICIENTS ? fmaf(m, scale[kind], base[lane]) : 0.f;
}

#if N_ITER > 0
// How a row's streams are written and mixed: a warp's work.
__device__ __forceinline__ void put_mixing(float c, float* post, float* comb, int row, float floor) {
  const int lane = threadIdx.x & 31;
  const float mixed = doubly_stochastic(__shfl_sync(kAll, c, 2 * kStreams + (lane & 15)), floor);
  if (lane >= kStreams && lane < 2 * kStreams) post[static_cast<i64>(row) * kStreams + lane - kStreams] = 2.f * sigmoid(c);
  if (lane < kStreams * kStreams) comb[static_cast<i64>(row) * kStreams * kStreams + lane] = mixed;
}
#endif

__device__ __forceinline__ float4 read_quad(const float4 (&v)[kStreams], const float* pre) {
  float4 out = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
  for (int s = 0; s < kStreams; ++s) {
    const float by = pre[s];
    out = make_float4(fmaf(v[s].x, by, out.x), fmaf(v[s].y, by, out.y), fmaf(v[s].z, by, out.z), fmaf(v[s].w, by, out.w));
  }
  return out;
}

extern "C" __global__ void __launch_bounds__(256)
    streams_read(const float4* x, const float* parts, const float* scale, const float* base, float4* y, float* post, float* comb,
                 float eps, float floor) {
  __shared__ float pre[kStreams];
  let_successor_start();
  const int row = blockIdx.x, quad = blockIdx.y * 256 + threadIdx.x;
  const bool is_in = quad < kOwn;
  wait_for_predecessor();
  float4 v[kStreams];
#pragma unroll
  for (int s = 0; s < kStreams; ++s)
    v[s] = is_in ? x[(static_cast<i64>(row) * kStreams + s) * kOwn + quad] : make_float4(0.f, 0.f, 0.f, 0.f);
  if (threadIdx.x < 32) {
    const float c = coefficient(parts, scale, base, row, eps);
    if (threadIdx.x < kStreams) pre[threadIdx.x] = sigmoid(c) + floor;
#if N_ITER > 0
    if (blockIdx.y == 0) put_mixing(c, post, comb, row, floor);
#endif
  }
  __syncthreads();
  if (is_in) y[static_cast<i64>(row) * kOwn + quad] = read_quad(v, pre);
}

// Grid (row, 2 and more): the second of a row mixes, which takes as long as all the rest; those behind ask for the next product's weights,
// which takes many of them (one multiprocessor asks for 2 KiB in 4.5 ns).
constexpr int kReaders = 512, kEach = (kOwn + kReaders - 1) / kReaders;  // as rows.cu: threads, quads of each
constexpr int kPadded = (COLUMNS + 255) / 256 * 256, kPadEach = (kPadded / 4 + kReaders - 1) / kReaders;

extern "C" __global__ void __launch_bounds__(kReaders)
    streams_read_rows(const float4* x, const float* parts, const float* scale, const float* base, float4* y, float* post, float* comb,
                      const float4* norm, u16* blocks, float* sums, float* powers, const u8* next, float eps, float floor, int pad,
                      float norm_eps, float power, i64 next_share, int n_share, int n_piece) {
  __shared__ float pre[kStreams], each[kReaders / 32];
  let_successor_start();
  const int row = blockIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  if (blockIdx.y == 1) {
    if (warp == 0) {
      wait_for_predecessor();
#if N_ITER > 0
      put_mixing(coefficient(parts, scale, base, row, eps), post, comb, row, floor);
#endif
    }
    return;
  }
#if __CUDA_ARCH__ >= 900
  if (blockIdx.y > 1) {
    const Prefetch product = {next, next_share, n_share, n_piece};
    product.fetch(((blockIdx.y - 2) * gridDim.x + row) * kReaders + threadIdx.x, (gridDim.y - 2) * gridDim.x * kReaders);
    return;
  }
#endif
  float4 w[kEach], v[kEach][kStreams], out[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int quad = i * kReaders + threadIdx.x;
    w[i] = quad < kOwn ? norm[quad] : make_float4(0.f, 0.f, 0.f, 0.f);
  }
  wait_for_predecessor();
#pragma unroll
  for (int i = 0; i < kEach; ++i)
#pragma unroll
    for (int s = 0; s < kStreams; ++s) {
      const int quad = i * kReaders + threadIdx.x;
      v[i][s] = quad < kOwn ? x[(static_cast<i64>(row) * kStreams + s) * kOwn + quad] : make_float4(0.f, 0.f, 0.f, 0.f);
    }
  if (warp == 0) {
    const float c = coefficient(parts, scale, base, row, eps);
    if (lane < kStreams) pre[lane] = sigmoid(c) + floor;
  }
  __syncthreads();
  float squares = 0.f;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int quad = i * kReaders + threadIdx.x;
    out[i] = read_quad(v[i], pre);
    if (quad < kOwn) y[static_cast<i64>(row) * kOwn + quad] = out[i];
    squares = __fadd_rn(squares, squares_of(out[i]));
  }
  squares = warp_sum(squares);
  if (lane == 0) each[warp] = squares;
  __syncthreads();
  const float factor = 1.f / power * rsqrtf(warp_sum(lane < kReaders / 32 ? each[lane] : 0.f) / COLUMNS + norm_eps);
  if (threadIdx.x == 0) powers[row] = power;
#pragma unroll
  for (int i = 0; i < kPadEach; ++i) {
    const int column = (i * kReaders + threadIdx.x) * 4;
    const float4 own = i < kEach ? out[i < kEach ? i : 0] : make_float4(0.f, 0.f, 0.f, 0.f), by = w[i < kEach ? i : 0];
    const float4 z = make_float4(own.x * by.x, own.y * by.y, own.z * by.z, own.w * by.w);
    put_in_block(blocks, sums, pad, row, column, halves_of(z, factor), column < kPadded);
  }
}

#if N_ITER > 0
extern "C" __global__ void __launch_bounds__(256)
    streams_merge(const float4* y, const float4* x, const float* post, const float* comb, float4* out) {
  let_successor_start();
  const int row = blockIdx.x, quad = blockIdx.y * 256 + threadIdx.x;
  if (quad >= kOwn) return;
  wait_for_predecessor();
  const float4 made = y[static_cast<i64>(row) * kOwn + quad];
  float4 v[kStreams];
  fetch_streams(v, x, row, quad);
#pragma unroll
  for (int to = 0; to < kStreams; ++to) {
    float by, of[kStreams];
    fetch_mixing(by, of, post, comb, row, to);
    out[(static_cast<i64>(row) * kStreams + to) * kOwn + quad] = merged(made, v, by, of);
  }
}

struct Merging {
  static constexpr int kBatch = 4;
  struct Fetched {
    float4 made, v[kStreams];
    float by, of[kStreams];
  };
  const float4 *y, *x;
  const float *post, *comb;
  float4* out;

  __device__ __forceinline__ void fetch(Fetched& f, int row, int quad) const {
    const int to = quad / kOwn, own = quad - to * kOwn;
    f.made = y[static_cast<i64>(row) * kOwn + own];
    fetch_streams(f.v, x, row, own);
    fetch_mixing(f.by, f.of, post, comb, row, to);
  }

  __device__ __forceinline__ float4 make(const Fetched& f, int row, int quad) const {
    const float4 sum = merged(f.made, f.v, f.by, f.of);
    out[static_cast<i64>(row) * kQuads + quad] = sum;
    return sum;
  }
};

// The same where what goes back is a sum that is not made yet, of what a row's experts gave (expert_sums.cuh): a launch less before it.
struct MergingSums {
  static constexpr int kBatch = 1;
  using Fetched = Merging::Fetched;
  const float4 *y, *shared, *residual;
  const float* weights;
  int n_row, n_used, n_piece;
  Merging other;

  __device__ __forceinline__ void fetch(Fetched& f, int row, int quad) const {
    const int to = quad / kOwn, own = quad - to * kOwn;
    const ExpertSums sums(y, weights, shared, nullptr, residual, row, n_row, n_used, kOwn, n_piece);
    f.made = sums.of<8, false>(own, sums.before(own));
    fetch_streams(f.v, other.x, row, own);
    fetch_mixing(f.by, f.of, other.post, other.comb, row, to);
  }

  __device__ __forceinline__ float4 make(const Fetched& f, int row, int quad) const { return other.make(f, row, quad); }
};

extern "C" __global__ void __launch_bounds__(kThreads)
    streams_merge_parts(const float4* y, const float4* x, const float* post, const float* comb, float4* out, const float4* fn,
                        float* parts, int n_row, int per_cta) {
  parts_of(Merging{y, x, post, comb, out}, fn, parts, n_row, per_cta);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    streams_merge_sums_parts(const float4* y, const float* weights, const float4* shared, const float4* residual, const float4* x,
                             const float* post, const float* comb, float4* out, const float4* fn, float* parts, int n_row, int per_cta, int n_used,
                             int n_shared) {
  parts_of(MergingSums{y, shared, residual, weights, n_row, n_used, n_shared, {nullptr, x, post, comb, out}}, fn, parts, n_row, per_cta);
}
#endif
