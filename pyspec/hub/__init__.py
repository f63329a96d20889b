"""Files from Hugging Face: the choice among a repository's files (`names`), and their paths in the local cache (`fetch`)."""

from pyspec.hub.fetch import Repository, check_hash, fetch_file, from_hub, sha256_of
from pyspec.hub.heads import expecting, heads_only
from pyspec.hub.names import (
    DEFAULT_QUANTS,
    Sidecar,
    choose,
    models_of,
    quant_of,
    shards_of,
    sidecars,
    split_name,
)

__all__ = [
    "DEFAULT_QUANTS",
    "Repository",
    "Sidecar",
    "check_hash",
    "choose",
    "expecting",
    "fetch_file",
    "from_hub",
    "heads_only",
    "models_of",
    "quant_of",
    "sha256_of",
    "shards_of",
    "sidecars",
    "split_name",
]
