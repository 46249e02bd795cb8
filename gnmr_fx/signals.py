"""What the controller watches: the level of each unit at a step, by formula. Pure functions over vectors ``[U]``.

Every signal gives a level ``l_t(u) >= 0``; :mod:`gnmr_fx.controller` compares it with ``alpha`` and its change, the
ratio to the mean of the unit's own last levels, with ``beta``. With the norm ``n_t(u)`` of a unit's gradient and the
relative quantization error ``e_t(u)`` of what the unit stores or multiplies on the low-cost path:

==========  =============================================  =============================================
signal      level                                          asks
==========  =============================================  =============================================
``gnmr``    ``n_t(u) / mean(n_1(u) ... n_{t-1}(u))``       is the gradient larger than it used to be?
``error``   ``e_t(u)``                                     is the operand badly represented?
``gap``     ``e_t(u) n_t(u) / sqrt(sum_v n_t(v)^2)``       how far is the whole gradient off by it?
==========  =============================================  =============================================

``e`` is the root of the mean, over the tensors that the unit stored in a step and over ranks, of
``|x - q(x)|^2 / |x|^2``, with ``q`` the round trip through the low-cost format, whichever path is in force
(:mod:`gnmr_fx.measure`). It does not depend on the path, so a switch does not move it.

``gap`` rests on ``dW = g^T x``: a perturbation of ``x`` by a relative error ``e`` moves ``dW`` by about ``e |dW|``
where the terms of the sum over tokens are as aligned with the errors as with ``x``, and by less where ``dW`` is a
coherent sum and the errors are not. It is an estimate of the order of units, more than of the gap's size;
:func:`gnmr_fx.audit` measures the gap itself.
"""

from __future__ import annotations

import torch
from torch import Tensor


def ratio(value: Tensor, mean: Tensor, unknown: Tensor) -> Tensor:
    """``value / mean``; 1.0 where unknown, and for 0 / 0, which is the only NaN that can come up."""
    return (value / mean).nan_to_num_(nan=1.0, posinf=float("inf")).masked_fill_(unknown, 1.0)


def gnmr(norm: Tensor, mean: Tensor, unknown: Tensor) -> Tensor:
    """The ratio of each norm to the mean of the unit's earlier ones, ``[U]`` float64, dimensionless (arXiv 2606.00539).

    Args:
        norm, mean: ``[U]`` float64, of the same measure.
        unknown: bool ``[U]``: no history, or no norm; the ratio is then 1.
    """
    return ratio(norm, mean, unknown)


def error(relative_error: Tensor, unknown: Tensor) -> Tensor:
    """The relative quantization error itself, ``[U]`` float64, dimensionless; 0 where none was measured."""
    return relative_error.masked_fill(unknown, 0.0)


def gap(relative_error: Tensor, norm: Tensor, unknown: Tensor) -> Tensor:
    """Estimated error of the whole gradient that each unit is the cause of, as a share of its norm: ``[U]`` float64.

    ``relative_error * norm / sqrt(sum of the squared norms)``; dimensionless.

    Args:
        relative_error, norm: ``[U]`` float64.
        unknown: bool ``[U]``: no error or no finite norm; the level is 0 and the unit is no part of the sum.
    """
    known = norm.masked_fill(unknown, 0.0)
    largest = known.max()
    if not largest > 0:
        return torch.zeros_like(known)
    scaled = known / largest
    # cumsum adds in one order, whatever the number of threads: ranks have to agree bit for bit.
    return relative_error.masked_fill(unknown, 0.0) * scaled / scaled.square().cumsum(0)[-1].sqrt()
