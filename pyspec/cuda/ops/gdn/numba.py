"""`gdn` for CPUs: the reference's recurrence compiled by numba, one head of one slot at a time in the core's cache.

Same contract and the same order of tokens as gdn_ref; sums over a row of the state are taken in eight lanes. Long prompt
chunks take the reference's chunked form. Memory moved per slot, head and forward: the state once in and once out.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from pyspec.cuda.exact import EXACT
from pyspec.cuda.ops.gdn import ref as gdn_ref
from pyspec.cuda.ops.recurrent import ref as recurrent_ref
from pyspec.cuda.ops.recurrent.threads import run_all
from pyspec.slots.batch import Batch
from pyspec.slots.recurrent import StateLayer


def limits(spec: gdn_ref.GdnSpec) -> str | None:
    if spec.device.type != "cpu":
        return "runs on CPUs only"
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed (pip install numba)"
    if spec.shape.dim % 8:
        return f"a state of {spec.shape.dim} rows is not a multiple of 8"
    return None


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., None]:
    import numba

    @numba.njit(nogil=True, cache=True, fastmath={"contract", "reassoc", "nsz"}, error_model="numpy")
    def head(state, k, v, g, beta, q, out):  # type: ignore[no-untyped-def]  # numba finds types by itself
        """state [dim, dim] in place; k v [n, dim], g beta [n]; q, out [n, dim], or q empty when only folding."""
        n, dim = v.shape
        reads = q.shape[0] > 0
        for t in range(n):
            decay, strength = np.exp(g[t]), beta[t]
            kt = k[t]
            for i in range(dim):
                row = state[i]
                acc = np.float32(0.0)
                for j in range(dim):
                    row[j] *= decay
                    acc += row[j] * kt[j]
                d = strength * (v[t, i] - acc)
                for j in range(dim):
                    row[j] += d * kt[j]
                if reads:
                    qt = q[t]
                    acc = np.float32(0.0)
                    for j in range(dim):
                        acc += row[j] * qt[j]
                    out[t, i] = acc

    return head


def bind(spec: gdn_ref.GdnSpec) -> gdn_ref.Gdn:
    run_head, reference, shape = _compiled(), gdn_ref.bind(spec), spec.shape
    kd, n_v, n_k, dim = shape.n_k_head * shape.dim, shape.n_v_head, shape.n_k_head, shape.dim
    empty = np.zeros((0, dim), np.float32)

    def gdn(
        m: Tensor,
        alpha: Tensor,
        beta: Tensor,
        a: Tensor,
        dt_bias: Tensor,
        conv_w: Tensor,
        layer: StateLayer,
        batch: Batch,
    ) -> Tensor:
        if not EXACT.is_on and any(s.keep and s.width >= gdn_ref.CHUNKED for s in batch.seqs):
            return reference(m, alpha, beta, a, dt_bias, conv_w, layer, batch)
        recurrent_ref.check_seqs(batch, layer)
        g, beta = gdn_ref.gates(alpha, beta, a, dt_bias)
        c = recurrent_ref.convolve(m, conv_w, layer, batch, shape.n_conv)
        q, k, v = c.split([kd, kd, n_v * dim], -1)
        q, k = (gdn_ref.l2norm(t.unflatten(-1, (n_k, dim)), spec.eps) for t in (q, k))
        v = v.unflatten(-1, (n_v, dim))
        # [head, row, ...] so that a head's rows lie side by side: numba vectorises contiguous rows only
        qs, ks, vs, gs, bs = (t.transpose(0, 1).contiguous().numpy() for t in (q, k, v, g, beta))
        result, states = np.empty((n_v, m.shape[0], dim), np.float32), layer.state.numpy()
        rec_k, rec_v, rec_g, rec_b = (t.numpy() for t in (layer.k, layer.v, layer.g, layer.beta))

        def one(s: int, h: int) -> None:
            seq, rows, kh = batch.seqs[s], slice(batch.starts[s], batch.starts[s + 1]), h % n_k
            slot, fold = seq.slot, seq.n_fold
            state = states[slot, h].copy() if seq.late else states[slot, h]
            if fold:
                kept = (rec_k[slot, :fold, kh], rec_v[slot, :fold, h], rec_g[slot, :fold, h], rec_b[slot, :fold, h])
                run_head(state, *(np.ascontiguousarray(x) for x in kept), empty, empty)
            live = state if seq.keep or seq.late else state.copy()
            run_head(live, ks[kh, rows], vs[h, rows], gs[h, rows], bs[h, rows], qs[kh, rows], result[h, rows])

        work = [(s, h) for s in range(len(batch.seqs)) for h in range(n_v)]
        run_all(one, work)
        recurrent_ref.record(layer, batch, (k, v, g, beta))
        return torch.from_numpy(result).transpose(0, 1) * dim**-0.5

    return gdn
