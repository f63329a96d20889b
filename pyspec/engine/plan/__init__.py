"""Plans a load before a byte is read: its memory, and the kernels it will need."""
