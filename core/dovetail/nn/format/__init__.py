"""Formats: the ways in which weights of linear layers are stored, apart from what layers compute.

A layer says *what*: merged columns or rows, and what stands around them (norm, gate, residual stream). A `WeightFormat` says *how*: what it keeps
of a checkpoint's tensors and which kernels multiply it. A `Quantization` says which layers of a checkpoint have which format; it is found by the
`quant_method` of the checkpoint's `quantization_config`, or by `quantization` in engine.yaml.
"""

from dovetail.nn.format.base import Quantization, WeightFormat
from dovetail.nn.format.dense import DENSE, Dense
from dovetail.nn.format.stored import StoredWeight, TensorShape

__all__ = ["DENSE", "Dense", "Quantization", "StoredWeight", "TensorShape", "WeightFormat"]
