// peer_sum: the sum of all ranks' rows, each GPU writing its own into the others' memory (peers.cuh). One launch, the same bits everywhere.
//
//   x, out   [n]  f32  of this rank; 4 divides n, both aligned to 16 bytes. out = x of rank 0 + x of rank 1 + ..., in that order
//   buffers  of all ranks, this one's among them: p0 .. p7, of which RANKS count
//
// Block b of all ranks sums the same numbers and waits for nobody but each other's block b, and only after it has sent all of its own.
//
// steps: 1 sends, 2 waits and sums, 3 both. Ranks on one GPU take turns with it, and one that waits keeps it for all of its turn, so there they
// send, meet on the host, and then find everything there.
//
// In peer_sum_shared the ranks share the work: each chunk has an owner, to which alone the others send (1), which sums it and sends the sum to all (2), and
// from which they take it (4). So a rank sends 2 (RANKS - 1) / RANKS of its numbers in place of RANKS - 1 times all of them, and waits
// for a second way over the link. The bits are the same. A chunk's places of the two ways differ: the owner's sum lies at the others in the place of
// the owner, to which none of them has sent anything of that chunk. And whoever has the owner's sum knows that all ranks have begun this
// call, because each of them is in it: so two places are enough here, too.
//
// limit > 0: a thread's patience (peers.cuh), behind which it sets `late`; the sum is then nobody's. 0: it waits for ever.
// blockIdx.y: ranks that run in one launch (emulated); a GPU's is one, `first`.
#include "overlap.cuh"
#include "peers.cuh"

constexpr int kThreads = 256;

// turn t: the block's chunk t of x, at t chunks of its place
#define EACH_TURN(t, from) for (int t = 0, from = block * CHUNK; from < n; ++t, from += n_block * CHUNK)
#define EACH_FOUR(i, from) for (int i = threadIdx.x; i < CHUNK / 4 && from + 4 * i < n; i += kThreads)

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    peer_sum(const float* x, float* out, float* p0, float* p1, float* p2, float* p3, float* p4, float* p5, float* p6,
             float* p7, int* late, int n, int first, int steps, int limit) {
  float* const buffers[kMostRanks] = {p0, p1, p2, p3, p4, p5, p6, p7};
  const int block = blockIdx.x, n_block = gridDim.x;
  x += static_cast<i64>(blockIdx.y) * n;
  out += static_cast<i64>(blockIdx.y) * n;
  wait_for_predecessor();
  let_successor_start();
  const Meeting meeting(buffers, first + blockIdx.y, block);

  if (steps & kSends)
    EACH_TURN(t, from)
      EACH_FOUR(i, from)
        meeting.tell(buffers, t * CHUNK + 4 * i, sent_of(reinterpret_cast<const float4*>(x + from)[i]));
  if (!(steps & kSums)) return;

  Patience patience(limit);
  EACH_TURN(t, from)
    EACH_FOUR(i, from)
      reinterpret_cast<float4*>(out + from)[i] =
          meeting.sum(t * CHUNK + 4 * i, floats_of(sent_of(reinterpret_cast<const float4*>(x + from)[i])), patience);
  if (patience.left == 0 && limit > 0) *late = 1;
  __syncthreads();  // all of the block have read how many calls there were
  if (threadIdx.x == 0) meeting.end();
}

using Buffer = float*;

__device__ __forceinline__ int owner_of(int block, int t) { return (block + t) % RANKS; }

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    peer_sum_shared(const float* x, float* out, float* p0, float* p1, float* p2, float* p3, float* p4, float* p5, float* p6,
                    float* p7, int* late, int n, int first, int steps, int limit) {
  __shared__ Buffer buffers[kMostRanks];  // an owner's is looked up
  if (threadIdx.x == 0) {
    buffers[0] = p0, buffers[1] = p1, buffers[2] = p2, buffers[3] = p3;
    buffers[4] = p4, buffers[5] = p5, buffers[6] = p6, buffers[7] = p7;
  }
  __syncthreads();
  const int block = blockIdx.x, n_block = gridDim.x, rank = first + blockIdx.y;
  x += static_cast<i64>(blockIdx.y) * n;
  out += static_cast<i64>(blockIdx.y) * n;
  wait_for_predecessor();
  let_successor_start();
  const Meeting meeting(buffers[rank], rank, block);

  if (steps & kSends)
    EACH_TURN(t, from) {
      if (owner_of(block, t) == rank) continue;
      float* const theirs = buffers[owner_of(block, t)];
      EACH_FOUR(i, from)
        meeting.tell_one(theirs, t * CHUNK + 4 * i, sent_of(reinterpret_cast<const float4*>(x + from)[i]));
    }

  Patience patience(limit);
  if (steps & kSums)
    EACH_TURN(t, from) {
      if (owner_of(block, t) != rank) continue;
      EACH_FOUR(i, from) {
        const Four mine = sent_of(reinterpret_cast<const float4*>(x + from)[i]);
        const float4 sum = meeting.sum(t * CHUNK + 4 * i, floats_of(mine), patience);
        for (int k = 0; k < RANKS; ++k)
          if (k != rank) meeting.tell_one(buffers[k], t * CHUNK + 4 * i, sent_of(sum));
        reinterpret_cast<float4*>(out + from)[i] = sum;
      }
    }
  if (steps & kTakes)
    EACH_TURN(t, from) {
      if (owner_of(block, t) == rank) continue;
      EACH_FOUR(i, from)
        reinterpret_cast<float4*>(out + from)[i] = floats_of(meeting.take(owner_of(block, t), t * CHUNK + 4 * i, patience));
    }
  if (patience.left == 0 && limit > 0) *late = 1;
  if (!(steps & kTakes)) return;
  __syncthreads();  // all of the block have read how many calls there were
  if (threadIdx.x == 0) meeting.end();
}
