"""Readers of training data: databases and files in, batches of float arrays out."""
