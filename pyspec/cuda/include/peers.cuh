// What ranks send into each other's GPUs' memory, for kernels that sum it: peer_sum.cu, and rows.cu on the way to a product.
//
// A buffer holds   rows   [block][2][rank][PLACE]  f32  what the others sent, for even and odd calls; kNothing where nothing is
//                  calls  [block]                  u32  how many this block has made; its own rank's alone
//                  over                            u32  not 0: a rank is lost, and nobody is waited for
// with `block` of BLOCKS, and PLACE numbers of each of RANKS ranks: macros of whoever includes this.
//
// What is sent says itself that it is there: kNothing is a zero below zero, which nobody sends (it goes as a plain zero), and whoever
// waits for a number reads until it is another one. So there are no flags, and no fences between numbers and flags: a sum takes one
// way over the link. Each number is looked at, for only four bytes arrive as one. Who has read a place puts kNothing there again.
//
// Two places are enough: who writes for call k + 2 has seen all that was sent for call k + 1, and a rank sends that in a launch that
// comes after the one in which it read, and emptied, the place of call k. That launch may start early, for it waits for its
// predecessor before it sends, as all do. Kernels may take turns with a block's places: all ranks run the same ones in the same order.
//
// A block sends all of its own before it waits, and waits for the others' block of its number alone. GPUs start blocks in the order of their numbers, so
// of all that wait anywhere the lowest one's others have started, and have sent: not all blocks have to find room at once.
#pragma once
#include "types.cuh"

constexpr int kMostRanks = 8;  // buffers that a kernel is given, the first RANKS of which count
constexpr int kPatience = 64;  // looks at a number in vain between looks around
constexpr int kSends = 1, kSums = 2, kTakes = 4;
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

__device__ __forceinline__ Four sent_of(float4 v) { return {sent_as(v.x), sent_as(v.y), sent_as(v.z), sent_as(v.w)}; }

__device__ __forceinline__ float4 floats_of(Four v) {
  return {__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)};
}

struct Patience {  // limit > 0: how often a thread looks around, each time after kPatience looks in vain, before it gives up; else for ever
  int left;  // 0: it waits for nobody any more

  __device__ __forceinline__ explicit Patience(int limit) : left(limit > 0 ? limit : -1) {}

  __device__ __forceinline__ void look_around(const u32* over) {
    if (left > 0) --left;
    if (look(over) != 0) left = 0;
  }
};

// A block's part in one call: where its numbers lie. To be made behind wait_for_predecessor.
struct Meeting {
  float* own;
  u32 place;  // of 2^26 numbers at most
  int rank, block;
  u32 call;

  __device__ __forceinline__ Meeting(float* const (&buffers)[kMostRanks], int rank, int block)
      : own(buffers[0]), rank(rank), block(block) {
#pragma unroll
    for (int k = 1; k < RANKS; ++k)
      if (k == rank) own = buffers[k];
    begin();
  }

  __device__ __forceinline__ Meeting(float* own, int rank, int block) : own(own), rank(rank), block(block) { begin(); }

  __device__ __forceinline__ void begin() {
    call = *calls() + 1;
    place = (block * 2u + (call & 1)) * (RANKS * PLACE);
  }

  __device__ __forceinline__ u32* calls() const { return reinterpret_cast<u32*>(own + BLOCKS * 2u * RANKS * PLACE) + block; }
  __device__ __forceinline__ const u32* over() const { return calls() - block + BLOCKS; }

  // Four numbers, the block's from number `at` on, to all others.
  __device__ __forceinline__ void tell(float* const (&buffers)[kMostRanks], int at, Four v) const {
#pragma unroll
    for (int k = 0; k < RANKS; ++k)
      if (k != rank) send(reinterpret_cast<Four*>(buffers[k] + (place + rank * PLACE + at)), v);
  }

  // Four numbers to one other rank, whose buffer is `theirs`.
  __device__ __forceinline__ void tell_one(float* theirs, int at, Four v) const {
    send(reinterpret_cast<Four*>(theirs + (place + rank * PLACE + at)), v);
  }

  // Four numbers of rank r, once they are there. Their place is empty then.
  __device__ __forceinline__ Four take(int r, int at, Patience& patience) const {
    Four* const theirs = reinterpret_cast<Four*>(own + (place + r * PLACE + at));
    Four part = look(theirs);
    for (int tries = 1; patience.left != 0 && !all_there(part); ++tries) {
      if (tries % kPatience == 0) patience.look_around(over());
      part = look(theirs);
    }
    send(theirs, {kNothing, kNothing, kNothing, kNothing});
    return part;
  }

  // The sum of all ranks' in their order, `mine` among them, once they are there.
  __device__ __forceinline__ float4 sum(int at, float4 mine, Patience& patience) const {
    float4 sum = mine;
#pragma unroll
    for (int r = 0; r < RANKS; ++r) {
      float4 more = mine;
      if (r != rank) more = floats_of(take(r, at, patience));
      if (r == 0) sum = more;
      else sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
    }
    return sum;
  }

  // By one thread, when all of the block have been at the first line.
  __device__ __forceinline__ void end() const { *calls() = call; }
};
