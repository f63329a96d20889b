// Matrices as in the file into the records that products stream, where every bit of a record is a bit of the file. Meaning: linear/pack.py.
//
//   raw    [n_out, row_bytes]    u8   rows of n_block blocks
//   from   [word of a record, 32] u16  for each of its bits, the bit of the 16 rows' blocks of a chunk, side by side; behind the last one: zero
//   flips  [word of a record, 2] u32  bits that are the other way, and what is added behind that
//   out    [tile][chunk][group]  records of u32; a tile has 16 groups of 16 rows, the last one as many as there are
//
// Grid (tiles * chunks, parts of a record), a thread for each word of a record: it keeps its 32 places for all groups of the tile. Rows behind the last, and blocks
// behind a row's last, are zeros. Bound by looking up bits in shared memory: a byte takes eight.
// Macros: ROW (bytes of a row in a chunk), WORDS (of a record), THREADS (of a CTA).
#include "types.cuh"

constexpr int kRows = 16, kGroups = 16, kBytes = kRows * ROW;

extern "C" __global__ void __launch_bounds__(THREADS)
    repack(const u8* raw, const uint4* from, const uint2* flips, u32* out, i64 n_out, i64 row_bytes, int n_chunk) {
  __shared__ u8 own[kBytes + 1];
  const int t = blockIdx.y * THREADS + threadIdx.x, chunk = static_cast<int>(blockIdx.x % n_chunk);
  const i64 tile = blockIdx.x / n_chunk, n_group = (n_out + kRows - 1) / kRows;
  const int high = static_cast<int>(min(static_cast<i64>(kGroups), n_group - tile * kGroups));
  const i64 first = static_cast<i64>(chunk) * ROW;
  u32 places[16];  // two a word
  uint2 flip = make_uint2(0, 0);
  if (t < WORDS) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 four = from[4 * t + i];
      places[4 * i] = four.x, places[4 * i + 1] = four.y, places[4 * i + 2] = four.z, places[4 * i + 3] = four.w;
    }
    flip = flips[t];
  }
  for (int g = 0; g < high; ++g) {
    __syncthreads();  // the group before is looked up
    for (int i = threadIdx.x; i <= kBytes; i += THREADS) {
      const i64 row = (tile * kGroups + g) * kRows + i / ROW, at = first + i % ROW;
      own[i] = i < kBytes && row < n_out && at < row_bytes ? raw[row * row_bytes + at] : u8(0);
    }
    __syncthreads();
    if (t >= WORDS) continue;
    u32 word = 0;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const u32 place = i % 2 == 0 ? places[i / 2] & 0xffffu : places[i / 2] >> 16;
      word |= (static_cast<u32>(own[place >> 3]) >> (place & 7) & 1u) << i;
    }
    out[(tile * kGroups * n_chunk + static_cast<i64>(chunk) * high + g) * WORDS + t] = (word ^ flip.x) + flip.y;
  }
}
