"""Recurrent layers: Gated DeltaNet (arXiv:2412.06464) and Mamba2 (arXiv:2405.21060), over states
that lie in the page pool (`dovetail.api.state`).

A layer's state is a short convolution's past inputs, and a matrix for each head. The functions
compute a step's tokens for all rows of `StateLayer.batch` at once, replace the rows' states in
place and write checkpoints on the way. A row whose tokens are all in this step starts from zero.

    x = short_conv(qkv, weight, bias, state, 0)                                  # causal convolution over a few tokens, then silu
    y = gated_delta_rule(x, a, b, A_log, dt_bias, shape, state, 1)               # or `mamba2`
    y = gated_norm(y.flatten(1), z, weight, eps, group)                          # RMS norm with a gate

The modules `GatedDeltaNet` and `Mamba2Mixer` hold the parameters and do all three.
"""

from dovetail.nn.state.conv import ShortConv, short_conv
from dovetail.nn.state.delta import GatedDeltaNet, gated_delta_rule
from dovetail.nn.state.mamba import Mamba2Mixer, mamba2
from dovetail.nn.state.norm import gated_norm
from dovetail.nn.state.shapes import DeltaShape, Mamba2Shape

__all__ = [
    "DeltaShape",
    "GatedDeltaNet",
    "Mamba2Mixer",
    "Mamba2Shape",
    "ShortConv",
    "gated_delta_rule",
    "gated_norm",
    "mamba2",
    "short_conv",
]
