"""Combines the other packages into a run: training, evaluation, saving and resuming."""
