"""Layers for model authors. Each is tensor-parallel over a group of ranks (possibly a single one)
and constructed with a `BuildContext`.

`decoder`, `attention`, `feed_forward`, `moe`: parts of a decoder. `linear`, `embedding`, `norm`,
`rotary`, `qkv`, `activation`: layers and the pure functions that they call. `kernels`: the same
functions on CUDA devices. `parameter`: weights that load their own part of a checkpoint.
`logprobs`: log-probabilities for samplers and prompts.
"""
