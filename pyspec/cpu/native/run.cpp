// Calls of kernels from Python: one at a time, or a recorded list of them.
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
