"""Models: from a config's `model` section to a module, its weights, and its moving average."""
