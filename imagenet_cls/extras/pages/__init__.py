"""HTML pages about runs and evaluations."""
