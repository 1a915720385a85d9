"""In-process sampling with continuous batching. Importing this package loads no torch."""
