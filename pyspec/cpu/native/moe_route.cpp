// The experts of a row and the weight of each (cuda/ops/moe/ref.py), in three loops: rows are normed; experts score them; each row chooses.
//
// A score is one dot product in one order of sums, whatever else is scored. Of equal scores the lower expert comes first.
#include <algorithm>
#include <cmath>

#include "pool.h"
#include "scratch.h"
#include "sums.h"

using namespace pyspec;

namespace {

constexpr int64_t MOST = 1024, R = 4, ROWS = 16, PIECE = 256;  // experts; experts of a step; rows of a job, and between two loops
constexpr float LEAST_SUM = 6.103515625e-5f;      // 2^-14, as moe.ref
enum Router : int64_t { SOFTMAX, SIGMOID, SQRTSOFTPLUS, CHOSEN };

struct Args {
  const float *x;
  int64_t x_stride;
  const float *norm, *matrix, *bias, *shift;  // [n_in]; [n_expert + gated, n_in]; [n_expert] or null, in the choice alone and in scores
  const float *factors;               // [n_expert] or null
  const int32_t *given;               // [row, n_used] or null
  int32_t *ids;                       // [row, n_used]
  float *weights, *gate;              // [row, n_used]; [row] or null
  int64_t n_row, n_in, n_expert, n_used, router, renorm, n_group, n_kept;
  double scale, eps;
};

void norm_row(const Args &p, const float *x, float *out) {
  f8 s[4] = {};
  for (int64_t j = 0; j < p.n_in; j += 8) s[j / 8 % 4] = fma(load(x + j), load(x + j), s[j / 8 % 4]);
  const f8 by = all(1.0f / std::sqrt(sum((s[0] + s[1]) + (s[2] + s[3])) / float(p.n_in) + float(p.eps)));
  for (int64_t j = 0; j < p.n_in; j += 8) store(out + j, load(x + j) * by * load(p.norm + j));
}

// Scores of R experts, or fewer, for two rows, or the same one twice
void score(const Args &p, const float *experts, int64_t n, const float *x, const float *y, float *of_x, float *of_y) {
  f8 s[2 * R] = {};
  const float *rows[R];
  for (int64_t r = 0; r < R; r++) rows[r] = experts + std::min(r, n - 1) * p.n_in;
  for (int64_t j = 0; j < p.n_in; j += 8) {
    const f8 xj = load(x + j), yj = load(y + j);
    for (int64_t r = 0; r < R; r++) {
      const f8 w = load(rows[r] + j);
      s[r] = fma(w, xj, s[r]), s[R + r] = fma(w, yj, s[R + r]);
    }
  }
  const f8 found = sums(s);
  for (int64_t r = 0; r < n; r++) of_x[r] = found[r], of_y[r] = found[R + r];
}

float sigmoid_of(float x) { return 1.0f / (1.0f + std::exp(-x)); }

void softmax(const float *x, int64_t n, float *out) {
  float top = x[0], total = 0.0f;
  for (int64_t i = 1; i < n; i++) top = std::max(top, x[i]);
  for (int64_t i = 0; i < n; i++) total += out[i] = std::exp(x[i] - top);
  for (int64_t i = 0; i < n; i++) out[i] /= total;
}

// logits [n_expert] -> the experts' weights before the choice
void probabilities(const Args &p, const float *logits, float *out) {
  const int64_t n = p.n_expert;
  if (p.router == CHOSEN) std::copy_n(logits, n, out);
  if (p.router == SOFTMAX) softmax(logits, n, out);
  if (p.router == CHOSEN || p.router == SOFTMAX) return;
  for (int64_t i = 0; i < n; i++) {
    const float x = logits[i];
    out[i] = p.router == SIGMOID ? sigmoid_of(x) : std::sqrt(x > 20.0f ? x : std::log1p(std::exp(x)));
  }
}

// NaN comes before all, as where torch sorts
bool is_better(float a, float b) { return a > b || (a != a && b == b); }

// The sum of the two best of n scores; of one, itself
float worth(const float *scores, int64_t n) {
  float first = scores[0], second = 0.0f;
  for (int64_t i = 1; i < n; i++) {
    const bool is_first = is_better(scores[i], first);
    const float other = is_first ? first : scores[i];
    if (i == 1 || is_better(other, second)) second = other;
    if (is_first) first = scores[i];
  }
  return first + second;
}

// Experts of all groups but the best score minus infinity; of equal groups the first are kept
void keep_groups(const Args &p, float *scores) {
  float worths[MOST];
  bool is_kept[MOST] = {};
  const int64_t n = p.n_expert / p.n_group;
  for (int64_t g = 0; g < p.n_group; g++) worths[g] = worth(scores + g * n, n);
  for (int64_t k = 0; k < p.n_kept; k++) {
    int64_t best = -1;
    for (int64_t g = 0; g < p.n_group; g++)
      if (!is_kept[g] && (best < 0 || is_better(worths[g], worths[best]))) best = g;
    is_kept[best] = true;
  }
  for (int64_t g = 0; g < p.n_group; g++)
    if (!is_kept[g]) std::fill_n(scores + g * n, n, -INFINITY);
}

void choose(const Args &p, float *logits, int64_t row) {
  float weights[MOST], scores[MOST];
  bool is_taken[MOST] = {};
  int32_t *ids = p.ids + row * p.n_used;
  float *out = p.weights + row * p.n_used, total = 0.0f;
  for (int64_t i = 0; i < p.n_expert && p.shift != nullptr; i++) logits[i] += p.shift[i];
  probabilities(p, logits, weights);
  const float *chooses = p.bias == nullptr && p.n_group == 1 ? logits : weights;
  for (int64_t i = 0; i < p.n_expert; i++) scores[i] = chooses[i] + (p.bias == nullptr ? 0.0f : p.bias[i]);
  if (p.n_group > 1 && p.given == nullptr) keep_groups(p, scores);
  for (int64_t k = 0; k < p.n_used; k++) {
    int64_t best = -1;
    for (int64_t i = 0; i < p.n_expert && p.given == nullptr; i++)
      if (!is_taken[i] && (best < 0 || is_better(scores[i], scores[best]))) best = i;
    if (p.given != nullptr) best = std::clamp<int64_t>(p.given[row * p.n_used + k], 0, p.n_expert - 1);
    is_taken[best] = true;
    ids[k] = int32_t(best), out[k] = weights[best];
    total += weights[best];
  }
  if (p.router == CHOSEN) {
    softmax(out, p.n_used, out);
    total = 0.0f;
    for (int64_t k = 0; k < p.n_used; k++) total += out[k];
  }
  const float by = p.renorm ? std::max(total, LEAST_SUM) : 1.0f;
  for (int64_t k = 0; k < p.n_used; k++) out[k] = out[k] / by * float(p.scale) * (p.factors == nullptr ? 1.0f : p.factors[ids[k]]);
  if (p.gate != nullptr) p.gate[row] = sigmoid_of(logits[p.n_expert]);
}

void run(const Args &p) {
  const int64_t n_out = p.n_expert + (p.gate != nullptr), n_block = (n_out + R - 1) / R, n_tile = (p.n_row + ROWS - 1) / ROWS;
  float *rows = scratch(p.n_row * (p.n_in + n_out)), *logits = rows + p.n_row * p.n_in;
  each_range(p.n_row, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++) norm_row(p, p.x + i * p.x_stride, rows + i * p.n_in);
  });
  each_range(n_block * n_tile, std::max<int64_t>(1, 4096 / p.n_in), [&](int64_t from, int64_t to) {
    for (int64_t job = from; job < to; job++) {
      const int64_t first = job % n_block * R, last_row = std::min(p.n_row, job / n_block * ROWS + ROWS);
      for (int64_t i = job / n_block * ROWS; i < last_row; i += 2) {
        const int64_t other = std::min(i + 1, last_row - 1);
        score(p, p.matrix + first * p.n_in, std::min(R, n_out - first), rows + i * p.n_in, rows + other * p.n_in,
              logits + i * n_out + first, logits + other * n_out + first);
      }
    }
  });
  each_range(p.n_row, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++) choose(p, logits + i * n_out, i);
  });
}

}  // namespace

extern "C" void pyspec_moe_route(const Args *args) {
  for (int64_t first = 0; first < args->n_row; first += PIECE) {
    Args p = *args;
    p.n_row = std::min(PIECE, p.n_row - first);
    p.x += first * p.x_stride, p.ids += first * p.n_used, p.weights += first * p.n_used;
    if (p.gate != nullptr) p.gate += first;
    if (p.given != nullptr) p.given += first * p.n_used;
    run(p);
  }
}
