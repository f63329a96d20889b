"""One module an architecture: `read(file) -> ModelSpec`, mostly a list of blocks."""
