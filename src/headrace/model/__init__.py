"""COMPUTES: architectures, layers, weight loading."""
