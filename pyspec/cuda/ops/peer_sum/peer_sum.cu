// peer_sum: the sum of all ranks' rows, each GPU writing its own into the others' memory. One launch, the same bits everywhere.
//
//   x, out   [n]  f32  of this rank; 4 divides n, both aligned to 16 bytes. out = x of rank 0 + x of rank 1 + ..., in that order
//   buffers  of all ranks, this one's among them: p0 .. p7, of which n_rank count
//
// A buffer holds, for every block:   rows   [2][rank][CHUNK]  f32  what each rank sent, for even and odd calls
//                                    flags  [rank]            u32  the last call for which that rank's rows are there
//                                    calls                    u32  how many this block has made; its own rank's alone
// Block b of all ranks sums the same CHUNK numbers and waits for nobody but each other's block b: it sends its rows to every
// rank, then says so in that one's flags, and waits until its own flags say that all have sent. What is read is local.
//
// Two places are enough: who writes for call k + 2 has seen all flags of call k + 1, and a rank sets those in a launch that comes
// after the one in which it read what was sent for call k. For that launches must not overlap: this one is never started early.
//
// steps: 1 sends, 2 waits and sums, 3 both. Ranks on one GPU take turns with it, and one that waits keeps it for all of its turn, so there they
// send, meet on the host, and then find all flags set.
//
// limit > 0: clocks after which a block gives up and sets `late`; the sum is then nobody's. 0: it waits for ever.
// blockIdx.y: ranks that run in one launch (emulated); a GPU's is one, `first`.
#include "types.cuh"

constexpr int kThreads = 256, kMostRanks = 8;
constexpr u32 kOver = 0xffffffffu;  // in a flag: a rank is lost, and nobody is waited for

__device__ __forceinline__ void tell(u32* flag, u32 call) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(call) : "memory");
}

__device__ __forceinline__ u32 told(const u32* flag) {
  u32 call;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(call) : "l"(flag) : "memory");
  return call;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    peer_sum(const float* x, float* out, float* p0, float* p1, float* p2, float* p3, float* p4, float* p5, float* p6,
             float* p7, int* late, int n, int first, int n_rank, int steps, i64 limit) {
  float* const buffers[kMostRanks] = {p0, p1, p2, p3, p4, p5, p6, p7};
  const int rank = first + blockIdx.y, block = blockIdx.x;
  constexpr i64 kRows = static_cast<i64>(BLOCKS) * 2 * kMostRanks * CHUNK;
  const i64 at = static_cast<i64>(block) * 2 * kMostRanks * CHUNK, from = static_cast<i64>(block) * CHUNK;
  const int n_here = min(CHUNK, static_cast<int>(n - from)) / 4;
  u32* const own_flags = reinterpret_cast<u32*>(buffers[rank] + kRows) + block * kMostRanks;
  u32* const calls = reinterpret_cast<u32*>(buffers[rank] + kRows) + BLOCKS * kMostRanks + block;
  const u32 call = *calls + 1;
  const i64 place = at + static_cast<i64>(call & 1) * kMostRanks * CHUNK;
  x += static_cast<i64>(blockIdx.y) * n + from;
  out += static_cast<i64>(blockIdx.y) * n + from;

  for (int i = threadIdx.x; (steps & 1) && i < n_here; i += kThreads) {
    const float4 value = reinterpret_cast<const float4*>(x)[i];
    for (int k = 0; k < n_rank; ++k) {
      const int to = (rank + k) % n_rank;
      reinterpret_cast<float4*>(buffers[to] + place + static_cast<i64>(rank) * CHUNK)[i] = value;
    }
  }
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x < n_rank) {
    if (steps & 1) tell(reinterpret_cast<u32*>(buffers[threadIdx.x] + kRows) + block * kMostRanks + rank, call);
    const i64 began = clock64();
    for (u32 seen = steps & 2 ? told(own_flags + threadIdx.x) : call; seen != call && seen != kOver; seen = told(own_flags + threadIdx.x)) {
      if (limit > 0 && clock64() - began > limit) {
        *late = 1;
        break;
      }
    }
  }
  if (!(steps & 2)) return;
  __syncthreads();
  __threadfence_system();
  const float4* const rows = reinterpret_cast<const float4*>(buffers[rank] + place);
  for (int i = threadIdx.x; i < n_here; i += kThreads) {
    float4 sum = __ldcg(rows + i);
    for (int r = 1; r < n_rank; ++r) {
      const float4 more = __ldcg(rows + r * (CHUNK / 4) + i);
      sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
    }
    reinterpret_cast<float4*>(out)[i] = sum;
  }
  if (threadIdx.x == 0) *calls = call;
}
