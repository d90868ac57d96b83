"""Kernels of our own for a CPU, built once by the host's compiler (`--compile`)."""
