"""SMon finds out why large LLM training jobs are slower than they should be."""

__version__ = "0.1.0"
