"""Images: from files, libraries or a user's own code to uint8 batches, and from there to what a model takes."""
