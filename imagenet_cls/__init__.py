"""Train ImageNet classifiers from config files: one GPU, many, or many machines, with the same result."""

__version__ = "0.1.0"
