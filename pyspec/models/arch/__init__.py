"""One module an architecture: `read(file) -> ModelConfig`, mostly a list of blocks."""
