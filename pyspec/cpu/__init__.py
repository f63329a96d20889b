"""Kernels for CPUs: C++ sources, their compiler, and calls that are run at once or recorded."""
