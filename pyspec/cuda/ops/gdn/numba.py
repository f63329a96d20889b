"""`gdn` for CPUs: the reference's recurrence compiled by numba, one head of one slot at a time in the core's cache.

Same contract and the same order of tokens as gdn_ref; sums over a row of the state are taken in eight lanes. Long prompt
chunks take the reference's chunked form. Memory moved per slot, head and forward: the state once in and once out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
from torch import Tensor

from pyspec.cuda.kernel_context import current
from pyspec.cuda.ops.gdn import ref as gdn_ref
from pyspec.cuda.ops.recurrent import ref as recurrent_ref
from pyspec.cuda.ops.recurrent.heads import Shared, missing, run_heads
from pyspec.slots.batch import Batch
from pyspec.slots.recurrent import StateLayer


def limits(spec: gdn_ref.GdnSpec) -> str | None:
    if (why := missing(spec.device)) is not None:
        return why
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
    shared = Shared(0, lambda h: h // (n_v // n_k) if shape.grouped else h % n_k)

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
        if not current().is_exact and any(
            s.keep and s.width >= recurrent_ref.CHUNKED for s in batch.seqs
        ):
            return reference(m, alpha, beta, a, dt_bias, conv_w, layer, batch)
        recurrent_ref.check_seqs(batch, layer)
        g, beta = gdn_ref.gates(alpha, beta, a, dt_bias)
        c = recurrent_ref.convolve(m, conv_w, layer, batch, shape.n_conv)
        q, k, v = c.split([kd, kd, n_v * dim], -1)
        q, k = (gdn_ref.l2norm(t.unflatten(-1, (n_k, dim)), spec.eps) for t in (q, k))
        v = v.unflatten(-1, (n_v, dim))
        return run_heads(run_head, layer, batch, (k, v, g, beta), q, shared) * dim**-0.5

    return gdn
