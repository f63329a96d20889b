// A gated short convolution with deferred commit (cuda/ops/short_conv/ref.py): a job has some channels of a sequence. It multiplies b and u,
// the raw inputs of the window, then convolves them and multiplies with c.
#include "recurrent.h"

using namespace pyspec;

namespace {

constexpr int64_t BLOCK = 256;  // channels of a job

struct Args {
  ConvArgs conv;  // m: room for the products b * u [row, channel]
  BatchArgs batch;
  const float *m;  // [row, b | c | u]
  int64_t m_stride;
  float *out;  // [row, channel]
};

void run(const Args &p, const Seq &q, int64_t first, int64_t n, float *rows) {
  const int64_t n_channel = p.conv.n_channel, start = q.start + q.row;
  float *made = const_cast<float *>(p.conv.m);
  for (int64_t t = start; t < start + q.n; t++) {
    const float *b = p.m + t * p.m_stride + first, *u = b + 2 * n_channel;
    for (int64_t i = 0; i < n; i += 8) store(made + t * n_channel + first + i, load(b + i) * load(u + i));
  }
  convolve<false>(p.conv, p.batch.width, q, first, n, rows);
  for (int64_t t = 0; t < q.n; t++) {
    const float *c = p.m + (start + t) * p.m_stride + n_channel + first;
    float *out = p.out + (start + t) * n_channel + first;
    for (int64_t i = 0; i < n; i += 8) store(out + i, load(c + i) * load(rows + t * n + i));
  }
}

}  // namespace

extern "C" void pyspec_short_conv(const Args *args) {
  const Args &p = *args;
  const int64_t n_channel = p.conv.n_channel, n_block = (n_channel + BLOCK - 1) / BLOCK;
  for (Pieces pieces(p.batch); pieces.next();) {
    const std::vector<Seq> &seqs = pieces.seqs;
    float *rows = scratch(pieces.n_token * n_channel);
    each(int64_t(seqs.size()) * n_block, [&](int64_t i) {
      const Seq &q = seqs[i / n_block];
      const int64_t first = i % n_block * BLOCK, n = std::min(BLOCK, n_channel - first);
      run(p, q, first, n, rows + q.at * n_channel + q.n_token() * first);
    });
  }
  if (p.batch.n_row > 0) clear_rest(p.batch, p.out, n_channel);
}
