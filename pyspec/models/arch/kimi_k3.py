"""`kimi-k3`: Kimi Linear's mixers and experts, of a latent width, with a soft cap in activations; parts read a mix of the stream and of rows that
were kept of it.

Every `attn_res.block_size` blocks the stream is kept and begins anew.
"""

from __future__ import annotations

from dataclasses import replace

from pyspec.gguf import GGUFFile
from pyspec.models.arch.deepseek2 import read_mla
from pyspec.models.arch.kimi_linear import read_state
from pyspec.models.bank import Bank
from pyspec.models.block import BlockSpec, Part, pair
from pyspec.models.blocks.kda import Kda
from pyspec.models.blocks.mlp import Mlp
from pyspec.models.experts import feeds, read_routed
from pyspec.models.model import ModelSpec
from pyspec.models.part import PartSpec
from pyspec.models.read import read_decoder, read_kv_heads, trunk_layers
from pyspec.models.residual import Residual

LATENT = "ffn_routed_down.weight", "ffn_routed_up.weight"
LATENT_NORM = "ffn_routed_norm.weight"


def read(file: GGUFFile) -> ModelSpec:
    h, (n_layer, _) = file.hparams, trunk_layers(file)
    betas = h.number("activation.situ_beta"), h.number("activation.situ_linear_beta", 0.0)
    experts = read_routed(
        file,
        "sigmoid",
        act="situ",
        betas=betas,
        latent=h.integer("expert_latent_length", 0),
        latent_names=LATENT,
        latent_norm=LATENT_NORM if any(name.endswith(LATENT_NORM) for name in file.tensors) else "",
    )
    floor = h.number("kda.gate_lower_bound", 0.0)
    is_one = any(name.endswith("ssm_g.weight") for name in file.tensors)
    delta = Kda(read_state(file, floor), floor != 0, "ssm_g" if is_one else "ssm_g_a")
    mla = read_mla(file, turns=False)
    is_gated = any(name.endswith("attn_gate.weight") for name in file.tensors)
    mla = replace(mla, gates=mla.n_value if is_gated else 0)
    kv_heads, every = read_kv_heads(file, n_layer), h.integer("attn_res.block_size", 0)
    n_kept = -(-n_layer // every) if every else 0

    def block(i: int, n_kv: int, feed: PartSpec) -> BlockSpec:
        if isinstance(feed, Mlp):
            feed = replace(feed, act="situ", betas=betas)
        mixer = mla if n_kv else delta
        if not every:
            return pair(mixer, feed)
        kept = -(-i // every)  # before it
        before = Bank("attn_res_score.weight", kept, restarts=i % every == 0)
        parts = (
            Part("attn_norm", mixer, bank=before),
            Part("ffn_norm", feed, bank=Bank("ffn_res_score.weight", i // every + 1)),
        )
        last = Bank("output_res_score.weight", n_kept, of_model=True) if i + 1 == n_layer else None
        return BlockSpec(parts, bank=last)

    given = zip(kv_heads, feeds(file, n_layer, experts), strict=True)
    blocks = (block(i, *each) for i, each in enumerate(given))
    n_ff = max(h.integer("feed_forward_length", 0), experts.n_inner)
    return read_decoder(file, blocks, n_ff, residual=Residual(n_kept=n_kept))
