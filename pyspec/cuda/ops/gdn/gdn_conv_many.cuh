// gdn_conv for many sequences of few rows each: a warp has a head of one sequence, where gdn_conv gives it a block of four, most of which
// have nothing to do and wait for their turn on a multiprocessor. To the same bits. A lane reads and writes its own channels only, so
// nothing waits for other lanes but the sums over a head.
#pragma once

template <bool VALUES>
__device__ __forceinline__ void conv_warp(const ConvArgs& a, const Seq& seq, int s, int head) {
  constexpr int PARTS_OF_HEAD = VALUES ? 1 : 2, STRIDE = VALUES ? VD : KD, EARLY = 2;
  const int lane = threadIdx.x % 32, at = head * DIM + lane * 4;
  const i64 slot_row = static_cast<i64>(seq.slot) * a.width, fold_row = static_cast<i64>(s) * a.width;
  float* const record = (VALUES ? a.rec_v : a.rec_k) + slot_row * STRIDE + at;
  float* const fold = (VALUES ? a.fold_v : a.fold_k) + fold_row * STRIDE + at;
  if (seq.in_place()) fetch_records(record, 0, 1, seq.fold, STRIDE);
  const float* rows[PARTS_OF_HEAD];
  float* conv[PARTS_OF_HEAD];
  float4 x[PARTS_OF_HEAD][TAPS], next[PARTS_OF_HEAD];  // what stands before a row, and the row; the one behind it
  float4 old[EARLY];                                   // records that are loaded before the wait
  const int moved_records = seq.in_place() ? 0 : seq.fold;

  const float* const taps0 = a.conv_w + ((VALUES ? 2 * KD : 0) + at) * TAPS;  // read for each row, for registers are few
  const float* const taps1 = a.conv_w + ((VALUES ? 2 * KD : KD) + at) * TAPS;
  const float scale = VALUES ? a.a[head] : 0.0f, bias = VALUES && !kByKey ? a.dt_bias[head] : 0.0f;
#pragma unroll
  for (int p = 0; p < PARTS_OF_HEAD; p++) {
    const int channel = (VALUES ? 2 * KD : p * KD) + at;
    rows[p] = a.m + seq.start * a.m_stride + channel;
    conv[p] = a.conv + (slot_row + static_cast<i64>(seq.slot) * (TAPS - 1)) * CHANNELS + channel;
    const float* window = conv[p] + static_cast<i64>(seq.fold) * CHANNELS;
#pragma unroll
    for (int i = 0; i < TAPS - 1; i++) x[p][i] = quad(window + static_cast<i64>(i) * CHANNELS);
  }
#pragma unroll
  for (int i = 0; i < EARLY; i++)
    if (i < moved_records) old[i] = quad(static_cast<const float*>(record) + i * STRIDE);
  wait_for_predecessor();

  auto load = [&](int t) {
    if (t >= seq.n) return;
#pragma unroll
    for (int p = 0; p < PARTS_OF_HEAD; p++) next[p] = quad(rows[p] + t * a.m_stride);
  };
  load(0);
#pragma unroll
  for (int i = 0; i < EARLY; i++)
    if (i < moved_records) quad(fold + i * STRIDE) = old[i];
#pragma unroll 2
  for (i64 t = EARLY; t < moved_records; t++) quad(fold + t * STRIDE) = quad(static_cast<const float*>(record) + t * STRIDE);
  if (VALUES) {  // a lane makes the gates of a row
    for (int t = lane; t < seq.fold; t += 32) {
      const i64 from = (slot_row + t) * N_V + head, to = (fold_row + t) * N_V + head;
      if (!kByKey) a.fold_e[to] = expf(a.rec_g[from]);
      a.fold_b[to] = a.rec_b[from];
    }
    if (kByKey) fold_decays(a, slot_row, fold_row, at, 0, 1, seq.fold);
    for (int t = lane; t < seq.n; t += 32) {
      const i64 row = seq.start + t, to = (slot_row + seq.first + t) * N_V + head;
      const float b = sigmoid(a.beta[row * a.beta_stride + head]);
      a.b[row * N_V + head] = b;
      if (!seq.keep) a.rec_b[to] = b;
      if (!kByKey) {
        const float g = scale * softplus(a.alpha[row * a.alpha_stride + head] + bias);
        a.e[row * N_V + head] = expf(g);
        if (!seq.keep) a.rec_g[to] = g;
      }
    }
  }
  auto store_window = [&] {
#pragma unroll
    for (int p = 0; p < PARTS_OF_HEAD; p++)
#pragma unroll
      for (int i = 0; i < TAPS - 1; i++) quad(conv[p] + static_cast<i64>(i) * CHANNELS) = x[p][i];
  };
  if (!seq.keep && seq.first == 0) store_window();  // the folded records are passed over, and the rows come behind
#pragma unroll 1
  for (int t = 0; t < seq.n; t++) {
    const i64 row = seq.start + t, kept = (seq.keep ? row : seq.first + t) * STRIDE;
#pragma unroll
    for (int p = 0; p < PARTS_OF_HEAD; p++) x[p][TAPS - 1] = next[p];
    load(t + 1);
    if (VALUES && kByKey) {
      const float4 z = quad(a.alpha + row * a.alpha_stride + at);
      const float4 g = log_decays(z, quad(a.dt_bias + at), scale);
      quad(a.e + row * VD + at) = exp4(g);
      if (!seq.keep) quad(a.rec_g + (slot_row + seq.first + t) * VD + at) = g;
    }
    const float4 y = Taps(taps0)(x[0]);
#pragma unroll
    for (int p = 0; p < PARTS_OF_HEAD; p++)
      if (!seq.keep) quad(conv[p] + static_cast<i64>(TAPS - 1 + seq.first + t) * CHANNELS) = x[p][TAPS - 1];
    if (VALUES) {
      quad((seq.keep ? a.v + at : record) + kept) = y;
    } else {
      const float4 z = Taps(taps1)(x[PARTS_OF_HEAD - 1]);
      const float yy = dot4(y, y), zz = dot4(z, z), yz = dot4(y, z);
      const float norm_q = rsqrtf(yy + a.eps), norm_k = rsqrtf(zz + a.eps);
      quad(a.q + row * KD + at) = scaled(y, norm_q);
      quad((seq.keep ? a.k + at : record) + kept) = scaled(z, norm_k);
      if (lane == 0) a.kq[row * N_K + head] = yz * norm_q * norm_k;
    }
#pragma unroll
    for (int p = 0; p < PARTS_OF_HEAD; p++)
#pragma unroll
      for (int i = 0; i < TAPS - 1; i++) x[p][i] = x[p][i + 1];
  }
  if (seq.keep) store_window();
}
