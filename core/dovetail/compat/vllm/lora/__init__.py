"""vLLM's adapters."""
