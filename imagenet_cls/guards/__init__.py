"""Optional protections that a reader of the training loop need not open."""
