// Experts: each row through those that it chose, from the bytes of the file, in four loops: gates and ups with their activation; inner rows as
// whole numbers; downs; sums. A row's bits depend on the row, its experts and their weights alone.
#include <algorithm>

#include "linear.h"
#include "moe.h"
#include "pool.h"
#include "prep.h"
#include "scratch.h"

using namespace pyspec;

namespace {

constexpr int64_t MOST = 4096;  // pairs of a row and an expert between the loops: moe/cpu.py counts their memory
constexpr int64_t N_OUT = 64;  // of a task at most

// Pairs first to first + n take this expert.
struct Group {
  int64_t expert, first, n;
};

int64_t chunks(int64_t n) { return (n + CHUNK - 1) / CHUNK; }

// Memory between the loops. Pairs lie in the order of experts, and those of an expert in the order of rows.
struct Room {
  float *outer, *inner, *scales, *sums;  // [pair, n_ff or n_in]: gates, then downs; [pair, n_ff]; of the inner rows' whole numbers
  int16_t *q;
  Group *groups;
  int32_t *row, *place, *next;  // [pair]; [row, n_used]: the pair, -1: none; [n_expert]
  int64_t n_group = 0, n_taken = 0;  // pairs that took an expert

  explicit Room(const MoeArgs &p) {
    const int64_t n_pair = p.n_row * p.n_used, n_chunk = chunks(p.n_ff), width = std::max(p.n_ff, p.n_in);
    const int64_t sizes[] = {width, p.n_ff, n_chunk, n_chunk * N_SUM, n_chunk * CHUNK / 2, 1, 1};
    float *at[7];
    int64_t n = 0;
    for (int64_t size : sizes) n += size * n_pair;
    const int64_t n_group_most = std::min(n_pair, p.n_expert), of_group = int64_t(sizeof(Group)) / 4;
    float *from = scratch(n_group_most * of_group + n + p.n_expert);
    groups = reinterpret_cast<Group *>(from);
    from += n_group_most * of_group;
    for (int i = 0; i < 7; i++) at[i] = from, from += sizes[i] * n_pair;
    outer = at[0], inner = at[1], scales = at[2], sums = at[3], q = reinterpret_cast<int16_t *>(at[4]);
    row = reinterpret_cast<int32_t *>(at[5]), place = reinterpret_cast<int32_t *>(at[6]), next = reinterpret_cast<int32_t *>(from);
    sort(p, n_pair);
  }

  static bool is_none(const MoeArgs &p, int64_t pair) { return p.ids[pair] == -1; }
  static int64_t expert_of(const MoeArgs &p, int64_t pair) { return std::clamp<int64_t>(p.ids[pair], 0, p.n_expert - 1); }

  void sort(const MoeArgs &p, int64_t n_pair) {
    std::fill_n(next, p.n_expert, 0);
    for (int64_t i = 0; i < n_pair; i++)
      if (!is_none(p, i)) next[expert_of(p, i)]++, n_taken++;
    int32_t first = 0;
    for (int64_t e = 0; e < p.n_expert; e++) {
      const int32_t n = next[e];
      if (n > 0) groups[n_group++] = {e, first, n};
      next[e] = first, first += n;
    }
    for (int64_t i = 0; i < n_pair; i++) {
      place[i] = is_none(p, i) ? -1 : next[expert_of(p, i)]++;
      if (place[i] >= 0) row[place[i]] = int32_t(i / p.n_used);
    }
  }
};

ProductArgs product_of(const Stack &s, int64_t expert, int64_t n_in, int64_t n_out, float *y) {
  ProductArgs made{};
  made.weights = s.weights + expert * s.stride, made.table = s.table, made.type = s.type;
  made.y = y, made.n_in = n_in, made.n_out = made.stride = n_out;
  made.scale = s.scale == nullptr ? 1.0 : double(s.scale[expert]);
  return made;
}

// body(group, part) for tasks that share the outputs of all groups
template <typename F>
void each_part(const Room &room, int64_t n_out, F &&body) {
  const int64_t n_panel = room.n_group * ((n_out + LANES - 1) / LANES);
  const int64_t size = std::clamp<int64_t>(n_panel / (8 * n_thread) / 2, 1, N_OUT / (2 * LANES)) * 2 * LANES;
  const int64_t n_part = (n_out + size - 1) / size;
  each(room.n_group * n_part, [&](int64_t i) {
    const Group &g = room.groups[i / n_part];
    const int64_t o = i % n_part * size;
    body(g, Part{g.first, g.n, o, std::min(o + size, n_out)});
  });
}

enum Act : int64_t { SWIGLU, RELU2, GEGLU, SWIGLU_OAI, SITU };

f8 gated(f8 g, f8 u, int64_t act) {
  if (act == GEGLU) return gelu(g) * u;
  if (act == SWIGLU_OAI) return g * sigmoid(g * all(1.702f)) * (u + all(1.0f));
  return silu(g) * u;
}

// n gates and ups -> inner values in place of the ups; no gates: relu(up)^2
void activate(const float *gates, float *ups, int64_t n, const MoeArgs &p) {
  if (gates == nullptr) return relu2(ups, ups, n);
  const f8 of_gate = all(float(p.gate_limit)), of_up = all(float(p.limit));
  by_eights(n, [&](int64_t i, auto get, auto put) {
    f8 g = get(gates + i), u = get(ups + i);
    if (p.act == SITU) return put(ups + i, capped(g, float(p.gate_limit)) * sigmoid(g) * (p.limit > 0 ? capped(u, float(p.limit)) : u));
    if (p.limit > 0) g = min(of_gate, g), u = max(-of_up, min(of_up, u));  // NaN stays NaN: the second is taken
    put(ups + i, gated(g, u, p.act));
  });
}

// Adds an expert's bias to its outputs `y` [pair, n_out] of a part.
void add_bias(const Stack &s, int64_t expert, int64_t n_out, const Part &part, float *y) {
  if (s.bias == nullptr) return;
  const float *bias = s.bias + expert * n_out + part.first_o;
  for (int64_t i = part.first; i < part.first + part.n; i++) {
    float *own = y + i * n_out + part.first_o;
    by_eights(part.last_o - part.first_o, [&](int64_t j, auto get, auto put) { put(own + j, get(own + j) + get(bias + j)); });
  }
}

void inner_rows(const MoeArgs &p, const Room &room) {
  const Rows rows{p.x, p.q, p.scales, p.sums, p.n_in, chunks(p.n_in), room.row};
  const bool gated = p.gate.weights != nullptr;
  each_part(room, p.n_ff, [&](const Group &g, const Part &part) {
    if (gated) product_part(product_of(p.gate, g.expert, p.n_in, p.n_ff, room.outer), rows, part);
    product_part(product_of(p.up, g.expert, p.n_in, p.n_ff, room.inner), rows, part);
    if (gated) add_bias(p.gate, g.expert, p.n_ff, part, room.outer);
    add_bias(p.up, g.expert, p.n_ff, part, room.inner);
    for (int64_t i = part.first; i < part.first + part.n; i++) {
      const int64_t at = i * p.n_ff + part.first_o;
      activate(gated ? room.outer + at : nullptr, room.inner + at, part.last_o - part.first_o, p);
    }
  });
}

void quantise_inner(const MoeArgs &p, const Room &room) {
  const int64_t n_chunk = chunks(p.n_ff);
  each_range(room.n_taken * n_chunk, 16, [&](int64_t a, int64_t b) {
    for (int64_t i = a; i < b; i++) {
      const int64_t c = i % n_chunk, left = p.n_ff - c * CHUNK;
      quantise(room.inner + i / n_chunk * p.n_ff + c * CHUNK, int(std::min<int64_t>(left, CHUNK)), room.q + i * CHUNK, room.scales + i,
               room.sums + i * N_SUM);
    }
  });
}

// residual + (sum over experts + shared * factor), in the order of the row's choice
void sum_row(const MoeArgs &p, const Room &room, int64_t r) {
  const int32_t *place = room.place + r * p.n_used;
  const float *weights = p.weights + r * p.n_used;
  int64_t first = 0;
  while (first < p.n_used && place[first] < 0) first++;
  by_eights(p.n_in, [&](int64_t i, auto get, auto put) {
    f8 y = first < p.n_used ? get(room.outer + place[first] * p.n_in + i) * all(weights[first]) : all(0.0f);
    for (int64_t k = first + 1; k < p.n_used; k++)
      if (place[k] >= 0) y = fma(get(room.outer + place[k] * p.n_in + i), all(weights[k]), y);
    if (p.shared != nullptr) y = fma(get(p.shared + r * p.shared_stride + i), all(p.of_shared[r]), y);
    if (p.residual != nullptr) y = get(p.residual + r * p.residual_stride + i) + y;
    put(p.out + r * p.n_in + i, y);
  });
}

void run(const MoeArgs &p) {
  const Room room(p);
  inner_rows(p, room);
  if (!is_plain(p.down.type)) quantise_inner(p, room);
  const Rows rows{room.inner, room.q, room.scales, room.sums, p.n_ff, chunks(p.n_ff)};
  each_part(room, p.n_in, [&](const Group &g, const Part &part) {
    product_part(product_of(p.down, g.expert, p.n_ff, p.n_in, room.outer), rows, part);
    add_bias(p.down, g.expert, p.n_in, part, room.outer);
  });
  each_range(p.n_row, 1 + 4096 / (p.n_in * p.n_used), [&](int64_t a, int64_t b) {
    for (int64_t r = a; r < b; r++) sum_row(p, room, r);
  });
}

}  // namespace

extern "C" void pyspec_moe(const MoeArgs *args) {
  const int64_t step = std::max<int64_t>(1, MOST / args->n_used);
  for (int64_t first = 0; first < args->n_row; first += step) {
    MoeArgs p = *args;
    const int64_t n_chunk = chunks(p.n_in);
    p.n_row = std::min(step, p.n_row - first);
    p.x += first * p.n_in, p.ids += first * p.n_used, p.weights += first * p.n_used, p.out += first * p.n_in;
    if (p.q != nullptr) p.q += first * n_chunk * CHUNK, p.scales += first * n_chunk, p.sums += first * n_chunk * N_SUM;
    if (p.shared != nullptr) p.shared += first * p.shared_stride, p.of_shared += first;
    if (p.residual != nullptr) p.residual += first * p.residual_stride;
    run(p);
  }
}
