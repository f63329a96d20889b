// Around experts that lie in the host's memory (lane.py): what a card hands to the host's thread, and what it makes of the answer.
//
//   x         [row, n_in]     f32  x_step quads from row to row; normed first if `norm` [n_in] is there
//   ids       [row, n_used]   i32  as routed; clamped. -1, and rows of no sequence (row_seq [row] below 0, or no such tensor): none
//   slots     [n_expert]      i16  an expert's place on the card, -1: it is in the host's memory alone; or none: all are
//   hits      [row, n_used]   i32  places of those on the card, else -1 (moe.cu passes over these); or none
//   missed    [row]           i32  how many the host computes
//   used      [row, n_wide]   i16  what this layer's columns of a forward's log get: id, -2 - id of one in the host's memory alone, -1: none;
//                                  or no log
//   state     [8]             i32  on the card, zeros at first: tickets; misses so far; number of the last job; of the job that a CTA of
//                                  lane_gate asks for; of the last one that it need not ask for; not 0: the host has not answered once
//
// In memory that both reach, the job: head [32] u32 {number, layer, rows, misses, ...; 16: the number that was answered}, ids and weights
// [row, n_used], x and y [row, n_in] f32 of rows with misses; y is the sum of a row's misses, weighed.
//
// lane_split has a CTA for each row. All of a job is written before its number: a CTA's threads, a barrier, the fence of one of them, its
// ticket, the last one's fence, the number. Without a miss there is no number, and nobody waits.
//
// lane_gate adds as expert_sums.cuh does, in this order: the hits as chosen, the host's sum, the shared expert, the residual. It has a CTA
// for each row and 1024 columns. The first one that comes asks the host, the others ask it: over the link a question takes a microsecond.
// Who waits longer than `limit` of the clock writes a fault, and from then on nobody waits.
//
// Both wait for their predecessor before all else, and let the next kernel start behind that. What others wrote is read past L1.
#include "bounds.cuh"
#include "expert_sums.cuh"
#include "overlap.cuh"
#include "ticket.cuh"

#define OP_MOE 18  // number of the op in fault records

constexpr int kThreads = 256, kMostUsed = 32;
constexpr int kLayer = 1, kRows = 2, kMisses = 3, kDone = 16;                                         // of the head
constexpr int kTicket = 0, kSoFar = 1, kNumber = 2, kAsker = 3, kAnswered = 4, kLost = 5;  // of the state

__device__ __forceinline__ u32 look(const u32* at) {
  u32 v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
  return v;
}

__device__ __forceinline__ float4 look(const float4* at) {
  u32 x, y, z, w;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x), "=r"(y), "=r"(z), "=r"(w) : "l"(at) : "memory");
  return make_float4(__uint_as_float(x), __uint_as_float(y), __uint_as_float(z), __uint_as_float(w));
}

// The factor of a row's norm, for all threads.
__device__ __forceinline__ float inverse_rms(const float4* x, int n_quad, float eps) {
  __shared__ float of_warp[kThreads / 32];
  float sum = 0.f;
  for (int i = threadIdx.x; i < n_quad; i += kThreads) {
    const float4 v = __ldcg(x + i);
    sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
  }
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sum;
  __syncthreads();
  float all = 0.f;
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) all += of_warp[i];
  return rsqrtf(all / static_cast<float>(4 * n_quad) + eps);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    lane_split(const float4* x, const float4* norm, const int* ids, const float* weights, const short* slots, const int* row_seq, int* hits,
               int* missed, u32* head, int* job_ids, float* job_weights, float4* job_x, int* state, short* used, int layer, int n_quad, int x_step,
               int n_used, int n_expert, int n_wide, float eps) {
  wait_for_predecessor();
  let_successor_start();
  __shared__ int n_miss;
  const int row = blockIdx.x, t = threadIdx.x;
  if (t < 32) {
    const bool is_choice = t < n_used;
    const i64 pair = static_cast<i64>(row) * n_used + t;
    int id = is_choice ? __ldcg(ids + pair) : -1, slot = -1;
    if (row_seq != nullptr && __ldcg(row_seq + row) < 0) id = -1;
    if (id != -1) id = min(max(id, 0), n_expert - 1);
    if (id != -1 && slots != nullptr) slot = __ldcg(slots + id);
    const bool is_miss = id != -1 && slot < 0;
    if (is_choice && hits != nullptr) hits[pair] = slot;
    if (is_choice) job_ids[pair] = is_miss ? id : -1;
    if (is_miss) job_weights[pair] = __ldcg(weights + pair);
    if (is_choice && used != nullptr) used[static_cast<i64>(row) * n_wide + t] = static_cast<short>(is_miss ? -2 - id : id);
    const int n = __popc(__ballot_sync(0xffffffffu, is_miss));
    if (t == 0) n_miss = n, missed[row] = n;
  }
  __syncthreads();
  if (n_miss > 0) {
    const float4* own = x + static_cast<i64>(row) * x_step;
    float4* to = job_x + static_cast<i64>(row) * n_quad;
    const float by = norm != nullptr ? inverse_rms(own, n_quad, eps) : 1.f;
    for (int i = t; i < n_quad; i += kThreads) {
      const float4 v = __ldcg(own + i), w = norm != nullptr ? norm[i] : make_float4(1.f, 1.f, 1.f, 1.f);
      to[i] = make_float4(v.x * by * w.x, v.y * by * w.y, v.z * by * w.z, v.w * by * w.w);
    }
  }
  __syncthreads();
  if (t != 0) return;
  if (n_miss > 0) atomicAdd(state + kSoFar, n_miss);
  __threadfence_system();
  if (arrive(state + kTicket) != static_cast<int>(gridDim.x) - 1) return;
  const int n = atomicExch(state + kSoFar, 0);
  state[kTicket] = 0;
  if (n == 0) return;
  const u32 number = static_cast<u32>(__ldcg(state + kNumber)) + 1;
  state[kNumber] = static_cast<int>(number);
  head[kLayer] = layer, head[kRows] = gridDim.x, head[kMisses] = n;
  __threadfence_system();
  *static_cast<volatile u32*>(head) = number;
}

// Whether `at` becomes `number` within `limit` of the clock; what was written before it is seen behind this.
__device__ __forceinline__ bool comes(const u32* at, u32 number, i64 limit, int pause) {
  const i64 began = clock64();
  while (look(at) != number) {
    if (clock64() - began > limit) return false;
    __nanosleep(pause);
  }
  __threadfence_system();
  return true;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    lane_gate(const float4* y, const int* hits, const float* weights, const float4* shared, const float* gate, const float4* residual,
              float4* out, const int* missed, const u32* head, const float4* job_y, int* state, int* fault, int n_used, int n_quad,
              i64 limit) {
  wait_for_predecessor();
  let_successor_start();
  __shared__ bool is_there;
  __shared__ float by[kMostUsed];
  __shared__ int place[kMostUsed];
  const int row = blockIdx.x, quad = blockIdx.y * kThreads + threadIdx.x;
  const bool has_missed = missed != nullptr && __ldcg(missed + row) > 0;
  if (threadIdx.x < n_used) {
    by[threadIdx.x] = __ldcg(weights + static_cast<i64>(row) * n_used + threadIdx.x);
    place[threadIdx.x] = y == nullptr ? -1 : __ldcg(hits + static_cast<i64>(row) * n_used + threadIdx.x);
  }
  if (threadIdx.x == 0 && has_missed) {
    const u32 number = static_cast<u32>(__ldcg(state + kNumber));
    if (static_cast<u32>(atomicExch(state + kAsker, static_cast<int>(number))) != number) {
      is_there = __ldcg(state + kLost) == 0 && comes(head + kDone, number, limit, 64);
      if (!is_there) {
        state[kLost] = 1;
        clamped(static_cast<int>(number), 0, OP_MOE, -1, fault);
      }
      __threadfence();
      atomicExch(state + kAnswered, static_cast<int>(number));
    } else {
      is_there = comes(reinterpret_cast<const u32*>(state) + kAnswered, number, 2 * limit, 32) && __ldcg(state + kLost) == 0;
    }
  }
  __syncthreads();
  if (quad >= n_quad) return;
  const i64 at = static_cast<i64>(row) * n_quad + quad;
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
  for (int j = 0; j < n_used; ++j)
    if (place[j] >= 0) sum = plus(sum, __ldcg(y + (static_cast<i64>(row) * n_used + j) * n_quad + quad), by[j]);
  if (has_missed && is_there) sum = plus(sum, look(job_y + at), 1.f);
  if (shared != nullptr) sum = plus(sum, __ldcg(shared + at), gate != nullptr ? __ldcg(gate + row) : 1.f);
  out[at] = residual != nullptr ? plus(__ldcg(residual + at), sum, 1.f) : sum;
}
