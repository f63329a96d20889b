"""What a load will allocate and ask of kernels, worked out before a byte is read."""
