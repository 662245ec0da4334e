"""Use trained weights elsewhere: export, publish, average, features."""
