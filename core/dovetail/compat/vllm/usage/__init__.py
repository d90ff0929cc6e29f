"""vLLM's reports of usage. Dovetail sends none."""
