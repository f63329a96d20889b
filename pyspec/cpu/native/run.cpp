// Calls of kernels from Python: one at a time, or a recorded list of them.
#include <chrono>
#include <cstdint>

#include "pool.h"
#include "simd.h"

extern "C" {

using Kernel = void (*)(const void *args);

struct Step {
  Kernel kernel;
  const void *args;
};

void pyspec_run(Kernel kernel, const void *args, int64_t n_thread) {
  pyspec::n_thread = int(n_thread);
  kernel(args);
}

void pyspec_replay(const Step *steps, int64_t n_step, int64_t n_thread) {
  pyspec::n_thread = int(n_thread);
  for (int64_t i = 0; i < n_step; i++) steps[i].kernel(steps[i].args);
}

// The same, with the clock in `times` [n_step + 1], in ns: before the first step and behind each
void pyspec_replay_timed(const Step *steps, int64_t n_step, int64_t n_thread, int64_t *times) {
  const auto now = [] { return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1); };
  pyspec::n_thread = int(n_thread);
  times[0] = now();
  for (int64_t i = 0; i < n_step; i++) steps[i].kernel(steps[i].args), times[i + 1] = now();
}

const char *pyspec_isa() {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
  return "avx512";
#elif defined(__AVXVNNI__)
  return "avxvnni";
#elif defined(__AVX2__)
  return "avx2";
#elif PYSPEC_NEON
  return "neon";
#else
  return "plain";
#endif
}
}
