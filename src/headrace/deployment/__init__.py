"""SETS UP: decides everything once, then starts ranks and engine."""
