// embed: a token's row of the embedding, unpacked, and cos and sin of its position's rope. Meaning: embed_ref.py.
//
//   raw        [token, row_bytes]  u8   rows of whole blocks of TYPE as in the file, the first at a multiple of 16 bytes
//   tokens     [row]               i64
//   x          [row, n_column]     f32  written, to the bits of dequant_ref.py: every product and difference is rounded
//   positions  [row]               i64
//   freq       [n_turn]            f32
//   cos, sin   [row, n_turn]       f32  written; these four are not looked at where n_turn is 0
//   fault      [5]                 i32  see bounds.cuh
//
// grid (row, parts of a row and, where there are angles, one more), THREADS of 4 columns each. Bound by latency: a token, then its
// bytes. It waits for nobody and lets nobody start early; why: angles.cu.
// Macros: TYPE (ggml's number), THREADS, OP_ID.
#include "angles.cuh"
#include "bounds.cuh"
#include "unpacked.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    embed(const u8* raw, i64 row_bytes, int n_token, const i64* tokens, float* x, int n_column, const i64* positions,
          const float* freq, float* cos_to, float* sin_to, int n_turn, float inverse, int* fault) {
  const i64 row = blockIdx.x;
  const int column = (blockIdx.y * THREADS + threadIdx.x) * 4;
  if (n_turn != 0 && blockIdx.y == gridDim.y - 1) {
    const i64 position = positions[row];
    for (int i = threadIdx.x; i < n_turn; i += THREADS)
      put_angle(position, freq[i], inverse, cos_to + row * n_turn + i, sin_to + row * n_turn + i);
    return;
  }
  if (column >= n_column) return;
  const i64 given = tokens[row];
  const int place = given < 0 || given > 0x7fffffff ? -1 : static_cast<int>(given);
  const int token = clamped(place, n_token, OP_ID, static_cast<int>(row), fault);
  *reinterpret_cast<float4*>(x + row * n_column + column) = unpacked(raw + token * row_bytes, column);
}
