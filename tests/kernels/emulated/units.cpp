// What warps do together and what arrives later: shuffles, tensor-core products, asynchronous copies and their barriers.
//
// An asynchronous copy poisons its target at once and brings the bytes as late as it may, so that a wait or a barrier that
// is missing shows, as does a target that somebody still reads. A warpgroup's product reads its right operand at once or at
// the wait, as the dice say.
#include <string.h>

#include "state.h"

namespace emulator {

void exchange(void* const* brought, u32 mask) {
  for (u32 lane = 0; lane < 32; ++lane) {
    if (!(mask >> lane & 1)) continue;
    Exchange& e = *static_cast<Exchange*>(brought[lane]);
    const bool comes = e.from >= 0 && e.from < 32 && mask >> e.from & 1;
    e.got = comes ? static_cast<Exchange*>(brought[e.from])->value : ~0ull;  // nobody's value is a NaN
  }
}

namespace {

template <class F>
void vote(void* const* brought, u32 mask, u32 start, F f) {
  u32 all = start;
  for (u32 lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1) all = f(all, static_cast<Vote*>(brought[lane])->value, lane);
  for (u32 lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1) static_cast<Vote*>(brought[lane])->got = all;
}

}  // namespace

void ballot(void* const* brought, u32 mask) {
  vote(brought, mask, 0, [](u32 all, u32 x, u32 lane) { return all | x << lane; });
}
void sum_signed(void* const* brought, u32 mask) {
  vote(brought, mask, 0, [](u32 all, u32 x, u32) { return all + x; });
}
void least_signed(void* const* brought, u32 mask) {
  vote(brought, mask, 0x7fffffff, [](u32 a, u32 b, u32) { return static_cast<int>(b) < static_cast<int>(a) ? b : a; });
}
void most_signed(void* const* brought, u32 mask) {
  vote(brought, mask, 0x80000000, [](u32 a, u32 b, u32) { return static_cast<int>(a) < static_cast<int>(b) ? b : a; });
}

// ---- numbers

namespace {

u32 bits_of(float x) {
  u32 out;
  memcpy(&out, &x, 4);
  return out;
}

float float_of(u32 x) {
  float out;
  memcpy(&out, &x, 4);
  return out;
}

inline float half(u32 x) {
  const u32 sign = (x & 0x8000u) << 16, rest = x & 0x7fffu;
  float out = float_of(rest << 13) * 5.192296858534828e33f;  // 2^112
  out = rest >= 0x7c00u ? float_of(rest << 13 | 0x7f800000u) : out;
  return float_of(bits_of(out) | sign);
}

inline float brain(u32 x) { return float_of((x & 0xffffu) << 16); }

}  // namespace

float f32_of_f16(u16 x) { return half(x); }

u16 f16_of_f32(float x) {  // to nearest, ties to even
  const u32 b = bits_of(x), sign = b >> 16 & 0x8000u, rest = b & 0x7fffffffu;
  if (rest > 0x7f800000u) return 0x7fff;
  if (rest >= 0x47800000u) return static_cast<u16>(sign | 0x7c00u);                                     // 2^16
  if (rest < 0x38800000u) return static_cast<u16>(sign | (bits_of(float_of(rest) + 0.5f) - 0x3f000000u));  // 2^-14
  return static_cast<u16>(sign | (rest + 0xfffu + (rest >> 13 & 1) - 0x38000000u) >> 13);
}

u16 bf16_of_f32(float x) {
  const u32 b = bits_of(x);
  if ((b & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return static_cast<u16>((b + 0x7fffu + (b >> 16 & 1)) >> 16);
}

// ---- products

namespace {

// a [16][16], b [n][16], sums [n][16 rows]: of f32 with the products in f64, rounded once.
template <class Value>
void left_operand(float (&out)[16][16], const u32* const (&a)[32], Value value) {
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, t = lane % 4;
    for (int r = 0; r < 4; ++r) {
      const int row = g + r % 2 * 8, column = 2 * t + r / 2 * 8;
      out[row][column] = value(a[lane][r]), out[row][column + 1] = value(a[lane][r] >> 16);
    }
  }
}

template <class Value>
void product16(void* const* brought, Value value) {
  float a[16][16], b[8][16];
  const u32* left[32];
  for (int lane = 0; lane < 32; ++lane) left[lane] = static_cast<Product*>(brought[lane])->a;
  left_operand(a, left, value);
  for (int lane = 0; lane < 32; ++lane) {
    const Product& p = *static_cast<Product*>(brought[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int r = 0; r < 2; ++r) b[g][2 * t + 8 * r] = value(p.b[r]), b[g][2 * t + 8 * r + 1] = value(p.b[r] >> 16);
  }
  for (int lane = 0; lane < 32; ++lane) {
    Product& p = *static_cast<Product*>(brought[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i) {
      const float *x = a[g + i / 2 * 8], *y = b[2 * t + i % 2];
      double sum = 0;
      for (int k = 0; k < 16; ++k) sum += static_cast<double>(x[k]) * y[k];
      p.d[i] = static_cast<float>(p.d[i] + sum);
    }
  }
}

float tf32(u32 bits) {
  bits &= 0xffffe000u;
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

void product8(void* const* brought) {
  float a[16][8], b[8][8];
  for (int lane = 0; lane < 32; ++lane) {
    const Product& p = *static_cast<Product*>(brought[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int r = 0; r < 4; ++r) a[g + r % 2 * 8][t + r / 2 * 4] = tf32(p.a[r]);
    for (int r = 0; r < 2; ++r) b[g][t + r * 4] = tf32(p.b[r]);
  }
  for (int lane = 0; lane < 32; ++lane) {
    Product& p = *static_cast<Product*>(brought[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i) {
      double sum = 0;
      for (int k = 0; k < 8; ++k) sum += static_cast<double>(a[g + i / 2 * 8][k]) * b[2 * t + i % 2][k];
      p.d[i] = static_cast<float>(p.d[i] + sum);
    }
  }
}

template <class Byte>  // of a
void product_whole(void* const* brought) {
  int a[16][32], b[8][32];
  for (int lane = 0; lane < 32; ++lane) {
    const Whole& p = *static_cast<Whole*>(brought[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i) {
      for (int r = 0; r < 4; ++r) a[g + r % 2 * 8][4 * t + i + r / 2 * 16] = static_cast<Byte>(p.a[r] >> 8 * i);
      for (int r = 0; r < 2; ++r) b[g][4 * t + i + r * 16] = static_cast<signed char>(p.b[r] >> 8 * i);
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    Whole& p = *static_cast<Whole*>(brought[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i)
      for (int k = 0; k < 32; ++k) p.d[i] += a[g + i / 2 * 8][k] * b[2 * t + i % 2][k];
  }
}

template <bool kTurned>
void load_matrices(void* const* brought) {
  Matrices* of[32];
  for (int lane = 0; lane < 32; ++lane) of[lane] = static_cast<Matrices*>(brought[lane]);
  for (int i = 0; i < 4; ++i) {
    const u8* rows[8];
    for (int r = 0; r < 8; ++r) rows[r] = shared_at(of[8 * i + r]->address, 16, 16, of[8 * i + r]->line);
    auto at = [&](int row, int column) {
      u16 x;
      memcpy(&x, rows[row] + 2 * column, 2);
      return static_cast<u32>(x);
    };
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, t = lane % 4;
      of[lane]->got[i] = kTurned ? at(2 * t, g) | at(2 * t + 1, g) << 16 : at(g, 2 * t) | at(g, 2 * t + 1) << 16;
    }
  }
}

}  // namespace

void product_f16(void* const* brought, u32) { product16(brought, half); }
void product_bf16(void* const* brought, u32) { product16(brought, brain); }
void product_tf32(void* const* brought, u32) { product8(brought); }
void product_u8_s8(void* const* brought, u32) { product_whole<u8>(brought); }
void product_s8_s8(void* const* brought, u32) { product_whole<signed char>(brought); }
void matrices(void* const* brought, u32) { load_matrices<false>(brought); }
void matrices_turned(void* const* brought, u32) { load_matrices<true>(brought); }

// ---- copies

void copy_async(u32 to, const void* from, u32 n_bytes, u32 n_real, int line) {
  if (reinterpret_cast<u64>(from) % n_bytes != 0) fail(line, "cp.async of %u bytes from an address that is no multiple", n_bytes);
  if (n_real > n_bytes) fail(line, "cp.async of %u bytes brings %u", n_bytes, n_real);
  u8* const target = shared_at(to, n_bytes, n_bytes, line);
  memset(target, kPoison, n_bytes);
  self->line = line;
  self->open.push_back({target, static_cast<const u8*>(from), n_bytes, n_real});
}

void copies_commit() {
  self->groups.push_back(std::move(self->open));
  self->open.clear();
}

namespace {

void bring(const Copy& c) {
  if (c.n_real > 0) memcpy(c.to, c.from, c.n_real);
  memset(c.to + c.n_real, 0, c.n_bytes - c.n_real);
}

}  // namespace

void copies_wait(int n_left) {
  while (static_cast<int>(self->groups.size()) > n_left) {
    for (const Copy& c : self->groups.front()) bring(c);
    self->groups.pop_front();
  }
}

namespace {

Message& message_at(u32 barrier, int line) {
  auto found = self->block->messages.find(barrier);
  if (found == self->block->messages.end()) fail(line, "no barrier was made at shared address %u", barrier);
  return found->second;
}

constexpr u32 kClusterMask = (1u << kClusterBit) - 1;

// Block `number` of the cluster, which must have made the barrier that is to count what is sent.
Block& peer_with(u32 number, u32 barrier, int line) {
  Block* const block = self->block->cluster->blocks[number];
  if (block == nullptr) fail(line, "sends to a block that has ended");
  if (block->messages.count(barrier) == 0) fail(line, "sends to a block that has not made its barrier yet");
  return *block;
}

void settle(Message& m) {
  if (m.missing != 0 || m.bytes != 0) return;
  m.phase ^= 1;
  m.missing = m.arrivals;
  std::vector<std::pair<Fiber*, u32>> left;
  for (const auto& item : m.waiting) {
    if (item.second != m.phase) {
      wake(item.first);
    } else {
      left.push_back(item);
    }
  }
  m.waiting = left;
}

}  // namespace

void message_init(u32 barrier, u32 arrivals, int line) {
  memset(shared_at(barrier, 8, 8, line), 0, 8);
  Message m;
  m.arrivals = m.missing = static_cast<int>(arrivals);
  self->block->messages[barrier] = m;
}

void message_arrive(u32 barrier, u32 n_bytes, int line) {
  self->line = line;
  Message& m = message_at(barrier, line);
  m.bytes += n_bytes;
  if (--m.missing < 0) fail(line, "more than %d threads arrive at a barrier", m.arrivals);
  settle(m);
}

void message_arrive_in_cluster(u32 barrier, int line) {
  self->line = line;
  const u32 number = barrier >> kClusterBit;
  if (number == 0) fail(line, "arrives at an address that is not of the cluster");
  Message& m = peer_with(number - 1, barrier & kClusterMask, line).messages[barrier & kClusterMask];
  if (--m.missing < 0) fail(line, "more than %d threads arrive at a barrier", m.arrivals);
  settle(m);
}

void message_expect(u32 barrier, u32 n_bytes, int line) {
  self->line = line;
  message_at(barrier, line).bytes += n_bytes;
}

void message_wait(u32 barrier, u32 parity, int line) {
  while (message_at(barrier, line).phase == parity) {
    message_at(barrier, line).waiting.push_back({self, parity});
    wait("mbarrier.try_wait", line);
  }
}

namespace {

void copy_bulk_to(Block& block, u32 to, const void* from, u32 n_bytes, u32 barrier, int line) {
  if (n_bytes % 16 != 0 || reinterpret_cast<u64>(from) % 16 != 0) fail(line, "a bulk copy of %u bytes is not in units of 16", n_bytes);
  self->line = line;
  if (n_bytes == 0) return;
  u8* const target = place_in(block, to, n_bytes, 16, line);
  memset(target, kPoison, n_bytes);
  block.bulk.push_back({{target, static_cast<const u8*>(from), n_bytes, n_bytes}, barrier, line});
}

}  // namespace

void copy_bulk(u32 to, const void* from, u32 n_bytes, u32 barrier, int line) {
  message_at(barrier, line);
  copy_bulk_to(*self->block, to, from, n_bytes, barrier, line);
}

void copy_bulk_to_all(u32 to, const void* from, u32 n_bytes, u32 barrier, u32 blocks, int line) {
  if (blocks >> self->block->cluster->blocks.size()) fail(line, "the cluster has no blocks %x", blocks);
  for (u32 number = 0; blocks >> number; ++number)
    if (blocks >> number & 1) copy_bulk_to(peer_with(number, barrier, line), to, from, n_bytes, barrier, line);
}

void send(u32 to, const void* x, u32 n_bytes, u32 barrier, int line) {
  const u32 number = to >> kClusterBit;
  if (number == 0 || barrier >> kClusterBit != number) fail(line, "sends to addresses that are not of one block of the cluster");
  barrier &= kClusterMask;
  Block& block = peer_with(number - 1, barrier, line);
  self->line = line;
  u8* const target = place_in(block, to & kClusterMask, n_bytes, n_bytes, line);
  memset(target, kPoison, n_bytes);
  Bulk bulk{{target, nullptr, n_bytes, n_bytes}, barrier, line};
  memcpy(bulk.sent, x, n_bytes);
  block.bulk.push_back(bulk);
}

void complete(Block& block, const Bulk& bulk) {
  if (bulk.copy.from == nullptr) {
    memcpy(bulk.copy.to, bulk.sent, bulk.copy.n_bytes);
  } else {
    bring(bulk.copy);
  }
  Message& m = block.messages[bulk.barrier];
  m.bytes -= bulk.copy.n_bytes;
  settle(m);
}

// ---- warpgroups

namespace {

// [n][16] of B as a descriptor says: rows of 64 halves, eights of rows a stride apart, 16-byte parts turned by the row.
void right_operand(std::vector<float>& out, int n, u64 descriptor, int line) {
  const u32 start = static_cast<u32>(descriptor & 0x3fff) << 4, stride = static_cast<u32>(descriptor >> 32 & 0x3fff) << 4;
  if (descriptor >> 62 != 1) fail(line, "wgmma: only the 128-byte swizzle is known here");
  out.resize(static_cast<size_t>(n) * 16);
  for (int row = 0; row < n; ++row) {
    for (int k = 0; k < 16; k += 8) {
      const u32 at = start + row / 8 * stride + row % 8 * 128 + k * 2, turned = at ^ ((at >> 7 & 7) << 4);
      const u8* from = shared_at(turned, 16, 16, line);
      for (int i = 0; i < 8; ++i) {
        u16 x;
        memcpy(&x, from + 2 * i, 2);
        out[row * 16 + k + i] = half(x);
      }
    }
  }
}

void multiply(PendingProduct& p) {
  if (p.right.empty()) right_operand(p.right, p.n, p.b[0], p.line);
  float a[16][16];
  const u32* left[32];
  for (int lane = 0; lane < 32; ++lane) left[lane] = p.a[lane];
  left_operand(a, left, half);
  for (int row = 0; row < p.n; ++row) {
    const float* y = p.right.data() + row * 16;
    double sums[16] = {};
    for (int k = 0; k < 16; ++k)
      for (int r = 0; r < 16; ++r) sums[r] += static_cast<double>(a[r][k]) * y[k];
    for (int r = 0; r < 16; ++r) {
      const int lane = r % 8 * 4 + row % 8 / 2, i = row / 8 * 4 + r / 8 * 2 + row % 2;
      float& sum = *p.sums[static_cast<size_t>(lane) * (p.n / 2) + i];
      sum = static_cast<float>(sum + sums[r]);
    }
  }
}

}  // namespace

void warpgroup_product(void* const* brought, u32) {
  const Warpgroup& first = *static_cast<Warpgroup*>(brought[0]);
  if (!self->warp->fenced) fail(first.line, "wgmma: registers were written, and no wgmma.fence came after");
  PendingProduct p;
  p.n = first.n, p.line = first.line;
  for (int lane = 0; lane < 32; ++lane) {
    const Warpgroup& w = *static_cast<Warpgroup*>(brought[lane]);
    p.sums.insert(p.sums.end(), w.sums, w.sums + w.n / 2);
    memcpy(p.a[lane], w.a, sizeof w.a);
    p.b[lane] = w.b;
    if (w.b != first.b) fail(w.line, "wgmma: the lanes of a warp give different descriptors");
  }
  if (chance(2)) right_operand(p.right, p.n, p.b[0], p.line);
  self->warp->open.push_back(std::move(p));
}

void warpgroup_fence(void* const*, u32) { self->warp->fenced = true; }

void warpgroup_commit(void* const*, u32) {
  self->warp->fenced = false;
  self->warp->groups.push_back(std::move(self->warp->open));
  self->warp->open.clear();
}

void warpgroup_wait(int n_left, int line) {
  int left = n_left;
  meet(line, "wgmma.wait_group", 0xffffffffu, &left, [](void* const* brought, u32) {
    Warp& warp = *self->warp;
    while (static_cast<int>(warp.groups.size()) > *static_cast<int*>(brought[0])) {
      for (PendingProduct& p : warp.groups.front()) multiply(p);
      warp.groups.pop_front();
    }
  });
}

}  // namespace emulator
