"""Tensors of a checkpoint, or made up, and which part of them a rank holds."""
