// gdn.cu's o on its way into the output product: normed over its head, gated, rounded, in the product's blocks (rows.cu's
// HEADS in LAYOUT 0, to the bit). A block of gdn_rows_into has TILE of the head's columns: sums of squares go to all blocks of
// the cluster, each to each, in one trip that a barrier in the receiver's shared memory counts. The first threads take 4
// columns of a row each.
#pragma once
#include "bulk.cuh"
#include "cluster.cuh"
#include "prefetch.cuh"
#include "prepared.cuh"

constexpr int PEERS = DIM / TILE;         // blocks of a head
constexpr int OF_ROW = TILE / 4;          // threads of a row
constexpr int OF_STAGE = STAGE * OF_ROW;  // threads that have something to do
static_assert(OF_STAGE <= THREADS && 32 % OF_ROW == 0 && PEERS <= 4, "a thread has one place of a stage, a warp whole rows");

struct OnTheWay {
  float o[STAGE][TILE];
  float gate[2][OF_STAGE][4], norm[OF_STAGE][4];  // each thread fetches its own
  float squares[2][STAGE][4];  // of stages in turn, from each block of the cluster
  u64 arrived[2];              // they have come
};

__device__ __forceinline__ u32 address(const void* shared) {
  return static_cast<u32>(__cvta_generic_to_shared(shared));
}

struct Into {
  static constexpr int STRIDE = TILE;
  OnTheWay& s;
  Prefetch next;
  const float *gate, *norm;
  i64 gate_stride;
  float eps, power;
  u16* blocks;
  float *sums, *powers;
  int pad;

  // Barriers, and weights, which no kernel writes.
  __device__ __forceinline__ void start(const Meta& meta) const {
    const int tid = threadIdx.x;
    const bool is_alone = blockIdx.z == 0 && meta.start[1] == meta.start[gridDim.z];  // states of several keep memory busy
    if (is_alone) next.fetch((blockIdx.x * gridDim.y + blockIdx.y) * THREADS + tid, gridDim.x * gridDim.y * THREADS);
    if (tid == 0) {
      barrier_init(address(&s.arrived[0]), 1);
      barrier_init(address(&s.arrived[1]), 1);
      barriers_visible();
    }
    arrive_at_cluster();
    if (tid < OF_STAGE) copy16(s.norm[tid], norm + blockIdx.y * TILE + tid % OF_ROW * 4);
  }

  __device__ __forceinline__ void fetch(int j, int row, int count) const {
    const int tid = threadIdx.x;
    if (tid < count * OF_ROW) {
      const int column = blockIdx.x * DIM + blockIdx.y * TILE + tid % OF_ROW * 4;
      copy16(s.gate[j % 2][tid], gate + static_cast<i64>(row + tid / OF_ROW) * gate_stride + column);
    }
    if (tid == 0) barrier_expect(address(&s.arrived[j % 2]), count * PEERS * 4);
  }

  __device__ __forceinline__ void meet() const { wait_for_cluster(); }

  __device__ __forceinline__ void clear(const Meta&) const {}  // the blocks were made once, as zeros

  __device__ __forceinline__ float* place(int) const { return s.o[0]; }

  // A stage's places are free again when two stages later somebody sends: by then all blocks have sent the next stage's
  // squares, after a __syncthreads that follows this.
  __device__ __forceinline__ void finish(int j, int first, int count) const {
    const int tid = threadIdx.x, t = tid / OF_ROW, part = tid % OF_ROW, turn = j % 2;
    if (!__any_sync(0xffffffffu, t < count)) return;  // whole warps: lanes of rows that are not there help to shuffle
    const float4 o = quad(s.o[t] + part * 4);
    const float own = sum_of_neighbours<OF_ROW>(squares_of(o));
    const u32 barrier = address(&s.arrived[turn]);
    if (t < count && part < PEERS) send(address(&s.squares[turn][t][blockIdx.y]), own, barrier, part);
    quad(s.gate[turn][tid]) = head_gate(quad(s.norm[tid]), quad(s.gate[turn][tid]));  // stored, or it would be done later
    barrier_wait(barrier, j / 2 % 2);
    const float4 all = quad(s.squares[turn][t]);
    const float half = __fadd_rn(all.x, all.y), squares = PEERS == 4 ? __fadd_rn(half, __fadd_rn(all.z, all.w)) : half;
    const float4 y = gated_head(o, head_scale(squares, DIM, eps), quad(s.gate[turn][tid]));
    const float factor = __uint_as_float(0x7f000000u - __float_as_uint(power));  // its inverse
    const int row = first + t, column = blockIdx.x * DIM + blockIdx.y * TILE + part * 4;
    put_in_block(blocks, sums, pad, row, column, halves_of(y, factor), t < count);
    if (N_V % 2 && blockIdx.x == N_V - 1)  // blocks come in whole numbers of 256 columns
      put_in_block(blocks, sums, pad, row, column + DIM, make_uint2(0, 0), t < count);
    if (column == 0 && t < count) powers[row] = power;
  }
};
