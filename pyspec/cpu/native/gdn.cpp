// Gated DeltaNet with deferred commit (cuda/ops/gdn/ref.py): two loops for each piece of the batch.
//
// prepare   a key head, or a value head, of a sequence: convolution, l2 norm, gates; windows and records. A head's tokens, records first,
//           end in one run of memory.
// advance   PART rows of the state of a value head: S <- e S + d k^T, d = b (v - e S k). They lie in L1 while all tokens run.
//
// With a decay for each dimension of keys (BY_KEY) e scales columns: S is multiplied with e k and e q, which a part makes itself.
//
// Both products of the state with a token's key and query are summed while the token before it is added, so each token reads and writes
// the state once: o = e (S q) + d (k q), with the S before the token. Tokens always come one by one, in one order of sums: no bit depends
// on the cut of a text into forwards, verifies and folds, and none on neighbours.
#include <cmath>

#include "recurrent.h"

using namespace pyspec;

namespace {

constexpr int64_t R = 4, PART = 32;  // rows of a step: what 16 registers of eight lanes hold; rows of a job

struct Args {
  ConvArgs conv;
  BatchArgs batch;
  const float *alpha, *beta, *a, *dt_bias;  // [row, ...], [value head]; alpha and dt_bias [.., value head, dim] where by_key
  int64_t alpha_stride, beta_stride;
  float *state, *k, *v, *g, *b;  // of all slots
  float *out;                    // [row, value head, dim]
  int64_t n_key, n_value, dim, grouped;  // grouped: value heads of a key head stand side by side
  int64_t by_key;
  double floor, eps;
  int64_t n_decay() const { return by_key ? dim : 1; }
};

// Tokens of a piece: q k [key head, token, dim], v [value head, token, dim]; e [value head, token, decays of a head]; b [value head, token];
// kq [key head, token].
struct Tokens {
  float *q, *k, *v, *e, *b, *kq;
  Tokens(const Args &p, int64_t n) {
    const int64_t kd = p.n_key * n * p.dim, vd = p.n_value * n * p.dim, nv = p.n_value * n;
    q = scratch(2 * kd + vd + nv * p.n_decay() + nv + p.n_key * n);
    k = q + kd, v = k + kd, e = v + vd, b = e + nv * p.n_decay(), kq = b + nv;
  }
};

float dot(const float *x, const float *y, int64_t n) {
  f8 s = all(0.0f);
  for (int64_t j = 0; j < n; j += 8) s = fma(load(x + j), load(y + j), s);
  return sum(s);
}

float normed(float *x, int64_t n, float eps) {
  const float by = 1.0f / std::sqrt(dot(x, x, n) + eps);
  for (int64_t j = 0; j < n; j += 8) store(x + j, load(x + j) * all(by));
  return by;
}

void prepare_key(const Args &p, const Tokens &to, const Seq &q, int64_t n_token, int64_t head) {
  const int64_t dim = p.dim, at = head * n_token, rows = at + q.at + q.fold;
  convolve(p.conv, p.batch.width, q, head * dim, dim, to.q + rows * dim);
  convolve(p.conv, p.batch.width, q, (p.n_key + head) * dim, dim, to.k + rows * dim);
  for (int64_t t = rows; t < rows + q.n; t++) {
    normed(to.q + t * dim, dim, float(p.eps));
    normed(to.k + t * dim, dim, float(p.eps));
    to.kq[t] = dot(to.k + t * dim, to.q + t * dim, dim);
  }
  join_records(p.k, p.batch.width, p.n_key, q, head, dim, to.k + at * dim);
}

// Log decays of a head's row.
void decays(const Args &p, const float *alpha, int64_t head, float *out) {
  if (!p.by_key) {
    *out = p.a[head] * softplus(alpha[head] + p.dt_bias[head]);
    return;
  }
  for (int64_t j = 0; j < p.dim; j += 8) {
    const f8 z = load(alpha + head * p.dim + j) + load(p.dt_bias + head * p.dim + j), a = all(p.a[head]);
    store(out + j, p.floor != 0 ? all(float(p.floor)) * sigmoid(a * z) : a * softplus(z));
  }
}

void prepare_value(const Args &p, const Tokens &to, const Seq &q, int64_t n_token, int64_t head) {
  const int64_t dim = p.dim, at = head * n_token, rows = at + q.at + q.fold, width = p.batch.width, n = p.n_decay();
  convolve(p.conv, width, q, (2 * p.n_key + head) * dim, dim, to.v + rows * dim);
  join_records(p.v, width, p.n_value, q, head, dim, to.v + at * dim);
  for (int64_t t = 0; t < q.n; t++) {
    const int64_t row = q.start + q.row + t;
    decays(p, p.alpha + row * p.alpha_stride, head, to.e + (rows + t) * n);
    to.b[rows + t] = 1.0f / (1.0f + std::exp(-p.beta[row * p.beta_stride + head]));
  }
  join_records(p.g, width, p.n_value, q, head, n, to.e + at * n);
  join_records(p.b, width, p.n_value, q, head, 1, to.b + at);
  float *e = to.e + (at + q.at) * n, *const end = to.e + (rows + q.n) * n;
  for (; p.by_key && e < end; e += 8) store(e, exp(load(e)));
  for (; e < end; e++) *e = std::exp(*e);
}


// Sums of a part's rows with the next token's key and query, and what the token adds to each row.
struct Sums {
  float k[PART], q[PART], d[PART];
  void put(int64_t row, f8 found) {
    const float *x = reinterpret_cast<const float *>(&found);
    std::memcpy(k + row, x, 4 * R), std::memcpy(q + row, x + R, 4 * R);
  }
};

#if defined(__AVX512DQ__)
// Two rows of a state side by side: a vector has eight values of each, and each half the sums of one row, in the order of the other builds.
constexpr int64_t PAIRS = R;

__m512 pair_of(f8 a, f8 b) { return _mm512_insertf32x8(_mm512_castps256_ps512(__m256(a)), __m256(b), 1); }
__m512 twice(const float *x) { return _mm512_broadcast_f32x8(_mm256_loadu_ps(x)); }

// Values j to j + 7 of two rows: OWN if they lie side by side in memory, too
template <bool OWN>
__m512 load_pair(const float *rows, int64_t dim, int64_t j) {
  return OWN ? _mm512_load_ps(rows + 2 * j) : pair_of(load(rows + j), load(rows + dim + j));
}
template <bool OWN>
void store_pair(float *rows, int64_t dim, int64_t j, __m512 x) {
  if (OWN) return _mm512_store_ps(rows + 2 * j, x);
  _mm256_storeu_ps(rows + j, _mm512_castps512_ps256(x)), _mm256_storeu_ps(rows + dim + j, _mm512_extractf32x8_ps(x, 1));
}

// What 2 PAIRS rows' sums are with a key and with a query
struct PairSums {
  __m512 k[PAIRS], q[PAIRS];

  PairSums() {
    for (int64_t i = 0; i < PAIRS; i++) k[i] = q[i] = _mm512_setzero_ps();
  }
  void add(int64_t i, __m512 x, __m512 key, __m512 query) { k[i] = _mm512_fmadd_ps(x, key, k[i]), q[i] = _mm512_fmadd_ps(x, query, q[i]); }
  void put(int64_t row, Sums &to) const {
    for (int64_t half = 0; half < 2; half++) {
      f8 s[2 * R];
      for (int64_t r = 0; r < R; r++) {
        const int64_t i = 2 * half + r / 2;
        s[r] = f8(r % 2 ? _mm512_extractf32x8_ps(k[i], 1) : _mm512_castps512_ps256(k[i]));
        s[R + r] = f8(r % 2 ? _mm512_extractf32x8_ps(q[i], 1) : _mm512_castps512_ps256(q[i]));
      }
      to.put(row + R * half, sums(s));
    }
  }
};

// Sums of a part's rows with a key and a query.
void products(const float *rows, int64_t n_row, int64_t dim, const float *k, const float *q, Sums &to) {
  for (int64_t i = 0; i < n_row; i += 2 * PAIRS) {
    PairSums s;
    for (int64_t j = 0; j < dim; j += 8) {
      const __m512 kj = twice(k + j), qj = twice(q + j);
      for (int64_t p = 0; p < PAIRS; p++) s.add(p, load_pair<false>(rows + (i + 2 * p) * dim, dim, j), kj, qj);
    }
    s.put(i, to);
  }
}

// Decays of columns j to j + 7, of two rows
template <bool BY_KEY>
struct Decays {
  const float *e;
  __m512 one = _mm512_set1_ps(*e);
  __m512 operator()(int64_t j) const { return BY_KEY ? twice(e + j) : one; }
};

// to = e from + d k^T, and its `products` with the next token's key and query.
template <bool BY_KEY, bool FROM_OWN, bool TO_OWN>
void add_token(const float *from, float *to, int64_t n_row, int64_t dim, const float *e, const float *k, const float *next_k, const float *next_q, Sums &of) {
  const Decays<BY_KEY> by{e};
  for (int64_t i = 0; i < n_row; i += 2 * PAIRS) {
    PairSums s;
    __m512 add[PAIRS];
    for (int64_t p = 0; p < PAIRS; p++) add[p] = pair_of(all(of.d[i + 2 * p]), all(of.d[i + 2 * p + 1]));
    for (int64_t j = 0; j < dim; j += 8) {
      const __m512 kj = twice(k + j), nk = twice(next_k + j), nq = twice(next_q + j), ej = by(j);
      for (int64_t p = 0; p < PAIRS; p++) {
        const int64_t at = (i + 2 * p) * dim;
        const __m512 x = _mm512_fmadd_ps(add[p], kj, _mm512_mul_ps(ej, load_pair<FROM_OWN>(from + at, dim, j)));
        store_pair<TO_OWN>(to + at, dim, j, x);
        s.add(p, x, nk, nq);
      }
    }
    s.put(i, of);
  }
}

template <bool BY_KEY, bool FROM_OWN>
void add_last(const float *from, float *to, int64_t n_row, int64_t dim, const float *e, const float *d, const float *k) {
  const Decays<BY_KEY> by{e};
  for (int64_t i = 0; i < n_row; i += 2)
    for (int64_t j = 0; j < dim; j += 8) {
      const __m512 old = _mm512_mul_ps(by(j), load_pair<FROM_OWN>(from + i * dim, dim, j));
      store_pair<false>(to + i * dim, dim, j, _mm512_fmadd_ps(pair_of(all(d[i]), all(d[i + 1])), twice(k + j), old));
    }
}
#else
// Decays of columns j to j + 7
template <bool BY_KEY>
struct Decays {
  const float *e;
  f8 one = all(*e);
  f8 operator()(int64_t j) const { return BY_KEY ? load(e + j) : one; }
};

// Sums of R rows with a key (lanes 0 to 3) and a query (4 to 7).
f8 products_of(const float *rows, int64_t dim, const float *k, const float *q) {
  f8 s[2 * R] = {};
  for (int64_t j = 0; j < dim; j += 8) {
    const f8 kj = load(k + j), qj = load(q + j);
    for (int64_t r = 0; r < R; r++) {
      const f8 x = load(rows + r * dim + j);
      s[r] = fma(x, kj, s[r]), s[R + r] = fma(x, qj, s[R + r]);
    }
  }
  return sums(s);
}

// Sums of a part's rows with a key and a query.
void products(const float *rows, int64_t n_row, int64_t dim, const float *k, const float *q, Sums &to) {
  for (int64_t i = 0; i < n_row; i += R) to.put(i, products_of(rows + i * dim, dim, k, q));
}

// to = e from + d k^T, and its `products` with the next token's key and query. Both lie as the state does.
template <bool BY_KEY, bool FROM_OWN, bool TO_OWN>
void add_token(const float *from, float *to, int64_t n_row, int64_t dim, const float *e, const float *k, const float *next_k, const float *next_q, Sums &of) {
  const Decays<BY_KEY> by{e};
  for (int64_t i = 0; i < n_row; i += R) {
    f8 s[2 * R] = {};
    const float *d = of.d + i;
    const f8 add[R] = {all(d[0]), all(d[1]), all(d[2]), all(d[3])};
    for (int64_t j = 0; j < dim; j += 8) {
      const f8 kj = load(k + j), nk = load(next_k + j), nq = load(next_q + j), ej = by(j);
      for (int64_t r = 0; r < R; r++) {
        const f8 x = fma(add[r], kj, ej * load(from + (i + r) * dim + j));
        store(to + (i + r) * dim + j, x);
        s[r] = fma(x, nk, s[r]), s[R + r] = fma(x, nq, s[R + r]);
      }
    }
    of.put(i, sums(s));
  }
}

template <bool BY_KEY, bool FROM_OWN>
void add_last(const float *from, float *to, int64_t n_row, int64_t dim, const float *e, const float *d, const float *k) {
  const Decays<BY_KEY> by{e};
  for (int64_t r = 0; r < n_row; r++)
    for (int64_t j = 0; j < dim; j += 8) store(to + r * dim + j, fma(all(d[r]), load(k + j), by(j) * load(from + r * dim + j)));
}
#endif

// What the state before a token is multiplied with: its key or query times its decays, which is in `room` then. One decay scales sums instead.
template <bool BY_KEY>
const float *decayed(const float *x, const float *e, int64_t dim, float *room) {
  if (!BY_KEY) return x;
  for (int64_t j = 0; j < dim; j += 8) store(room + j, load(x + j) * load(e + j));
  return room;
}

template <bool BY_KEY>
void advance(const Args &p, const Tokens &of, const Seq &q, int64_t n_token, int64_t head, int64_t first) {
  const int64_t dim = p.dim, n = q.n_token(), n_row = std::min(PART, dim - first);
  const int64_t at = head * n_token + q.at, key = p.grouped ? head / (p.n_value / p.n_key) : head % p.n_key, key_at = key * n_token + q.at;
  const float *k = of.k + key_at * dim, *query = of.q + key_at * dim, *v = of.v + at * dim + first;
  const int64_t n_decay = BY_KEY ? dim : 1;
  const float *e = of.e + at * n_decay, *b = of.b + at, *kq = of.kq + key_at, scale = 1.0f / std::sqrt(float(dim));
  float *state = p.state + ((q.slot * p.n_value + head) * dim + first) * dim;
  float ek[WIDEST], eq[WIDEST];
  alignas(64) float own[PART * WIDEST];  // between tokens, and of rows that are recorded: the stored state stays before them
  const int64_t n_kept = q.keeps() ? n : q.mode == VERIFY ? q.fold : 0;
  Sums s;
  bool is_own = false;
  products(state, n_row, dim, decayed<BY_KEY>(k, e, dim, ek), decayed<BY_KEY>(q.fold > 0 ? k : query, e, dim, eq), s);
  for (int64_t t = 0; t < n; t++, e += n_decay) {
    const bool is_row = t >= q.fold, is_last = t + 1 == n;
    const bool is_stored = t + 1 == n_kept;
    float *out = is_row ? p.out + ((q.start + q.row + t - q.fold) * p.n_value + head) * dim + first : nullptr;
    const float *next_k = k + (t + 1) * dim, *next_q = t + 1 < q.fold ? next_k : query + (t + 1) * dim;
    const float by = BY_KEY ? 1.0f : *e;
    for (int64_t i = 0; i < n_row; i += 8) {
      const f8 d = all(b[t]) * fma(all(-by), load(s.k + i), load(v + t * dim + i));
      store(s.d + i, d);
      if (is_row) store(out + i, fma(all(by), load(s.q + i), d * all(kq[t])) * all(scale));
    }
    if (is_last && !is_stored) return;
    const float *from = is_own ? own : state;
    if (is_last) return (is_own ? add_last<BY_KEY, true> : add_last<BY_KEY, false>)(from, state, n_row, dim, e, s.d, k + t * dim);
    next_k = decayed<BY_KEY>(next_k, e + n_decay, dim, ek), next_q = decayed<BY_KEY>(next_q, e + n_decay, dim, eq);
    const auto add = is_own ? is_stored ? add_token<BY_KEY, true, false> : add_token<BY_KEY, true, true>
                            : is_stored ? add_token<BY_KEY, false, false> : add_token<BY_KEY, false, true>;
    add(from, is_stored ? state : own, n_row, dim, e, k + t * dim, next_k, next_q, s);
    is_own = !is_stored;
  }
}

}  // namespace

extern "C" void pyspec_gdn(const Args *args) {
  const Args &p = *args;
  for (Pieces pieces(p.batch); pieces.next();) {
    const std::vector<Seq> &seqs = pieces.seqs;
    const int64_t n = pieces.n_token, n_head = p.n_key + p.n_value, n_part = (p.dim + PART - 1) / PART;
    const Tokens tokens(p, n);
    each(int64_t(seqs.size()) * n_head, [&](int64_t i) {
      const int64_t head = i % n_head;
      if (head < p.n_key) prepare_key(p, tokens, seqs[i / n_head], n, head);
      else prepare_value(p, tokens, seqs[i / n_head], n, head - p.n_key);
    });
    const int64_t n_job = p.n_value * n_part;
    each(int64_t(seqs.size()) * n_job, [&](int64_t i) {
      (p.by_key ? advance<true> : advance<false>)(p, tokens, seqs[i / n_job], n, i % n_job / n_part, i % n_part * PART);
    });
  }
  if (p.batch.n_row > 0) clear_rest(p.batch, p.out, p.n_value * p.dim);
}
