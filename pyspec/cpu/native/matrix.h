// A packed matrix as products read it: eight rows and 256 weights at a time, by the type's number.
#pragma once
#include <algorithm>
#include <vector>

#include "linear.h"
#include "unpack.h"

namespace pyspec {

// The bytes of a matrix, eight rows of which can be read wherever a panel starts
struct Matrix {
  const uint8_t *weights;
  int64_t n_byte, n_out;
  std::vector<uint8_t> padded;  // a matrix of fewer than eight rows, with the last one repeated

  Matrix(const uint8_t *from, int64_t n_byte, int64_t n_out) : weights(from), n_byte(n_byte), n_out(n_out) {
    if (n_out == 1) this->n_byte = 0;  // the same row in every lane
    if (n_out == 1 || n_out >= LANES) return;
    padded.resize(size_t(n_byte * LANES));
    for (int64_t l = 0; l < LANES; l++) std::memcpy(&padded[size_t(l * n_byte)], from + std::min(l, n_out - 1) * n_byte, size_t(n_byte));
    weights = padded.data();
  }
  Eight from(int64_t o) const { return {weights + panel_start(o, n_out) * n_byte, n_byte}; }
};

template <typename T>
NEVER void fill(Eight here, int64_t n_in, int64_t chunk, const void *table, Panel &panel) {
  here.at += chunk * (CHUNK / T::BLOCK) * T::BYTES;
  const int64_t left = n_in - chunk * CHUNK;
  if (T::BLOCK == CHUNK || left >= CHUNK) return T::fill(here, CHUNK, table, panel);
  std::memset(&panel, 0, sizeof panel);
  T::fill(here, int(left), table, panel);
}

// Asks for the bytes that a panel will read about this chunk. They lie side by side, in whatever order the panel reads them.
template <typename T>
ALWAYS void fetch_ahead(Eight b, int64_t chunk) {
  constexpr int64_t SIZE = CHUNK / T::BLOCK * T::BYTES * LANES;
  const uint8_t *from = b.at + chunk * SIZE;
  for (int64_t i = 0; i < SIZE; i += 64) __builtin_prefetch(from + i, 0, 2);
}

}  // namespace pyspec

// GGML's numbers of the types
#define FOR_TYPE(type, f, ...)                 \
  switch (type) {                              \
    case 2: f<Q4_0>(__VA_ARGS__); break;       \
    case 3: f<Q4_1>(__VA_ARGS__); break;       \
    case 6: f<Q5_0>(__VA_ARGS__); break;       \
    case 7: f<Q5_1>(__VA_ARGS__); break;       \
    case 8: f<Q8_0>(__VA_ARGS__); break;       \
    case 10: f<Q2_K>(__VA_ARGS__); break;      \
    case 11: f<Q3_K>(__VA_ARGS__); break;      \
    case 12: f<Q4_K>(__VA_ARGS__); break;      \
    case 13: f<Q5_K>(__VA_ARGS__); break;      \
    case 14: f<Q6_K>(__VA_ARGS__); break;      \
    case 16: f<IQ2_XXS>(__VA_ARGS__); break;   \
    case 18: f<IQ3_XXS>(__VA_ARGS__); break;   \
    case 20: f<IQ4_NL>(__VA_ARGS__); break;    \
    case 23: f<IQ4_XS>(__VA_ARGS__); break;    \
    case 39: f<MXFP4>(__VA_ARGS__); break;     \
    case 40: f<NVFP4>(__VA_ARGS__); break;     \
  }
