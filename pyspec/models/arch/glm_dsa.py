"""`glm-dsa` (GLM-5 to 5.2): deepseek2's latent attention over the keys that an indexer chooses; dense blocks first, then experts; an MTP block.

Blocks without an indexer attend to what the last one before them chose. The MTP block sees all keys.
"""

from __future__ import annotations

from dataclasses import replace

from pyspec.errors import ModelError
from pyspec.gguf import GGUFFile
from pyspec.models.arch.deepseek2 import read_mla
from pyspec.models.arch.deepseek4 import read_indexer
from pyspec.models.block import pair
from pyspec.models.blocks.indexer import Indexer
from pyspec.models.experts import feeds, read_routed
from pyspec.models.model import ModelSpec
from pyspec.models.read import read_decoder, trunk_layers

LONG = 1 << 20  # tokens of contexts whose models share choices, where files do not say which blocks do
ALONE, EVERY = 2, 4  # first blocks that choose; of those behind them one of so many


def read(file: GGUFFile) -> ModelSpec:
    h, (n_layer, n_nextn) = file.hparams, trunk_layers(file)
    mla, experts = read_mla(file), read_routed(file, "sigmoid")
    if not mla.q_rank:
        raise ModelError(
            f"{file.architecture} files without attn_q_a have no rows for an indexer's queries"
        )
    indexer = Indexer(read_indexer(file, mla.rope.n_rot), mla.rope)
    mixers = {True: replace(mla, indexer=indexer), False: replace(mla, follows=True)}
    blocks = (
        pair(mixers[chooses], feed)
        for chooses, feed in zip(read_types(file, n_layer), feeds(file, n_layer, experts), strict=True)
    )
    n_ff = max(h.integer("feed_forward_length"), experts.n_inner)
    return read_decoder(file, blocks, n_ff, n_nextn=n_nextn, mtp_block=pair(mla, experts))


def read_types(file: GGUFFile, n_layer: int) -> list[bool]:
    """Which blocks have an indexer."""
    h, key = file.hparams, "attention.indexer.types"
    if key not in h:
        alike = h.integer("context_length") < LONG
        return [alike or i < ALONE or (i - ALONE) % EVERY == 0 for i in range(n_layer)]
    types = [bool(x) for x in h.integers(key)]
    if len(types) < n_layer or not types[0]:
        raise ModelError(
            f"{h.key(key)} has {len(types)} entries; want one for each of {n_layer} blocks, of which the first chooses"
        )
    return types[:n_layer]
