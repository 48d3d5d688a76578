"""One file for each architecture: what there is to know of it, and the program of a stage."""
