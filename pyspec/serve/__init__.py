"""pyspec under other programs that start and balance its engines."""
