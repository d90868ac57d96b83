"""Attention of a forward's rows over the KV pool: the reference, and FlashInfer's kernels."""
