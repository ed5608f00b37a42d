"""How much a cached token is worth: three signals in [0, 1] and their weighted sum.

Signals after the RECAS paper, whose text gives no formulas for them; the definitions here are rcq's own:

    util = alpha * tr + beta * hi + gamma * g

tr says how well the present query matches the key, hi how much attention the token has received, g whether
later stages of the text came back to it. Tensors are `[..., n]` over tokens; leading dimensions are heads.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

DECAY = 1 - 1 / 64
"""lambda of the accumulated attention, per decode step."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of the three signals, none negative."""

    alpha: float = 0.45
    beta: float = 0.35
    gamma: float = 1.0

    def lexicographic(self) -> "Weights":
        """Return weights under which every linked token outranks every unlinked one.

        gamma >= 2 (alpha + beta) and g >= 1/2 give gamma g >= alpha + beta >= alpha tr + beta hi.
        """
        return Weights(self.alpha, self.beta, max(self.gamma, 2 * (self.alpha + self.beta)))


def standard_scores(scores: Tensor) -> Tensor:
    """Return (score - mean) / sd over the last dimension; 0 for scores that do not differ."""
    centred = scores - scores.mean(-1, keepdim=True)
    deviation = centred.square().mean(-1, keepdim=True).sqrt()
    return centred / deviation.clamp_min(1e-6)


def compatibility(scores: Tensor) -> Tensor:
    """Return tr, the logistic function of the standard scores of q . k, averaged over a query group.

    Shift and scale of the scores cancel, so heads are comparable; constant scores give 1/2.
    """
    return torch.sigmoid(standard_scores(scores))


def accumulate(history: Tensor, attention: Tensor, decay: float = DECAY) -> Tensor:
    """Return H <- lambda H + (1 - lambda) a for the attention `a` of one step, 0 where a token was not read.

    Several steps at once: `attention` `[..., steps, n]` in order of time, `history` `[..., n]`.
    """
    if attention.ndim == history.ndim:
        return decay * history + (1 - decay) * attention
    steps = attention.shape[-2]
    ages = torch.arange(steps - 1, -1, -1, dtype=attention.dtype, device=attention.device)
    weights = (1 - decay) * torch.exp(ages * math.log(decay))
    return decay**steps * history + weights @ attention


def mean_attention(history: Tensor, age: Tensor, decay: float = DECAY) -> Tensor:
    """Return H / (1 - lambda^age): a weighted mean over the `age` >= 1 steps a token has been there.

    The divisor is formed by expm1, since lambda^age is close to 1 for young tokens.
    """
    return history / -torch.expm1(age * math.log(decay))


def heavy_hitter(mean: Tensor, tokens: int) -> Tensor:
    """Return hi = z / (1 + z), z = sqrt(n * mean), from mean attention: 1/2 for the uniform share 1 / n."""
    z = (tokens * mean).sqrt()
    return z / (1 + z)


def stage_evidence(links: Tensor) -> Tensor:
    """Return g = 1 - 2^-c from the number of stages that came back to each token's unit."""
    return 1 - torch.exp2(-links)


def utility(tr: Tensor, hi: Tensor, g: Tensor, weights: Weights) -> Tensor:
    """Return alpha tr + beta hi + gamma g."""
    return weights.alpha * tr + weights.beta * hi + weights.gamma * g
