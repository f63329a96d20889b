// The few instructions of AMX that products use: eight tiles of at most 16 rows of 64 bytes. With PYSPEC_TILES_EMULATED they work on arrays, for
// tests on CPUs without AMX, and end the process where the CPU would fault.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__) && defined(__linux__) && defined(__AVX512VNNI__) && (defined(__AMX_INT8__) || defined(PYSPEC_TILES_EMULATED))
#define PYSPEC_TILES 1
#include <sys/syscall.h>
#include <unistd.h>
#else
#define PYSPEC_TILES 0
#endif

#if PYSPEC_TILES
namespace pyspec {

// What ldtilecfg reads
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t n_byte[16] = {};  // of a tile's row
  uint8_t n_row[16] = {};
};
static_assert(sizeof(TileShapes) == 64);

#if defined(PYSPEC_TILES_EMULATED)
struct EmulatedTiles {
  TileShapes shapes;
  uint8_t data[8][16][64];
};
inline thread_local EmulatedTiles tiles_here = {{.palette = 0}, {}};
inline std::atomic<int64_t> n_tile_dot{0};

inline void tiles_fault(const char *why) {
  std::fprintf(stderr, "tiles: %s\n", why);
  std::abort();
}
inline void tiles_want(bool well, const char *why) {
  if (!well) tiles_fault(why);
}
template <int T>
inline void tile_is_there() {
  static_assert(T >= 0 && T < 8);
  tiles_want(tiles_here.shapes.palette == 1, "used without shapes");
  tiles_want(tiles_here.shapes.n_row[T] > 0 && tiles_here.shapes.n_byte[T] > 0, "a tile without a shape");
}

inline bool tiles_permitted() { return true; }
inline void tiles_configure(const TileShapes &shapes) {
  tiles_want(shapes.palette == 1 && shapes.start_row == 0, "an unknown palette");
  for (int t = 0; t < 16; t++) {
    tiles_want(shapes.n_row[t] <= 16 && shapes.n_byte[t] <= 64 && (t < 8 || (shapes.n_row[t] == 0 && shapes.n_byte[t] == 0)), "a shape beyond the palette");
    tiles_want((shapes.n_row[t] == 0) == (shapes.n_byte[t] == 0), "half a shape");
  }
  tiles_here.shapes = shapes;
  std::memset(tiles_here.data, 0, sizeof tiles_here.data);
}
inline void tiles_release() {
  tiles_here.shapes = TileShapes{.palette = 0};
  std::memset(tiles_here.data, 0, sizeof tiles_here.data);
}
template <int T>
inline void tile_zero() {
  tile_is_there<T>();
  std::memset(tiles_here.data[T], 0, sizeof tiles_here.data[T]);
}
template <int T>
inline void tile_load(const void *from, int64_t stride) {
  tile_zero<T>();
  for (int r = 0; r < tiles_here.shapes.n_row[T]; r++)
    std::memcpy(tiles_here.data[T][r], static_cast<const uint8_t *>(from) + r * stride, tiles_here.shapes.n_byte[T]);
}
template <int T>
inline void tile_store(void *to, int64_t stride) {
  tile_is_there<T>();
  for (int r = 0; r < tiles_here.shapes.n_row[T]; r++)
    std::memcpy(static_cast<uint8_t *>(to) + r * stride, tiles_here.data[T][r], tiles_here.shapes.n_byte[T]);
}
template <int C, int A, int B, bool SIGNED_A>
inline void tile_dot() {
  static_assert(C != A && C != B && A != B);
  n_tile_dot.fetch_add(1, std::memory_order_relaxed);
  tile_is_there<C>(), tile_is_there<A>(), tile_is_there<B>();
  const TileShapes &s = tiles_here.shapes;
  tiles_want(s.n_row[C] == s.n_row[A] && s.n_byte[C] == s.n_byte[B] && s.n_byte[A] == 4 * s.n_row[B] && s.n_byte[C] % 4 == 0, "shapes do not fit");
  for (int m = 0; m < s.n_row[C]; m++)
    for (int n = 0; n < s.n_byte[C] / 4; n++) {
      uint32_t sum;
      std::memcpy(&sum, tiles_here.data[C][m] + 4 * n, 4);
      for (int k = 0; k < s.n_byte[A]; k++) {
        const uint8_t a = tiles_here.data[A][m][k];
        sum += uint32_t((SIGNED_A ? int32_t(int8_t(a)) : int32_t(a)) * int8_t(tiles_here.data[B][k / 4][4 * n + k % 4]));
      }
      std::memcpy(tiles_here.data[C][m] + 4 * n, &sum, 4);
    }
}
#else
// Linux gives tiles to a process that asks, all of whose threads then have them; children of a fork inherit the permission.
inline bool tiles_permitted() {
  constexpr int REQUEST = 0x1023, TILE_DATA = 18;
  static const bool yes = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
  return yes;
}
// By the compiler's assembler and not by its intrinsics: those want literal numbers, and some forget that a store writes memory.
inline void tiles_configure(const TileShapes &shapes) { asm volatile("ldtilecfg %0" : : "m"(shapes)); }
inline void tiles_release() { asm volatile("tilerelease" : : : "memory"); }
template <int T>
inline __attribute__((always_inline)) void tile_zero() { asm volatile("tilezero %%tmm%c0" : : "i"(T)); }
template <int T>
inline __attribute__((always_inline)) void tile_load(const void *from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(T) : "memory");
}
template <int T>
inline __attribute__((always_inline)) void tile_store(void *to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(T) : "memory");
}
// C[m][n] += sum of A[m][4 k + i] * B[k][4 n + i]; B has signs
template <int C, int A, int B, bool SIGNED_A>
inline __attribute__((always_inline)) void tile_dot() {
  if constexpr (SIGNED_A) asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
  else asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}
#endif

}  // namespace pyspec
#endif
