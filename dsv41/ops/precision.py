"""Wide arithmetic: at least fp32, independent of autocast.

Norms, mixing coefficients, routing, pooling, gates, softmax and the head compute in fp32 whatever the model's dtype.
A float64 model computes them in float64, so that two implementations can be compared beyond fp32 rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor


def widen(x: Tensor) -> Tensor:
    """`x` in fp32, or unchanged if it is float64."""
    return x if x.dtype == torch.float64 else x.float()


def full_precision(x: Tensor) -> torch.autocast:
    """Context in which matrix products keep the dtype of their inputs, also under autocast."""
    return torch.autocast(device_type=x.device.type, enabled=False)
