"""What stands beside the core: it reads what training writes, or prepares what it reads."""
