// Whether this process may use AMX's tiles. The first tile instruction runs in a child, because on some virtual machines that announce AMX it faults.
#include "tiles.h"

#if PYSPEC_TILES
#include <cpuid.h>
#include <errno.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <initializer_list>

using namespace pyspec;

namespace {

#if !defined(PYSPEC_TILES_EMULATED)
bool cpu_has_tiles() {
  constexpr unsigned INT8 = 1u << 25, TILE = 1u << 24;
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & INT8) && (d & TILE);
}

bool system_saves_tiles() {
  constexpr uint32_t CONFIGURATION = 1u << 17, DATA = 1u << 18, BOTH = CONFIGURATION | DATA;
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return false;
  uint32_t low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & BOTH) == BOTH;
}
#endif

// A product of two rows with two columns, whose sums are known
bool tile_product_is_right() {
  TileShapes shapes;
  for (int t = 0; t < 3; t++) shapes.n_row[t] = 2, shapes.n_byte[t] = 8;
  alignas(64) int8_t a[16], b[16];
  alignas(64) int32_t sums[4] = {};
  for (int i = 0; i < 16; i++) a[i] = int8_t(9 * i - 128), b[i] = int8_t(127 - 16 * i);
  tiles_configure(shapes);
  tile_zero<0>(), tile_load<1>(a, 8), tile_load<2>(b, 8);
  tile_dot<0, 1, 2, true>(), tile_dot<0, 1, 2, false>();
  tile_store<0>(sums, 8);
  tiles_release();
  for (int m = 0; m < 2; m++)
    for (int n = 0; n < 2; n++) {
      int32_t want = 0;
      for (int k = 0; k < 8; k++) want += (int32_t(a[8 * m + k]) + int32_t(uint8_t(a[8 * m + k]))) * b[k / 4 * 8 + 4 * n + k % 4];
      if (sums[2 * m + n] != want) return false;
    }
  return true;
}

// In a child that shares nothing, sends no signal at its end, and calls the system alone
bool child_multiplies() {
  int ends[2];
  if (pipe(ends) != 0) return false;
  const long child = syscall(SYS_clone, 0L, 0L, 0L, 0L, 0L);
  if (child == 0) {
    struct sigaction usual = {};
    usual.sa_handler = SIG_DFL;
    for (int fatal : {SIGSEGV, SIGILL, SIGBUS, SIGFPE, SIGABRT}) sigaction(fatal, &usual, nullptr);
    const rlimit none = {0, 0};
    setrlimit(RLIMIT_CORE, &none);
    const char yes = 1;
    const bool told = tile_product_is_right() && write(ends[1], &yes, 1) == 1;
    syscall(SYS_exit_group, told ? 0 : 1);
  }
  close(ends[1]);
  char answer = 0;
  if (child > 0) {
    while (read(ends[0], &answer, 1) < 0 && errno == EINTR) {}
    while (waitpid(pid_t(child), nullptr, __WALL) < 0 && errno == EINTR) {}
  }
  close(ends[0]);
  return answer == 1;
}

}  // namespace

// 0: it may; else the number of a reason (build.py)
extern "C" int32_t pyspec_tiles_ready() {
#if !defined(PYSPEC_TILES_EMULATED)
  if (!cpu_has_tiles()) return 1;
  if (!system_saves_tiles()) return 2;
  if (!tiles_permitted()) return 3;
#endif
  return child_multiplies() ? 0 : 4;
}

#if defined(PYSPEC_TILES_EMULATED)
// Products of tiles since the start, and whether this thread holds tiles
extern "C" int64_t pyspec_tiles_multiplied() { return n_tile_dot.load(); }
extern "C" int32_t pyspec_tiles_held() { return tiles_here.shapes.palette; }
#endif
#else
extern "C" int32_t pyspec_tiles_ready() { return 1; }
#endif
