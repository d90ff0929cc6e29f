"""vLLM's names that carry a version."""
