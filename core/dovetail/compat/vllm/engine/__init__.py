"""vLLM's engines and their arguments."""
