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
// limit > 0: a thread's patience (peers.cuh), behind which it sets `late`; the sum is then nobody's. 0: it waits for ever.
// blockIdx.y: ranks that run in one launch (emulated); a GPU's is one, `first`.
#include "overlap.cuh"
#include "peers.cuh"

constexpr int kThreads = 256;

extern "C" __global__ void __launch_bounds__(kThreads)
    peer_sum(const float* x, float* out, float* p0, float* p1, float* p2, float* p3, float* p4, float* p5, float* p6,
             float* p7, int* late, int n, int first, int steps, int limit) {
  float* const buffers[kMostRanks] = {p0, p1, p2, p3, p4, p5, p6, p7};
  const int block = blockIdx.x, n_block = gridDim.x;
  x += static_cast<i64>(blockIdx.y) * n;
  out += static_cast<i64>(blockIdx.y) * n;
  wait_for_predecessor();
  let_successor_start();
  const Meeting meeting(buffers, first + blockIdx.y, block);

  // turn t: the block's chunk t of x, at t chunks of its place
  if (steps & kSends)
    for (int t = 0, from = block * CHUNK; from < n; ++t, from += n_block * CHUNK)
      for (int i = threadIdx.x; i < CHUNK / 4 && from + 4 * i < n; i += kThreads)
        meeting.tell(buffers, t * CHUNK + 4 * i, sent_of(reinterpret_cast<const float4*>(x + from)[i]));
  if (!(steps & kSums)) return;

  Patience patience(limit);
  for (int t = 0, from = block * CHUNK; from < n; ++t, from += n_block * CHUNK)
    for (int i = threadIdx.x; i < CHUNK / 4 && from + 4 * i < n; i += kThreads)
      reinterpret_cast<float4*>(out + from)[i] =
          meeting.sum(t * CHUNK + 4 * i, floats_of(sent_of(reinterpret_cast<const float4*>(x + from)[i])), patience);
  if (patience.left == 0 && limit > 0) *late = 1;
  __syncthreads();  // all of the block have read how many calls there were
  if (threadIdx.x == 0) meeting.end();
}
