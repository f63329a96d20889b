// A Hadamard transform of heads in place, to the bits of slots/kv_codes.py: sums and differences of pairs, near ones first.
#pragma once
#include "attend_tiles.h"

namespace pyspec {

// Pairs of lanes at distances 1, 2 and 4.
inline f8 turned_eight(f8 x) {
  const f8 a = PYSPEC_PICK(x, x, 0, 0, 2, 2, 4, 4, 6, 6), b = PYSPEC_PICK(x, x, 1, 1, 3, 3, 5, 5, 7, 7);
  const f8 y = PYSPEC_PICK(a + b, a - b, 0, 9, 2, 11, 4, 13, 6, 15);
  const f8 c = PYSPEC_PICK(y, y, 0, 1, 0, 1, 4, 5, 4, 5), d = PYSPEC_PICK(y, y, 2, 3, 2, 3, 6, 7, 6, 7);
  const f8 z = PYSPEC_PICK(c + d, c - d, 0, 1, 10, 11, 4, 5, 14, 15);
  const f8 e = PYSPEC_PICK(z, z, 0, 1, 2, 3, 0, 1, 2, 3), f = PYSPEC_PICK(z, z, 4, 5, 6, 7, 4, 5, 6, 7);
  return PYSPEC_PICK(e + f, e - f, 0, 1, 2, 3, 12, 13, 14, 15);
}

// Every n of x's `size` values; n: a power of two from 8 on that divides them.
inline void hadamard(float *x, int64_t size, int64_t n) {
  float factor = 1.0f;
  int64_t left = n;
  for (; left >= 4; left /= 4) factor *= 0.5f;
  if (left == 2) factor *= 0.70710678118654752440f;
  for (int64_t i = 0; i < size; i += 8) store(x + i, turned_eight(load(x + i)));
  for (int64_t far = 8; far < n; far *= 2) {
    for (int64_t i = 0; i < size; i += 2 * far) {
      for (int64_t j = i; j < i + far; j += 8) {
        const f8 a = load(x + j), b = load(x + j + far);
        store(x + j, a + b);
        store(x + j + far, a - b);
      }
    }
  }
  for (int64_t i = 0; i < size; i += 8) store(x + i, load(x + i) * all(factor));
}

}  // namespace pyspec
