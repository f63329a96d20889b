// peer_sum: the sum of all ranks' rows, each GPU writing its own into the others' memory. One launch, the same bits everywhere.
//
//   x, out   [n]  f32  of this rank; 4 divides n, both aligned to 16 bytes. out = x of rank 0 + x of rank 1 + ..., in that order
//   buffers  of all ranks, this one's among them: p0 .. p7, of which n_rank count
//
// A buffer holds   rows   [block][2][rank][PLACE]  f32  what the others sent, for even and odd calls; kNothing where nothing is
//                  calls  [block]                  u32  how many this block has made; its own rank's alone
//                  over                            u32  not 0: a rank is lost, and nobody is waited for
// with `block` of BLOCKS and PLACE numbers, a multiple of CHUNK, for each.
//
// What is sent says itself that it is there: kNothing is a zero below zero, which nobody sends (it goes as a plain zero), and whoever
// waits for a number reads until it is another one. So there are no flags, and no fences between numbers and flags: a sum takes one
// way over the link. Each number is looked at, for only four bytes arrive as one. Who has read a place puts kNothing there again.
//
// Two places are enough: who writes for call k + 2 has seen all that was sent for call k + 1, and a rank sends that in a launch that
// comes after the one in which it read, and emptied, the place of call k. That launch may start early, for it waits for its
// predecessor before it sends, as all do.
//
// Block b of all ranks sums the same numbers and waits for nobody but each other's block b, and only after it has sent all of its own.
//
// steps: 1 sends, 2 waits and sums, 3 both. Ranks on one GPU take turns with it, and one that waits keeps it for all of its turn, so there they
// send, meet on the host, and then find everything there.
//
// limit > 0: clocks after which a block gives up and sets `late`; the sum is then nobody's. 0: it waits for ever.
// blockIdx.y: ranks that run in one launch (emulated); a GPU's is one, `first`.
#include "overlap.cuh"
#include "types.cuh"

constexpr int kThreads = 256, kMostRanks = 8;
constexpr int kPatience = 64;  // looks at a number between looks at `over` and the clock
constexpr u32 kNothing = 0x80000000u;

struct alignas(16) Four {
  u32 x, y, z, w;
};

__device__ __forceinline__ void send(Four* to, Four v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

__device__ __forceinline__ Four look(const Four* at) {
  Four v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
  return v;
}

__device__ __forceinline__ u32 look(const u32* at) {
  u32 v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
  return v;
}

__device__ __forceinline__ bool all_there(Four v) {
  return v.x != kNothing && v.y != kNothing && v.z != kNothing && v.w != kNothing;
}

__device__ __forceinline__ u32 sent_as(float v) {
  const u32 bits = __float_as_uint(v);
  return bits == kNothing ? 0u : bits;
}

__device__ __forceinline__ Four sent_of(const float* x, int i) {
  const float4 v = reinterpret_cast<const float4*>(x)[i];
  return {sent_as(v.x), sent_as(v.y), sent_as(v.z), sent_as(v.w)};
}

extern "C" __global__ void __launch_bounds__(kThreads)
    peer_sum(const float* x, float* out, float* p0, float* p1, float* p2, float* p3, float* p4, float* p5, float* p6,
             float* p7, int* late, int n, int first, int n_rank, int steps, i64 limit) {
  float* const buffers[kMostRanks] = {p0, p1, p2, p3, p4, p5, p6, p7};
  const int rank = first + blockIdx.y, block = blockIdx.x, n_block = gridDim.x;
  const i64 n_number = static_cast<i64>(BLOCKS) * 2 * n_rank * PLACE;
  float* own = p0;
#pragma unroll
  for (int k = 1; k < kMostRanks; ++k)
    if (k == rank) own = buffers[k];
  u32* const calls = reinterpret_cast<u32*>(own + n_number) + block;
  const u32* const over = reinterpret_cast<u32*>(own + n_number) + BLOCKS;
  x += static_cast<i64>(blockIdx.y) * n;
  out += static_cast<i64>(blockIdx.y) * n;
  wait_for_predecessor();
  let_successor_start();
  const u32 call = *calls + 1;
  const i64 place = (static_cast<i64>(block) * 2 + (call & 1)) * n_rank * PLACE;

  // turn t: the block's chunk t of x, at t chunks of its place
  if (steps & 1)
    for (int t = 0, from = block * CHUNK; from < n; ++t, from += n_block * CHUNK)
      for (int i = threadIdx.x; i < CHUNK / 4 && from + 4 * i < n; i += kThreads) {
        const Four value = sent_of(x + from, i);
        const i64 at = place + static_cast<i64>(rank) * PLACE + t * CHUNK + 4 * i;
#pragma unroll
        for (int k = 0; k < kMostRanks; ++k)
          if (k < n_rank && k != rank) send(reinterpret_cast<Four*>(buffers[k] + at), value);
      }
  if (!(steps & 2)) return;

  bool given_up = false;
  const i64 began = clock64();
  for (int t = 0, from = block * CHUNK; from < n; ++t, from += n_block * CHUNK)
    for (int i = threadIdx.x; i < CHUNK / 4 && from + 4 * i < n; i += kThreads) {
      const Four mine = sent_of(x + from, i);
      float4 sum = {};
      for (int r = 0; r < n_rank; ++r) {
        Four* const theirs = reinterpret_cast<Four*>(own + place + static_cast<i64>(r) * PLACE + t * CHUNK) + i;
        Four part = r == rank ? mine : look(theirs);
        for (int tries = 1; r != rank && !given_up && !all_there(part); ++tries) {
          if (tries % kPatience == 0) {
            given_up = look(over) != 0 || (limit > 0 && clock64() - began > limit);
            if (given_up && limit > 0) *late = 1;
          }
          part = look(theirs);
        }
        if (r != rank) send(theirs, {kNothing, kNothing, kNothing, kNothing});
        const float4 more = {__uint_as_float(part.x), __uint_as_float(part.y), __uint_as_float(part.z), __uint_as_float(part.w)};
        if (r == 0) sum = more;
        else sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
      }
      reinterpret_cast<float4*>(out + from)[i] = sum;
    }
  __syncthreads();  // all of the block have read how many calls there were
  if (threadIdx.x == 0) *calls = call;
}
