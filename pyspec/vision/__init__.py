"""Pictures: their files, their pixels, and the encoders that make rows of them. Only `encoder` needs torch."""
