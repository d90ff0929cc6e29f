"""Weight formats: how the weights of linear layers are stored, separate from what the layers
compute.

A layer defines *what*: merged columns or rows, and the operations around them (norm, gate, residual
stream). A `WeightFormat` defines *how*: what it stores of a checkpoint's tensors and which kernels
multiply it. A `Quantization` maps the layers of a checkpoint to formats; it is selected by the
`quant_method` of the checkpoint's `quantization_config`, or by `quantization` in engine.yaml.
"""

from dovetail.nn.format.base import Quantization, WeightFormat
from dovetail.nn.format.dense import DENSE, Dense
from dovetail.nn.format.stored import StoredFormat, StoredWeight, TensorShape

__all__ = [
    "DENSE",
    "Dense",
    "Quantization",
    "StoredFormat",
    "StoredWeight",
    "TensorShape",
    "WeightFormat",
]
