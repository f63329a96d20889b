"""Tiny models of every architecture, and gemma4 with experts, whose outputs have factors."""

from dataclasses import replace

from pyspec.synth.dims import TINY

OF_EXPERTS = "ffn_gate_up_exps.weight", "ffn_gate_inp.scale", "ffn_down_exps.scale"
GEMMA = TINY["gemma4"]
MODELS = TINY | {
    "gemma4-moe": replace(GEMMA, n_expert=6, n_used=2, n_ff_expert=64, has=(*GEMMA.has, *OF_EXPERTS))
}
