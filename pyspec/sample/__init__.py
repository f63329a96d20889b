"""Choosing tokens: one call per round turns every slot's verified logits into the tokens it keeps."""
