"""Images: from files to uint8 batches, and from there to what a model takes."""
