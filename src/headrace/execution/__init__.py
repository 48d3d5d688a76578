"""RUNS a stage's share of the model: slots, caches, inputs and outputs of a step."""
