"""From settings and files to an engine that is ready: weights, kernels, warm-up, ranks."""
