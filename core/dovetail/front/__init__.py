"""The room that programs and servers touch: requests in, text out. It stands above the engine's
loop, which knows no YAML, tokenizers or text."""
