"""Find settings before training, and look at what they mean."""
