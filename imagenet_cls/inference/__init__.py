"""Use of trained weights: load, predict, evaluate, compute features, export and publish."""
