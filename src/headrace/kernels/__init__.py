"""Kernels of the forward pass. Today each is its plain torch reference."""
