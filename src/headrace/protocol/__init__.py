"""SAYS: the typed messages between the engine and the ranks. No behaviour, no torch."""
