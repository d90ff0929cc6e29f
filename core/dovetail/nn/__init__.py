"""Layers for model authors, each parallel over the ranks of a group (a group of one included) and each made with a `BuildContext`.

`linear`, `embedding`, `norm`, `rotary`, `qkv`, `activation`: layers, and the pure functions that they call. `kernels`: the same functions on CUDA
devices. `parameter`: weights that load their own part of a checkpoint. `logprobs`: what samplers and prompts need of logits.
"""
