"""What a forward takes on a GPU: inputs with stable addresses, graphs, fused kernels, FP8, drawing."""
