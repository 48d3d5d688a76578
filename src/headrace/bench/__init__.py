"""MEASURES: what scheduling costs, and what it gains, without or with a real pipeline."""
