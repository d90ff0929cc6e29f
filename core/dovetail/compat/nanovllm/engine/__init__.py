"""nano-vllm's engine."""
