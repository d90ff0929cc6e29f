"""What programs and servers touch: requests in, text out. It stands above the engine's loop, which knows nothing of YAML, tokenizers or text."""
