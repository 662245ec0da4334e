"""Prepare and check datasets; datasets of the Hugging Face Hub."""
