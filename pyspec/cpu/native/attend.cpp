// Attention over paged keys and values: cuda/ops/attend/ref.py defines it, cuda/ops/attend/cpu.py calls it.
//
// Keys are taken in segments at absolute positions. A segment of a query gives a largest score, a sum of weights and a weighted sum of values, and a
// query adds its segments in order. So a row's bits depend on its own keys alone, whoever computes a segment and beside whichever rows.
// A block is a few rows of one sequence; all heads of its rows that share a KV head are the queries of one pass over the keys.
#include <vector>

#include "attend_tiles.h"
#include "pool.h"

using namespace pyspec;

namespace {

constexpr int64_t SEGMENT = 256;  // keys
constexpr int64_t STEP = 32;      // keys that are unpacked at once
constexpr int64_t MOST = 32;      // queries of a pass
constexpr int64_t FEW = 8;        // queries that read keys and values in the pool's type
constexpr float NONE = -__builtin_inff();

struct Args {
  const float *q;
  const char *k, *v;
  const uint16_t *k_scale, *v_scale;
  const int64_t *page_table, *positions, *lo, *hi;
  const int32_t *row_seq;
  const float *sinks;
  float *out;
  int64_t n_row, n_seq, n_col, page_size, n_page, n_head, n_kv, dim, window, k_kind, v_kind, n_out;  // n_out: dims of a sum that are written
  double scale, cap;  // cap: as in the reference
};

struct Range {
  int64_t lo, hi;
};

struct Block {
  int64_t row, n_row, seq;
  Range keys;
};

// One pass: the heads first..first+n-1 of a KV head's group, for the rows of a block.
struct Pass {
  const Args &a;
  Block block;
  int64_t kv, first, n_head;
  int64_t n_query() const { return block.n_row * n_head; }
};

// The sums over some keys of up to MOST queries: largest score, sum of weights, weighted values [query, width].
struct Sums {
  float *most, *sum, *acc;
  Sums(float *memory) : most(memory), sum(memory + MOST), acc(memory + 2 * MOST) {}
};

int64_t width_of(const Args &a) { return (a.dim + 7) / 8 * 8; }
int64_t floats_of(const Args &a) { return 2 * MOST + MOST * width_of(a); }

Range range_of(const Args &a, int64_t row) {
  int64_t lo = a.lo[row], hi = a.hi[row];
  const int64_t at = a.positions[row];
  if (a.window > 0 && lo < at - (a.window - 1)) lo = at - (a.window - 1);
  if (a.window < 0 && lo < at - at % -a.window) lo = at - at % -a.window;  // of chunks of as many positions
  lo = lo < 0 ? 0 : lo;
  const int64_t end = a.n_col * a.page_size;
  return {lo, hi < end ? hi : end};
}

// Each thread's own memory, in the sizes of the largest heads so far.
struct Scratch {
  float *q, *scores, *rows, *zeros, *nans, *segment, *total;
  Scratch(const Args &a) {
    static thread_local std::vector<float> kept;
    const int64_t width = width_of(a), sizes[] = {MOST * width, MOST * SEGMENT, STEP * width, width, width, floats_of(a), floats_of(a)};
    float **const parts[] = {&q, &scores, &rows, &zeros, &nans, &segment, &total};
    int64_t n = 0;
    for (int64_t size : sizes) n += size;
    if (int64_t(kept.size()) < n) kept.resize(size_t(n));
    float *at = kept.data();
    for (int i = 0; i < 7; i++) *parts[i] = at, at += sizes[i];
    std::memset(zeros, 0, size_t(width) * 4);
    std::memset(nans, 0xff, size_t(width) * 4);  // NaN in every type
  }
};

// The queries of a pass, scaled and padded: q [query, width], rows first.
void take_queries(const Pass &p, float *q) {
  const Args &a = p.a;
  const int64_t width = width_of(a), group = a.n_head / a.n_kv;
  for (int64_t i = 0; i < p.n_query(); i++, q += width) {
    const int64_t row = p.block.row + i / p.n_head, head = p.kv * group + p.first + i % p.n_head;
    const float *from = a.q + (row * a.n_head + head) * a.dim;
    for (int64_t d = 0; d < width; d++) q[d] = d < a.dim ? from[d] * float(a.scale) : 0.0f;
  }
}

// at(j, index) for the keys begin + j that are in `keys`; index: of the key's head in the pool, -1 if its page does not exist.
template <typename F>
void each_key(const Pass &p, int64_t begin, Range keys, F &&at) {
  const Args &a = p.a;
  const int64_t *pages = a.page_table + p.block.seq * a.n_col, first = keys.lo > begin ? keys.lo : begin;
  int64_t col = first / a.page_size, offset = first % a.page_size;
  for (int64_t key = first; key < keys.hi && key < begin + STEP; key++) {
    const int64_t page = pages[col];
    at(key - begin, page < 0 || page >= a.n_page ? -1 : (page * a.page_size + offset) * a.n_kv + p.kv);
    if (++offset == a.page_size) offset = 0, col++;
  }
}

// Rows of the keys (or values) begin..begin+STEP-1: zeros outside of `keys`, NaN where there is no page.
// T is the pool's own type, and rows are in their pages,
template <typename T>
void take_rows(const Pass &p, int64_t, const char *plane, const uint16_t *, int64_t begin, Range keys, Scratch &s, const T **rows) {
  for (int64_t j = 0; j < STEP; j++) rows[j] = reinterpret_cast<const T *>(s.zeros);
  each_key(p, begin, keys, [&](int64_t j, int64_t at) {
    rows[j] = at < 0 ? reinterpret_cast<const T *>(s.nans) : reinterpret_cast<const T *>(plane) + at * p.a.dim;
  });
}

// or rows are unpacked to f32.
template <>
void take_rows(const Pass &p, int64_t kind, const char *plane, const uint16_t *scale, int64_t begin, Range keys, Scratch &s,
               const float **rows) {
  const Args &a = p.a;
  const int64_t size = head_bytes(kind, a.dim), n_factor = head_factors(kind, a.dim);
  const bool here = kind == KV_F32 && a.dim == width_of(a);
  for (int64_t j = 0; j < STEP; j++) rows[j] = s.zeros;
  each_key(p, begin, keys, [&](int64_t j, int64_t at) {
    float *own = s.rows + j * width_of(a);
    rows[j] = at < 0 ? s.nans : here ? reinterpret_cast<const float *>(plane + at * size) : own;
    if (at >= 0 && !here) unpack_row(kind, plane + at * size, scale ? scale + at * n_factor : nullptr, own, a.dim);
  });
}

Range both(Range a, Range b) { return {a.lo > b.lo ? a.lo : b.lo, a.hi < b.hi ? a.hi : b.hi}; }
bool empty(Range r) { return r.lo >= r.hi; }

template <int NQ, typename T>
void score_step(const float *q, const T *const *keys, int64_t width, int64_t n_key, float *scores) {
  for (int64_t j = 0; j < n_key; j += 8 / NQ) score<NQ>(q, keys + j, width, scores + j, SEGMENT);
}

// Scores of all queries with the keys of a step; where it needs none, they stay as they are.
template <typename T>
void score_all(const Pass &p, const Range *ranges, const Scratch &s, const T *const *keys, int64_t begin, int64_t at) {
  const int64_t width = width_of(p.a), n = p.n_query();
  for (int64_t i = 0; i < n;) {
    const int64_t many = n - i >= 4 ? 4 : n - i >= 2 ? 2 : 1;
    int64_t last = 0;
    for (int64_t r = i / p.n_head; r <= (i + many - 1) / p.n_head; r++) last = last > ranges[r].hi ? last : ranges[r].hi;
    const int64_t n_key = last - begin < STEP ? last - begin : STEP;
    const float *q = s.q + i * width;
    float *scores = s.scores + i * SEGMENT + at;
    if (many == 4) score_step<4>(q, keys, width, n_key, scores);
    else if (many == 2) score_step<2>(q, keys, width, n_key, scores);
    else score_step<1>(q, keys, width, n_key, scores);
    i += many;
  }
}

// Scores of one query to weights, in place, for keys first..last-1 of the segment. cap: 0 for none.
void soften(float *scores, int64_t first, int64_t last, float cap, float &most, float &total) {
  const int64_t begin = first / 8 * 8;
  const i8 lane = {0, 1, 2, 3, 4, 5, 6, 7};
  f8 high = all(NONE), s = {};
  for (int64_t j = begin; j < last; j += 8) {
    const i8 at = lane + int32_t(j);
    const f8 score = cap > 0.0f ? capped(load(scores + j), cap) : load(scores + j);
    const f8 x = (at >= int32_t(first)) & (at < int32_t(last)) ? score : all(NONE);
    store(scores + j, x);
    high = max(high, x);
  }
  most = largest(high);
  for (int64_t j = begin; j < last; j += 8) {
    const f8 w = exp(load(scores + j) - all(most));
    store(scores + j, w);
    s += w;
  }
  total = sum(s);
}

template <int NQ, typename T>
void weigh_rows(const float *weights, const T *const *values, Range keys, const Range *own, float *acc, int64_t width) {
  Range shared = own[0];
  for (int i = 1; i < NQ; i++) shared = both(shared, own[i]);
  shared = both(shared, keys);
  if (empty(shared)) shared = {keys.hi, keys.hi};
  for (int i = 0; i < NQ; i++) {  // a value that one row must not see may be NaN
    const Range before = both(own[i], {keys.lo, shared.lo});
    if (!empty(before)) weigh_all<1>(weights + i * SEGMENT, SEGMENT, values, before.lo, before.hi, acc + i * width, width);
  }
  if (!empty(shared)) weigh_all<NQ>(weights, SEGMENT, values, shared.lo, shared.hi, acc, width);
  for (int i = 0; i < NQ; i++) {
    const Range behind = both(own[i], {shared.hi, keys.hi});
    if (!empty(behind)) weigh_all<1>(weights + i * SEGMENT, SEGMENT, values, behind.lo, behind.hi, acc + i * width, width);
  }
}

// Add the values of a step, `at` keys behind the segment's first, to all queries that see them.
template <typename T>
void weigh_step(const Pass &p, const Range *ranges, const Scratch &s, const T *const *values, int64_t begin, int64_t at,
                float *acc) {
  const int64_t width = width_of(p.a), n = p.n_query();
  const Range keys = {0, STEP};
  for (int64_t i = 0; i < n;) {
    const int64_t many = n - i >= 4 ? 4 : n - i >= 2 ? 2 : 1;
    Range own[4];
    for (int64_t j = 0; j < many; j++) {
      const Range r = ranges[(i + j) / p.n_head];
      own[j] = {r.lo - begin, r.hi - begin};
    }
    const float *weights = s.scores + i * SEGMENT + at;
    float *to = acc + i * width;
    if (many == 4) weigh_rows<4>(weights, values, keys, own, to, width);
    else if (many == 2) weigh_rows<2>(weights, values, keys, own, to, width);
    else weigh_rows<1>(weights, values, keys, own, to, width);
    i += many;
  }
}

// The sums of one segment, reading rows as T. Queries without a key there keep a sum of 0.
template <typename T>
void run_segment_of(const Pass &p, int64_t segment, Scratch &s, Sums to) {
  const Args &a = p.a;
  const int64_t width = width_of(a), begin = segment * SEGMENT;
  Range ranges[MOST], any = {begin + SEGMENT, begin};
  for (int64_t r = 0; r < p.block.n_row; r++) {
    ranges[r] = both(range_of(a, p.block.row + r), {begin, begin + SEGMENT});
    if (empty(ranges[r])) ranges[r] = {begin, begin};
    else any = {any.lo < ranges[r].lo ? any.lo : ranges[r].lo, any.hi > ranges[r].hi ? any.hi : ranges[r].hi};
  }
  const T *rows[STEP];
  const int64_t from = any.lo / STEP * STEP;
  for (int64_t key = from; key < any.hi; key += STEP) {
    take_rows<T>(p, a.k_kind, a.k, a.k_scale, key, any, s, rows);
    score_all(p, ranges, s, rows, key, key - begin);
  }
  for (int64_t i = 0; i < p.n_query(); i++) {
    const Range r = ranges[i / p.n_head];
    to.most[i] = NONE, to.sum[i] = 0.0f;
    if (!empty(r)) soften(s.scores + i * SEGMENT, r.lo - begin, r.hi - begin, float(a.cap), to.most[i], to.sum[i]);
  }
  for (int64_t i = 0; i < p.n_query() * width; i++) to.acc[i] = 0.0f;
  for (int64_t key = from; key < any.hi; key += STEP) {
    take_rows<T>(p, a.v_kind, a.v, a.v_scale, key, any, s, rows);
    weigh_step(p, ranges, s, rows, key, key - begin, to.acc);
  }
}

// Many queries share rows that are unpacked once.
void run_segment(const Pass &p, int64_t segment, Scratch &s, Sums to) {
  const bool few = p.n_query() <= FEW && p.a.dim == width_of(p.a) && p.a.k_kind == p.a.v_kind;
  if (few && p.a.k_kind == KV_F16) return run_segment_of<Half>(p, segment, s, to);
  if (few && p.a.k_kind == KV_BF16) return run_segment_of<Bf16>(p, segment, s, to);
  run_segment_of<float>(p, segment, s, to);
}

float exp1(float x) { return exp(all(x))[0]; }

void add_segment(const Pass &p, Sums total, Sums more) {
  const int64_t width = width_of(p.a);
  for (int64_t i = 0; i < p.n_query(); i++) {
    if (more.sum[i] == 0.0f) continue;
    const float most = more.most[i] > total.most[i] ? more.most[i] : total.most[i];
    const float old = exp1(total.most[i] - most), own = exp1(more.most[i] - most);
    total.most[i] = most;
    total.sum[i] = total.sum[i] * old + more.sum[i] * own;
    float *acc = total.acc + i * width;
    for (int64_t d = 0; d < width; d += 8) store(acc + d, fma(load(more.acc + i * width + d), all(own), load(acc + d) * all(old)));
  }
}

void begin_total(const Pass &p, Sums total) {
  for (int64_t i = 0; i < p.n_query(); i++) total.most[i] = NONE, total.sum[i] = 0.0f;
  for (int64_t i = 0; i < p.n_query() * width_of(p.a); i++) total.acc[i] = 0.0f;
}

// Divide and write; rows that see no key are zeros.
void finish(const Pass &p, Sums total) {
  const Args &a = p.a;
  const int64_t width = width_of(a), group = a.n_head / a.n_kv;
  for (int64_t i = 0; i < p.n_query(); i++) {
    const int64_t row = p.block.row + i / p.n_head, head = p.kv * group + p.first + i % p.n_head;
    float weight = 1.0f, sum = total.sum[i];
    if (a.sinks && sum != 0.0f) {
      const float most = a.sinks[head] > total.most[i] ? a.sinks[head] : total.most[i];
      weight = exp1(total.most[i] - most);
      sum = sum * weight + exp1(a.sinks[head] - most);
    }
    weight = sum == 0.0f ? 0.0f : weight / sum;
    float *to = a.out + (row * a.n_head + head) * a.n_out;
    for (int64_t d = 0; d < a.n_out; d++) to[d] = total.acc[i * width + d] * weight;
  }
}

// Blocks of rows of one sequence, the last first, since it has the most keys. Rows of no sequence are zeros.
std::vector<Block> blocks_of(const Args &a) {
  const int64_t group = a.n_head / a.n_kv, most = group < MOST ? MOST / group : 1;
  std::vector<Block> found;
  for (int64_t row = a.n_row - 1; row >= 0; row--) {
    const int64_t seq = a.row_seq[row];
    if (seq < 0 || seq >= a.n_seq) {
      for (int64_t i = 0; i < a.n_head * a.n_out; i++) a.out[row * a.n_head * a.n_out + i] = seq < 0 ? 0.0f : __builtin_nanf("");
      continue;
    }
    Range keys = range_of(a, row);
    if (empty(keys)) keys = {INT64_MAX, 0};
    Block *last = found.empty() ? nullptr : &found.back();
    if (last && last->seq == seq && last->row == row + 1 && last->n_row < most) {
      last->row--, last->n_row++;
      last->keys = {last->keys.lo < keys.lo ? last->keys.lo : keys.lo, last->keys.hi > keys.hi ? last->keys.hi : keys.hi};
    } else {
      found.push_back({row, 1, seq, keys});
    }
  }
  return found;
}

struct Segments {
  int64_t first, n;
};

Segments segments_of(const Block &b) {
  if (empty(b.keys)) return {0, 0};
  const int64_t first = b.keys.lo / SEGMENT;
  return {first, (b.keys.hi + SEGMENT - 1) / SEGMENT - first};
}

std::vector<Pass> passes_of(const Args &a) {
  std::vector<Pass> found;
  const int64_t group = a.n_head / a.n_kv;
  for (const Block &b : blocks_of(a)) {
    for (int64_t kv = 0; kv < a.n_kv; kv++) {
      for (int64_t first = 0; first < group; first += MOST) {
        found.push_back({a, b, kv, first, group - first < MOST ? group - first : MOST});
      }
    }
  }
  return found;
}

void run_whole(const Pass &p) {
  Scratch s(p.a);
  take_queries(p, s.q);
  begin_total(p, s.total);
  const Segments segments = segments_of(p.block);
  for (int64_t i = 0; i < segments.n; i++) {
    run_segment(p, segments.first + i, s, s.segment);
    add_segment(p, s.total, s.segment);
  }
  finish(p, s.total);
}

// Few passes: each segment on any thread, then the sums in order.
void run_split(const Args &a, const std::vector<Pass> &passes) {
  static thread_local std::vector<float> kept;
  struct Item {
    int64_t pass, segment;
  };
  std::vector<Item> items;
  std::vector<int64_t> starts;
  for (size_t i = 0; i < passes.size(); i++) {
    starts.push_back(int64_t(items.size()));
    const Segments segments = segments_of(passes[i].block);
    for (int64_t j = 0; j < segments.n; j++) items.push_back({int64_t(i), segments.first + j});
  }
  starts.push_back(int64_t(items.size()));
  const int64_t size = floats_of(a);
  if (kept.size() < items.size() * size_t(size)) kept.resize(items.size() * size_t(size));
  float *const memory = kept.data();
  each(int64_t(items.size()), [&](int64_t i) {
    Scratch s(a);
    const Pass &p = passes[size_t(items[size_t(i)].pass)];
    take_queries(p, s.q);
    run_segment(p, items[size_t(i)].segment, s, memory + i * size);
  });
  each(int64_t(passes.size()), [&](int64_t i) {
    Scratch s(a);
    const Pass &p = passes[size_t(i)];
    begin_total(p, s.total);
    for (int64_t j = starts[size_t(i)]; j < starts[size_t(i) + 1]; j++) add_segment(p, s.total, memory + j * size);
    finish(p, s.total);
  });
}

}  // namespace

extern "C" void pyspec_attend(const Args *a) {
  const std::vector<Pass> passes = passes_of(*a);
  if (n_thread > 1 && int64_t(passes.size()) < 4 * n_thread) return run_split(*a, passes);
  each(int64_t(passes.size()), [&](int64_t i) { run_whole(passes[size_t(i)]); });
}
