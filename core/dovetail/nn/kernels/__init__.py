"""Triton kernels for the functions of `dovetail.nn` on CUDA devices, one file per kernel.

Only `dovetail.nn` calls them. Each has a *twin*, the same function in plain torch operations, which
runs on all other devices and is the kernel's test oracle. `available` chooses between them; Triton
is imported when a kernel first runs, so never on a CPU.
"""
