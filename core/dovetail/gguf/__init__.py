"""Models in one GGUF file: its header, read within bounds, and the small files of an ordinary
checkpoint made of it. `dovetail.nn.gguf_tensors` reads the weights."""
