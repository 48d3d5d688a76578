"""CHOOSES: from logits to tokens, on the last stage."""
