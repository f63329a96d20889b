// Eight sums at once.
#pragma once
#include "simd.h"

namespace pyspec {

// The sums of eight vectors
inline f8 sums(const f8 *a) {
#if defined(__AVX__)
  const __m256 b0 = _mm256_hadd_ps(__m256(a[0]), __m256(a[1])), b1 = _mm256_hadd_ps(__m256(a[2]), __m256(a[3]));
  const __m256 b2 = _mm256_hadd_ps(__m256(a[4]), __m256(a[5])), b3 = _mm256_hadd_ps(__m256(a[6]), __m256(a[7]));
  const __m256 c0 = _mm256_hadd_ps(b0, b1), c1 = _mm256_hadd_ps(b2, b3);
  return f8(_mm256_add_ps(_mm256_permute2f128_ps(c0, c1, 0x20), _mm256_permute2f128_ps(c0, c1, 0x31)));
#else
  return f8{sum(a[0]), sum(a[1]), sum(a[2]), sum(a[3]), sum(a[4]), sum(a[5]), sum(a[6]), sum(a[7])};
#endif
}

}  // namespace pyspec
