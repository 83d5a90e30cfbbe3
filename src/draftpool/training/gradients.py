"""All gradients of a model in one tensor, so that processes add them up in one call."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class FlatGradients:
    """Gives every parameter a gradient that is a view of one float32 tensor; backward passes add to it.

    Args:
        parameters: float32, all on one device.

    Attributes:
        flat: [number of weights].
    """

    def __init__(self, parameters: list[nn.Parameter]):
        counts = [parameter.numel() for parameter in parameters]
        self.flat: Tensor = torch.zeros(sum(counts), device=parameters[0].device)
        for parameter, own in zip(parameters, self.flat.split(counts), strict=True):
            parameter.grad = own.view_as(parameter)

    def clear(self) -> None:
        """Begin a step."""
        self.flat.zero_()

    def divide(self, divisor: float) -> None:
        """Turn the gradients of a sum into those of a mean."""
        self.flat.div_(divisor)
