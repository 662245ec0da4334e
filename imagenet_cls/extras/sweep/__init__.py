"""Many runs, and their comparison."""
