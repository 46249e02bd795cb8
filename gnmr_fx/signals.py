"""What the controller watches: the level of each unit at a step, by formula. Pure functions over floats.

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

import math
from collections.abc import Sequence


def ratio(value: float, mean: float) -> float:
    """``value / mean``, both at least 0; for a mean of 0: 1.0 for a value of 0, else ``inf``."""
    if mean:
        return value / mean
    return math.inf if value else 1.0


def gnmr(norm: float, mean: float) -> float:
    """The ratio of a norm to the mean of the unit's earlier ones; dimensionless (arXiv 2606.00539)."""
    return ratio(norm, mean)


def gap(errors: Sequence[float], norms: Sequence[float], known: Sequence[bool]) -> list[float]:
    """Estimated error of the whole gradient that each unit is the cause of, as a share of its norm.

    ``error * norm / sqrt(sum of the squared norms)``; dimensionless.

    Args:
        errors: relative quantization error of each unit.
        norms: gradient norm of each unit.
        known: whether a unit has both, and a finite norm; else its level is 0 and it is no part of the sum.
    """
    heard = [norm if is_known else 0.0 for norm, is_known in zip(norms, known, strict=True)]
    largest = max(heard)
    if not largest > 0.0:
        return [0.0] * len(heard)
    shares = [norm / largest for norm in heard]  # so that no square overflows or vanishes
    whole = math.sqrt(math.fsum(share * share for share in shares))
    return [
        error * share / whole if is_known else 0.0 for error, share, is_known in zip(errors, shares, known, strict=True)
    ]
