"""MOVES: stage loop, token feedback, links, launch, partition, timeline."""
