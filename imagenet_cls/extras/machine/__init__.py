"""Check a machine: GPUs, and the connection of ranks."""
