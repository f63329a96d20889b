// Tiles of linear_wgmma.cu that several CTAs share: who they are, their shares, and who sums them. Included where Finish and Place are known.
#pragma once
#include "ticket.cuh"

__device__ __forceinline__ void sync_computing() { asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory"); }

// Between a barrier and a message, or a message and a barrier: one thread's fence covers what the barrier ordered.
__device__ __forceinline__ void fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

__device__ __forceinline__ int load_acquire(const int* p) {
  int v;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

struct Sharers {
  // Clusters first to first + n - 1; the last may go on with the next band, and leaves where it is the second: then the other has all
  // of the sums in its registers, and one share is written, not two. The others stay.
  int first, n, n_stay;
  int cta;               // of this cluster rank in the first one
  bool is_second;        // the first one began with an earlier band: its share lies in its second slot

  __device__ __forceinline__ Sharers(const Matrix& m, int band) {
    const int start = band * m.n_chunk, end = start + m.n_chunk;
    first = m.owner(start);
    const int last = m.owner(end - 1);
    n = last - first + 1;
    n_stay = n == 2 ? 1 : n - (m.run_start(last + 1) > end);
    is_second = m.run_start(first) < start;
    cta = first * CLUSTER + m.rank;
  }

  __device__ __forceinline__ float4* share(float* partial, int rank) const {
    const i64 slot = 2 * (cta + rank * CLUSTER) + (rank == 0 && is_second);
    return reinterpret_cast<float4*>(partial) + slot * (kParts * 32) + threadIdx.x;
  }
};

__device__ __forceinline__ void write_share(const float (&acc)[kSums], float4* share) {
#pragma unroll
  for (int j = 0; j < PAD / 8; ++j)
    __stcg(share + j * kThreads, make_float4(acc[4 * j], acc[4 * j + 1], acc[4 * j + 2], acc[4 * j + 3]));
}

// Sums and stores the part of a tile that falls to one of the CTAs that stay. A warp has kAtOnce of its parts under way, kLoads shares of
// each: trips to memory are what this takes. Where a warp has one part less, it loads the one before once more.
__device__ __forceinline__ void reduce(const Finish& f, const Sharers& who, int rank, int tile) {
  const int end = kParts * (rank + 1) / who.n_stay, warp = threadIdx.x >> 5;
#pragma unroll 1
  for (int part = kParts * rank / who.n_stay + warp; part < end; part += kAtOnce * kWarps) {
    const int n_part = part + kWarps < end ? kAtOnce : 1;
    const auto of = [&](int k) { return part + (k < n_part ? k : 0) * kWarps; };
    float4 sum[kAtOnce], old[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      sum[k] = old[k] = make_float4(0.f, 0.f, 0.f, 0.f);
      if (EPILOGUE == RESIDUAL) old[k] = Place(f.m, tile * kTile + of(k) % kTile, of(k) / kTile).load(f.residual);
    }
#pragma unroll 1
    for (int first = 0; first < who.n; first += kLoads) {
      float4 v[kAtOnce][kLoads];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k)
#pragma unroll
        for (int i = 0; i < kLoads; ++i)  // `share` has this thread's place in the first 16 parts
          v[k][i] = __ldcg(who.share(f.partial, min(first + i, who.n - 1)) + (of(k) - warp) * 32);
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k)
#pragma unroll
        for (int i = 0; i < kLoads; ++i)
          if (first + i == 0) {
            sum[k] = v[k][i];
          } else if (first + i < who.n) {
            sum[k].x += v[k][i].x, sum[k].y += v[k][i].y, sum[k].z += v[k][i].z, sum[k].w += v[k][i].w;
          }
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k)
      if (k < n_part) {
        const Place place(f.m, tile * kTile + of(k) % kTile, of(k) / kTile);
        place.store(sum[k], f.power(place.row), f.scale(tile * kTile + of(k) % kTile), old[k], f.out);
      }
  }
}

// Waits for the last to arrive, but not for ever; false: it has been left to that one.
__device__ __forceinline__ bool wait_for_go(int* state) {
  const i64 start = clock64();
  while (load_acquire(state) != kGo)
    if (clock64() - start > PATIENCE) return false;
  return true;
}

// A share of a tile is complete. The last to arrive tells the CTAs that stay, each sums its part of the tile. One that
// did not wait marks itself gone, by a compare and swap against that message, and the last to arrive does its part.
// Of two sharers the first keeps its sums in registers: it has no part but the whole. True if `acc` became that whole.
__device__ __forceinline__ bool settle(float (&acc)[kSums], const Finish& f, int band) {
  __shared__ int came_last, may_go;
  __shared__ u8 is_mine[kMaxGrid];
  const Sharers who(f.m, anew(band));
  const int tile = f.m.tile(band + f.m.first), rank = blockIdx.x / CLUSTER - who.first;
  const int count = band * CLUSTER + f.m.rank;
  const bool stays = rank < who.n_stay, keeps = stays && who.n_stay == 1;
  int* const state = f.states + blockIdx.x;
  if (!keeps) write_share(acc, who.share(f.partial, rank));
  sync_computing();
  if (threadIdx.x == 0) {
    came_last = arrive(f.counts + count) == who.n - 1;
    if (came_last) f.counts[count] = 0;  // nobody looks at it any more
  }
  sync_computing();
  int from = rank, to = rank + 1;  // parts of this CTA
  if (came_last) {
    from = 0, to = who.n_stay;
#pragma unroll 1
    for (int r = threadIdx.x; r < who.n_stay; r += kThreads) {
      int* const theirs = f.states + who.cta + r * CLUSTER;
      is_mine[r] = r == rank || atomicExch(theirs, kGo) == kGone;
      if (is_mine[r] && r != rank) *theirs = kNothing;
      fence();
    }
  } else {
    if (!stays) return false;
    if (threadIdx.x == 0) may_go = wait_for_go(state);
    sync_computing();
    if (!may_go) {
      if (keeps) write_share(acc, who.share(f.partial, rank));
      sync_computing();
      if (threadIdx.x == 0) {
        fence();
        may_go = atomicCAS(state, kNothing, kGone) == kGo;
        fence();
      }
      sync_computing();
    }
    if (!may_go) return false;
    if (threadIdx.x == 0) *state = kNothing, is_mine[rank] = true;
  }
  sync_computing();
  if (!keeps) {
    for (int r = from; r < to; ++r)
      if (is_mine[r]) reduce(f, who, r, tile);
    return false;
  }
  const float4* const theirs = who.share(f.partial, 1);
#pragma unroll
  for (int j = 0; j < PAD / 8; ++j) {
    const float4 v = __ldcg(theirs + j * kThreads);
    acc[4 * j] += v.x, acc[4 * j + 1] += v.y, acc[4 * j + 2] += v.z, acc[4 * j + 3] += v.w;
  }
  return true;
}
