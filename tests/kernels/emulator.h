// Enough of CUDA for sources that use no tensor cores, to run a grid on a CPU: block after block, a fiber a thread.
//
// Asynchronous copies arrive when they are waited for, and not sooner: until then their destination holds NaN. Shared
// memory holds NaN when a block starts.
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <functional>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static __attribute__((section("emulated_shared")))
using std::max;
using std::min;

struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float __uint_as_float(unsigned x) {
  float out;
  memcpy(&out, &x, 4);
  return out;
}
inline size_t __cvta_generic_to_shared(const void* p) { return reinterpret_cast<size_t>(p); }
inline float __fdividef(float a, float b) { return a / b; }

struct Dim3 {
  int x, y, z;
};
static Dim3 threadIdx, blockIdx, gridDim;

struct Copy {
  char* to;
  const char* from;
  int size;
};

struct Fiber {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(64 << 10);
  std::vector<std::vector<Copy>> groups;  // the last one is open
  bool done;
};

static std::vector<Fiber> fibers;
static ucontext_t scheduler;
static int current, arrived, generation, warp_arrived[32], warp_generation[32];
static float warp_values[32][32];
static std::function<void()> body;

inline void yield() { swapcontext(&fibers[current].context, &scheduler); }

inline void wait_for(int& count, int& turn, int n) {
  const int mine = turn;
  if (++count == n) count = 0, turn++;
  while (turn == mine) yield();
}

inline void __syncthreads() { wait_for(arrived, generation, static_cast<int>(fibers.size())); }

inline float __shfl_xor_sync(unsigned, float x, int hop) {
  const int warp = current / 32, lane = current % 32;
  warp_values[warp][lane] = x;
  wait_for(warp_arrived[warp], warp_generation[warp], 32);
  const float other = warp_values[warp][lane ^ hop];
  wait_for(warp_arrived[warp], warp_generation[warp], 32);
  return other;
}

inline int atomicCAS(int* at, int compare, int value) {
  const int old = *at;
  if (old == compare) *at = value;
  return old;
}

inline void copy_later(void* to, const void* from, int size) {
  if (reinterpret_cast<uintptr_t>(from) % size || reinterpret_cast<uintptr_t>(to) % size) __builtin_trap();
  memset(to, 0xff, size);
  fibers[current].groups.back().push_back({static_cast<char*>(to), static_cast<const char*>(from), size});
}
inline void copy16(void* to, const float* from) { copy_later(to, from, 16); }
inline void copy4(void* to, const float* from) { copy_later(to, from, 4); }
inline void copies_commit() { fibers[current].groups.emplace_back(); }
inline void copies_wait_but_last() {
  auto& groups = fibers[current].groups;
  while (groups.size() > 2) {
    for (const Copy& c : groups.front()) memcpy(c.to, c.from, c.size);
    groups.erase(groups.begin());
  }
}

extern char __start_emulated_shared[], __stop_emulated_shared[];

inline void enter() {
  body();
  fibers[current].done = true;
  yield();
}

inline void run_grid(Dim3 grid, int n_thread, std::function<void()> kernel) {
  body = kernel;
  fibers = std::vector<Fiber>(n_thread);
  gridDim = grid;
  for (int i = 0; i < grid.x * grid.y * grid.z; i++) {
    blockIdx = {i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y};
    memset(__start_emulated_shared, 0xff, __stop_emulated_shared - __start_emulated_shared);
    arrived = generation = 0;
    for (Fiber& f : fibers) {
      f.done = false;
      f.groups.assign(1, {});
      getcontext(&f.context);
      f.context.uc_stack.ss_sp = f.stack.data();
      f.context.uc_stack.ss_size = f.stack.size();
      makecontext(&f.context, enter, 0);
    }
    for (int left = n_thread; left > 0;) {
      left = 0;
      for (int k = 0; k < n_thread; k++) {
        current = i % 2 ? n_thread - 1 - k : k;  // what needs a barrier and has none shows in one order or the other
        if (fibers[current].done) continue;
        threadIdx = {current, 0, 0};
        swapcontext(&scheduler, &fibers[current].context);
        left += !fibers[current].done;
      }
    }
  }
}
