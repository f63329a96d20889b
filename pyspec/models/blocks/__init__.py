"""One module a mixer or feed-forward: frozen data, and the part bound to weights. The contract is in `pyspec.models.part`."""
