"""Use trained weights elsewhere: export, publish, features."""
