"""DECIDES: requests, scheduler, block pool, outputs. Knows plans, not tensors."""
