"""A lesson that runs: the same few steps under each way of running in parallel."""
