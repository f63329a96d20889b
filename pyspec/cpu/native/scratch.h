// Memory of the calling thread for values between two loops of one call. The thread's next call takes it over, so a call asks once.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <new>

namespace pyspec {

inline float *scratch(int64_t n_float) {
  struct Block {
    float *data = nullptr;
    int64_t n = 0;
    ~Block() { std::free(data); }
  };
  static thread_local Block block;
  if (block.n < n_float) {
    std::free(block.data);
    block.n = 0;
    const int64_t n = (n_float + n_float / 4 + 1023) / 1024 * 1024;
    block.data = static_cast<float *>(std::aligned_alloc(64, size_t(n) * 4));
    if (block.data == nullptr) throw std::bad_alloc();
    block.n = n;
  }
  return block.data;
}

}  // namespace pyspec
