// rows: activations as a product reads them: prepared (normed, gated), f16 over a power of two, in the product's layout.
//
//   x       [row, COLUMNS]    f32   rows `stride` elements apart; [row, 2 COLUMNS] for GLU and GEGLU
//   weight  NORM, GROUPS: [COLUMNS] f32; HEADS: [DIM] f32
//   gate    HEADS, GATE, GROUPS: f32, column c of a row at  row * gate_stride + c / DIM * gate_step + c % DIM
//   out     LAYOUT 0: [block][pad][32] f16, the columns of a block in the order of quants.cuh: 0-3, 16-19, 4-7, 20-23, ...
//                     and blocks up to a whole number of 256 columns, zero from COLUMNS on; rows of the pad stay as they are
//           LAYOUT 1: [row, COLUMNS] f16
//           LAYOUT 2: [block of 64][pad][64] f16 for warpgroup products, padded like LAYOUT 0; the order of columns is that
//                     of linear_wgmma.py's blocks_for_wgmma
//           LAYOUT 3: [row][unit of 64 columns][144] u8, whole numbers of 16 bits with sums and powers of their own (prepared.cuh,
//                     put_in_planes), up to a whole number of 256 columns; `sums`, `powers` and `pad` are not used
//   sums    LAYOUT 0: [block][pad] f32  sums of the block's f16 values
//   powers  [row]             f32   prepared row = out * power
//
// EXPERTS  instead of x: what a row's experts gave (expert_sums.cuh); PLAIN, LAYOUT 0
// RANKS    (how many) instead of x: the sum of all ranks' x (peers.cuh), which goes to `summed` [row, COLUMNS] f32, too; NORM, not LAYOUT 3.
//          A row is its CTA's place; COLUMNS of PLACE numbers at most, BLOCKS rows. Arguments behind those of all: peer_sum.cu's
//
// KIND: what happens to x first
//   PLAIN  nothing              NORM  x * rsqrt(mean x^2 + eps) * weight, over the row
//   HEADS  the same over each DIM columns, times silu(gate)
//   GATE   x * sigmoid(gate)    GLU   silu(first half) * second half, GEGLU with gelu by its tanh form
//   RELU2  max(x, 0)^2
//   GROUPS y * rsqrt(mean y^2 + eps) * weight with y = x * silu(gate), over each DIM columns
//
// NORM, HEADS and GROUPS divide by `power` as given (why: rows_ref.py); the others by the power that brings the row's largest
// magnitude into [1, 2). Rounding is 2^-11 of each value down to 2^-14 of the power, absolute below. (LAYOUT 3: neither is needed;
// 2^-16 of the largest of 64 columns.)
// For few rows gdn.cu writes what HEADS makes in LAYOUT 0 itself, and streams.cu and norms.cu what NORM makes, to the bit: all do it as in
// prepared.cuh.
// A CTA has a row, of GROUPS a group of one, its values in registers; bound by latency.
// PARTS  (from sm_90 on; how many) CTAs have a row together, a cluster, the same number of blocks each, for few wide rows: one CTA reads
//        its 170 KB in 5 us. They tell each other their largest magnitude, so all bits are those of one CTA. PLAIN, GATE, GLU, GEGLU and
//        RELU2, not LAYOUT 3. Grid (PARTS, row), else (row, group)
#include "overlap.cuh"
#include "prepared.cuh"
#if EXPERTS
#include "expert_sums.cuh"
#endif
#if RANKS
#include "peers.cuh"
#endif
#ifndef PARTS
#define PARTS 1
#endif
#if PARTS > 1
#include "bulk.cuh"
#include "cluster.cuh"
#endif

#define PLAIN 0
#define NORM 1
#define HEADS 2
#define GATE 3
#define GLU 4
#define GROUPS 5
#define RELU2 6
#define GEGLU 7
#define HALVES (KIND == GLU || KIND == GEGLU)

constexpr int kPadded = LAYOUT == 1 ? COLUMNS : (COLUMNS + 255) / 256 * 256;
constexpr int kOwn = KIND == GROUPS ? DIM : PARTS > 1 ? (kPadded / 32 + PARTS - 1) / PARTS * 32 : COLUMNS;  // columns of a CTA
constexpr int kThreads = PARTS > 1 ? (kOwn / 8 + 31) / 32 * 32 : KIND == GROUPS && DIM < 2048 ? DIM / 4 : 512;
constexpr int kWarps = kThreads / 32;
constexpr int kQuads = ((KIND == GROUPS || PARTS > 1 ? kOwn : kPadded) / 4 + kThreads - 1) / kThreads;  // of 4 columns, of a thread
static_assert(COLUMNS % 32 == 0 && (KIND != HEADS || COLUMNS % 128 == 0), "whole blocks, and whole warps of a head");
static_assert(KIND != GROUPS || (DIM % 128 == 0 && COLUMNS % DIM == 0), "whole warps of a group, and of what is padded behind");

static_assert(PARTS == 1 || (KIND != NORM && KIND != HEADS && KIND != GROUPS && LAYOUT != 3), "what only its power makes one");
static_assert(PARTS <= 8 && kWarps <= 32, "CTAs of a cluster, and a lane a warp");

struct Source {
  const float *x, *gate;
  int gate_step;
};

__device__ __forceinline__ float4 load4(const float* p) { return *reinterpret_cast<const float4*>(p); }
__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + __expf(-x)); }

// A thread's weights. They are the model's: loaded before the predecessor is over, if they are not `const __restrict__`,
// for loads of constants ptxas (13.0) puts behind the wait.
constexpr int kWeights = KIND == NORM || KIND == GROUPS ? kQuads : 1;

__device__ __forceinline__ void load_weights(float4 (&w)[kWeights], const float* weight, int start) {
  if (KIND != NORM && KIND != HEADS && KIND != GROUPS) return;
#pragma unroll
  for (int i = 0; i < kWeights; ++i) {
    const int own = (i * kThreads + threadIdx.x) * 4, column = KIND == HEADS ? own % DIM : start + own;
    w[i] = own < kOwn ? load4(weight + column) : make_float4(0.f, 0.f, 0.f, 0.f);
  }
}

__device__ __forceinline__ const float* gate_at(const Source& s, int column) {
  return s.gate + static_cast<i64>(column / DIM) * s.gate_step + column % DIM;
}

constexpr bool kBeside = KIND == HEADS || KIND == GATE || KIND == GROUPS;  // gates. (A Glu's second half: registers are short)
// Loads of a thread that are under way together, and as many of what is beside them: one after the other each is a trip to the
// second-level cache.
constexpr int kAtOnce = HALVES ? 1 : kBeside ? 4 : kQuads;

__device__ __forceinline__ float4 load_beside(const Source& s, int column, bool is_in) {
  if (!kBeside || !is_in) return make_float4(0.f, 0.f, 0.f, 0.f);
  return load4(gate_at(s, column));
}

// Four values, prepared but for the common factor of NORM and GROUPS, and `squares` grows by what that is made of. Zeros stay
// zeros.
// A gate, as silu's or gelu's sigmoid takes it.
__device__ __forceinline__ float inner(float x) {
  return KIND == GEGLU ? 1.5957691216f * x * fmaf(0.044715f * x, x, 1.f) : x;
}

__device__ __forceinline__ float4 prepared(float4 v, float4 beside, float4 w, const float* second, float eps, float& squares) {
  if (KIND == HEADS) {  // heads are whole warps' or whole parts of one
    const float sum = sum_of_neighbours<DIM / 4>(squares_of(v));
    v = gated_head(v, head_scale(sum, DIM, eps), head_gate(w, beside));
  }
  if (KIND == GATE || KIND == GROUPS) {
    v.x *= sigmoid(beside.x) * (KIND == GATE ? 1.f : beside.x);
    v.y *= sigmoid(beside.y) * (KIND == GATE ? 1.f : beside.y);
    v.z *= sigmoid(beside.z) * (KIND == GATE ? 1.f : beside.z);
    v.w *= sigmoid(beside.w) * (KIND == GATE ? 1.f : beside.w);
  }
  if (KIND == NORM || KIND == GROUPS) {
    squares = __fadd_rn(squares, squares_of(v));
    v = make_float4(v.x * w.x, v.y * w.y, v.z * w.z, v.w * w.w);
  }
  if (HALVES && second != nullptr) {
    const float4 up = load4(second);
    v = make_float4(v.x * sigmoid(inner(v.x)) * up.x, v.y * sigmoid(inner(v.y)) * up.y, v.z * sigmoid(inner(v.z)) * up.z,
                    v.w * sigmoid(inner(v.w)) * up.w);
  }
  if (KIND == RELU2) {
    v = make_float4(v.x < 0.f ? 0.f : v.x, v.y < 0.f ? 0.f : v.y, v.z < 0.f ? 0.f : v.z, v.w < 0.f ? 0.f : v.w);
    v = make_float4(v.x * v.x, v.y * v.y, v.z * v.z, v.w * v.w);
  }
  return v;
}

// Whether a CTA whose columns begin at `start` has this one of its own, and whether the row has it.
__device__ __forceinline__ bool has(int start, int own) { return own < kOwn && (PARTS == 1 || start + own < COLUMNS); }

__device__ __forceinline__ float over_block(float mine, bool is_sum) {
  __shared__ float each[kWarps];
  mine = is_sum ? warp_sum(mine) : warp_max(mine);
  if ((threadIdx.x & 31) == 0) each[threadIdx.x >> 5] = mine;
  __syncthreads();
  const float other = (threadIdx.x & 31) < kWarps ? each[threadIdx.x & 31] : 0.f;
  return is_sum ? warp_sum(other) : warp_max(other);
}

#if PARTS > 1
// The largest number of the row's CTAs. All have made their barriers before one sends.
struct Together {
  u64 all_told;
  float each[PARTS];

  __device__ __forceinline__ u32 barrier() const { return static_cast<u32>(__cvta_generic_to_shared(&all_told)); }

  __device__ __forceinline__ void begin() {
    if (threadIdx.x == 0) {
      barrier_init(barrier(), 1);
      barriers_visible();
      barrier_expect(barrier(), PARTS * 4);
    }
    arrive_at_cluster();
  }

  __device__ __forceinline__ float largest(float mine) {
    wait_for_cluster();
    if (threadIdx.x < PARTS) send(static_cast<u32>(__cvta_generic_to_shared(&each[blockIdx.x])), mine, barrier(), threadIdx.x);
    barrier_wait_cluster(barrier(), 0);
    float most = each[0];
#pragma unroll
    for (int i = 1; i < PARTS; ++i) most = fmaxf(each[i], most);
    return most;
  }
};
#define CLUSTER __cluster_dims__(PARTS, 1, 1)
#else
#define CLUSTER
#endif

#if EXPERTS || KIND == GROUPS || RANKS > 2 || (RANKS && COLUMNS > 6144) || COLUMNS > (KIND == PLAIN || HALVES || KIND == RELU2 ? 18432 : 8192)
#define BOUNDS __launch_bounds__(kThreads, 1)
#elif HALVES && PARTS == 1
#define BOUNDS __maxnreg__(64)
#else
#define BOUNDS __maxnreg__(56)  // `linear` starts beside it
#endif

extern "C" __global__ void CLUSTER BOUNDS
#if EXPERTS
    rows(const float4* y, const float* by, const float4* shared, const float* gate, const float4* residual, int n_used,
         int n_piece, u16* __restrict__ out, float* __restrict__ sums, float* __restrict__ powers, int pad) {
#else
    rows(const float* x, i64 stride, const float* weight, float eps, float given, const float* gate, i64 gate_stride,
         int gate_step, u16* __restrict__ out, float* __restrict__ sums, float* __restrict__ powers, int pad
#if RANKS
         , float* summed, float* p0, float* p1, float* p2, float* p3, float* p4, float* p5, float* p6, float* p7, int* late,
         int rank, int steps, int limit
#endif
    ) {
#endif
  let_successor_start();
#if PARTS > 1
  const int row = blockIdx.y, start = blockIdx.x * kOwn;
  __shared__ Together together;
  together.begin();
#else
  const int row = blockIdx.x, start = blockIdx.y * kOwn;  // y: of GROUPS
#endif
  float4 v[kQuads];
  float squares = 0.f, largest = 0.f;
#if EXPERTS
  constexpr float given = 1.f, eps = 0.f;
  __shared__ float own_weights[32];
  ExpertSums experts(y, by, shared, gate, residual, row, gridDim.x, n_used, COLUMNS / 4, n_piece);
  experts.keep_weights(own_weights);
#pragma unroll
  for (int i = 0; i < kQuads; ++i) v[i] = experts.before(i * kThreads + threadIdx.x);
  __syncthreads();
  wait_for_predecessor();
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const int quad = i * kThreads + threadIdx.x;
    if (quad >= COLUMNS / 4) continue;
    v[i] = experts.of<12, true>(quad, v[i]);
  }
#elif RANKS
  float4 w[kWeights];
  load_weights(w, weight, start);
  wait_for_predecessor();
  float* const buffers[kMostRanks] = {p0, p1, p2, p3, p4, p5, p6, p7};
  const Meeting meeting(buffers, rank, row);
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const int own = (i * kThreads + threadIdx.x) * 4;
    v[i] = own < kOwn ? floats_of(sent_of(load4(x + row * stride + own))) : make_float4(0.f, 0.f, 0.f, 0.f);
  }
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const int own = (i * kThreads + threadIdx.x) * 4;
    if (own < kOwn && (steps & kSends)) meeting.tell(buffers, own, sent_of(v[i]));
  }
  if (!(steps & kSums)) return;
  Patience patience(limit);
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const int own = (i * kThreads + threadIdx.x) * 4;
    if (own >= kOwn) continue;
    v[i] = meeting.sum(own, v[i], patience);
    *reinterpret_cast<float4*>(summed + static_cast<i64>(row) * COLUMNS + own) = v[i];
  }
  if (patience.left == 0 && limit > 0) *late = 1;
#pragma unroll
  for (int i = 0; i < kQuads; ++i) v[i] = prepared(v[i], v[i], w[i], nullptr, eps, squares);
#else
  float4 w[kWeights];
  load_weights(w, weight, start);
  wait_for_predecessor();
  const Source source{x + row * stride, gate + row * gate_stride, gate_step};
#pragma unroll
  for (int first = 0; first < kQuads; first += kAtOnce) {
    float4 beside[kAtOnce];
#pragma unroll
    for (int i = first; i < min(first + kAtOnce, kQuads); ++i) {
      const int own = (i * kThreads + threadIdx.x) * 4;
      v[i] = has(start, own) ? load4(source.x + start + own) : make_float4(0.f, 0.f, 0.f, 0.f);
      beside[i - first] = load_beside(source, start + own, has(start, own));
    }
#pragma unroll
    for (int i = first; i < min(first + kAtOnce, kQuads); ++i) {
      const int own = (i * kThreads + threadIdx.x) * 4;
      const float* second = HALVES && has(start, own) ? source.x + COLUMNS + start + own : nullptr;
      v[i] = prepared(v[i], beside[i - first], w[i % kWeights], second, eps, squares);
    }
  }
#endif
#pragma unroll
  for (int i = 0; i < kQuads; ++i)
    largest = fmaxf(fmaxf(fmaxf(fabsf(v[i].x), fabsf(v[i].y)), fmaxf(fabsf(v[i].z), fabsf(v[i].w))), largest);
  float power = given, factor = LAYOUT == 3 ? 1.f : 1.f / given;
  if (KIND == NORM || KIND == GROUPS) {
    factor *= rsqrtf(over_block(squares, true) / kOwn + eps);
#if RANKS
    if (threadIdx.x == 0) meeting.end();
#endif
  } else if (KIND != HEADS && LAYOUT != 3) {
#if PARTS > 1
    const Power own = power_of(together.largest(over_block(largest, false)));
#else
    const Power own = power_of(over_block(largest, false));
#endif
    power = own.power, factor = own.factor;
  }
  if (LAYOUT != 3 && threadIdx.x == 0 && start == 0) powers[row] = power;

  // Behind its last group a row is padded, by that one's first warp.
  constexpr int kPads = KIND == GROUPS && kPadded > COLUMNS;
  const bool pads = kPads && start + kOwn == COLUMNS && threadIdx.x < 32;
#pragma unroll
  for (int i = 0; i < kQuads + kPads; ++i) {
    const int own = (i * kThreads + threadIdx.x) * 4;
    const bool is_pad = i == kQuads;
    if (is_pad && !pads) break;
    const int column = is_pad ? COLUMNS + threadIdx.x * 4 : start + own;
    const bool is_in = is_pad || (((KIND != GROUPS && PARTS == 1) || own < kOwn) && (KIND == GROUPS || column < kPadded));
#if LAYOUT == 3
    const float4 own4 = is_pad ? make_float4(0.f, 0.f, 0.f, 0.f) : times(v[i % kQuads], factor);
    put_in_planes<16>(reinterpret_cast<u8*>(out) + row * static_cast<i64>(plane_bytes(COLUMNS)), column, own4, is_in);
#else
    const uint2 packed = is_pad ? make_uint2(0, 0) : halves_of(v[i % kQuads], factor);
#endif
#if LAYOUT == 1
    if (column < COLUMNS && is_in) *reinterpret_cast<uint2*>(out + static_cast<i64>(row) * COLUMNS + column) = packed;
#elif LAYOUT == 2
    if (is_in) put_in_tall(out, pad, row, column, packed);
#elif LAYOUT == 0
    put_in_block(out, sums, pad, row, column, packed, is_in);
#endif
  }
}
