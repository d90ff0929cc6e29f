"""Triton kernels behind the functions of `dovetail.nn`, for CUDA devices: one file a kernel.

Nothing else calls them. Beside each stands its *twin*, the same in plain torch operations, which serves all other devices and is the kernel's
test oracle. `available` decides which of the two runs; Triton is imported when a kernel first runs, so never on a CPU.
"""
