"""vLLM's entry points. `dovetail serve` is the server."""
