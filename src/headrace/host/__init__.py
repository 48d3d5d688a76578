"""KNOWS the machine: cores, control groups, memory, what engines left behind."""
