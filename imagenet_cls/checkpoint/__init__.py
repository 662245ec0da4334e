"""Checkpoints: the folder format, optimizer state, selection and background saving."""
