"""Kernels of the forward pass: native on CPUs, and for each a plain torch reference."""
