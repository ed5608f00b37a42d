"""What an output is off by when it leaves tokens out, given the mass that was left out.

With delta = p(D) the exact mass of the dropped tokens D, o' the renormalised output of the others and mu_D
the mean of the dropped values,

    o - o' = delta (mu_D - o') = sum_D p_t (v_t - o')

and the total variation between both weights is delta exactly. All norms are L2, in the unit of the values.
"""

import torch
from torch import Tensor


def dropped_bound(
    mass: Tensor, radius: Tensor, drift: Tensor, spectrum: Tensor | None = None, square: Tensor | None = None
) -> Tensor:
    """Return delta (max_D ||v - c0|| + ||c0 - o'||), or the spectral form where that is smaller.

    `mass` is delta, `radius` the largest ||v - c0|| over D, `drift` ||c0 - o'||; the spectral form is
    sqrt(lambda_V sum_D p^2) + delta ||c0 - o'|| with `spectrum` lambda_V and `square` the sum of squares.
    A theorem for the exact delta, an estimate for an estimated one.
    """
    bound = mass * (radius + drift)
    if spectrum is None or square is None:
        return bound
    return torch.minimum(bound, (spectrum * square).sqrt() + mass * drift)


def widest_bound(mass: Tensor, largest: Tensor) -> Tensor:
    """Return 2 V_max delta, the form of the RECAS paper; attained by two opposite values of norm V_max."""
    return 2 * largest * mass


def raw_bound(mass: Tensor, largest_dropped: Tensor) -> Tensor:
    """Return delta max_D ||v||, for an output that is not renormalised: there o - o' = delta mu_D."""
    return mass * largest_dropped
