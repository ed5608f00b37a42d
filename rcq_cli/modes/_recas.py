"""What both modes of RECAS share: options, and what is known of each token of a layer."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rcq_cli.cache.statistics import Statistics
from rcq_cli.certify.exact import as_groups
from rcq_cli.modes._budget import BudgetOptions
from rcq_cli.modes._tiered import check_range
from rcq_cli.recas import selector, utility
from rcq_cli.recas.stages import StageTracker

EVICT_EVERY = 64
"""Steps between two evictions, unless a stage ends or the budget changes."""
PROMPT_ROWS = 128
"""Last rows of the prompt whose attention counts as history."""
DEFAULT_FRACTION = 0.345


@dataclass(frozen=True)  # no slots: it stands beside a second base that has them
class SelectionOptions:
    """Utility and selection, the same in both modes and in task recas-traces."""

    alpha: float = 0.45
    """weight of query-key compatibility in a token's utility"""
    beta: float = 0.35
    """weight of accumulated attention"""
    gamma: float = 1.0
    """weight of stage evidence: whether later stages of the text came back to the token"""
    lexicographic: bool = False
    """raise gamma so that every linked token outranks every unlinked one"""
    window: int = 128
    """newest tokens that are always kept and read, beside the first four"""
    active_loss: float = 0.004
    """share of the kept mass that may be left unread"""
    active_utility: float = 0.5
    """weight of utility in the choice of what is read"""
    retain_loss: float = 0.0026
    """share of the mass that eviction may lose where masses are known (task recas-traces)"""

    def __post_init__(self) -> None:
        for name in ("alpha", "beta", "gamma", "active_utility"):
            check_range(name, getattr(self, name), 0.0, 1e6)
        check_range("window", self.window, 1, 2**20)
        check_range("active_loss", self.active_loss, 0.0, 1.0)
        check_range("retain_loss", self.retain_loss, 0.0, 1.0)

    def weights(self) -> utility.Weights:
        """Return the weights of the three signals."""
        weights = utility.Weights(self.alpha, self.beta, self.gamma)
        return weights.lexicographic() if self.lexicographic else weights

    @property
    def minimum(self) -> int:
        """Return the fewest tokens: sinks, window and one more."""
        return selector.SINKS + self.window + 1


@dataclass(frozen=True, slots=True)
class RecasOptions(BudgetOptions, SelectionOptions):
    """Options of the modes of RECAS; without a budget 34.5 % of the prompt are kept."""

    def __post_init__(self) -> None:
        BudgetOptions.__post_init__(self)
        SelectionOptions.__post_init__(self)
        self.check(self.minimum)

    def budget(self, prompt: int, token_bytes: int) -> int:
        """Return the tokens to keep of a prompt of `prompt` tokens."""
        given = self.tokens(prompt, token_bytes, self.minimum, 1)
        return max(self.minimum, round(DEFAULT_FRACTION * prompt)) if given is None else given


class TokenHistory:
    """Accumulated attention and age of every token of a layer, float32 `[Hkv, T]`."""

    def __init__(self, heads: int) -> None:
        self.attention = torch.zeros(heads, 0)
        self.born = torch.zeros(0)
        self.steps = 0

    def grow(self, count: int) -> None:
        """Make room for `count` new tokens."""
        heads = self.attention.shape[0]
        self.attention = torch.cat((self.attention, torch.zeros(heads, count)), 1)
        self.born = torch.cat((self.born, torch.full((count,), float(self.steps))))

    def start(self, seen: Statistics, keys: Tensor) -> None:
        """Take the last rows of the prompt as the first steps."""
        rows = seen.last(keys, PROMPT_ROWS)
        self.attention = utility.accumulate(torch.zeros_like(self.attention), rows)
        count, tokens = rows.shape[1], rows.shape[2]
        # a row sees itself and what came before: older tokens were there for every row
        self.born = (torch.arange(tokens) - (tokens - count)).clamp_min(0).float()
        self.steps = count

    def signal(self, index: Tensor, tokens: int) -> Tensor:
        """Return hi of the tokens `[Hkv, n]`, of which `tokens` share the attention."""
        age = (self.steps - self.born[index]).clamp_min(1)
        mean = utility.mean_attention(self.attention.gather(1, index), age)
        return utility.heavy_hitter(mean, tokens)

    def add(self, index: Tensor, attention: Tensor) -> None:
        """Take the attention `[Hkv, n]` of one step on the tokens `index`; others keep what they have."""
        held = self.attention.gather(1, index)
        self.attention = self.attention.scatter(1, index, utility.accumulate(held, attention.float()))
        self.steps += 1

    def add_to_all(self, attention: Tensor) -> None:
        """Take the attention `[Hkv, T]` of one step on every token."""
        self.attention = utility.accumulate(self.attention, attention.float())
        self.steps += 1

    def fork(self) -> "TokenHistory":
        """Return a copy; tensors are replaced, never rewritten."""
        twin = TokenHistory(0)
        twin.attention, twin.born, twin.steps = self.attention, self.born, self.steps
        return twin

    @property
    def nbytes(self) -> int:
        """Return the bytes held."""
        return self.attention.nbytes + self.born.nbytes


def static_scores(
    history: TokenHistory, seen: Statistics, keys: Tensor, weights: utility.Weights, links: Tensor
) -> Tensor:
    """Return the utility of every token at the end of a prompt, float64 `[Hkv, T]`; starts `history`.

    The newest query is the present one, the last rows are the first steps; `links` is g, `[Hkv, T]`. The
    first eviction of every mode of RECAS goes by it, and the only one of `topscore`.
    """
    history.start(seen, keys)
    query = as_groups(seen.queries[:, -1], keys.shape[0])
    scores = (query @ keys.double().transpose(1, 2)).mean(1) * seen.scale
    index = torch.arange(keys.shape[1], device=keys.device).expand(keys.shape[0], -1)
    hits = history.signal(index, keys.shape[1]).double()
    return utility.utility(utility.compatibility(scores), hits, links.double(), weights)


def stage_signal(stages: StageTracker | None, index: Tensor) -> Tensor:
    """Return g of the tokens `[Hkv, n]`; 0 where no token ids are known."""
    if stages is None or not stages.tokens:
        return torch.zeros(index.shape)
    links = torch.from_numpy(stages.links()).float()
    if len(links) < int(index.max()) + 1:  # the newest token is read after its attention
        links = torch.cat((links, links.new_zeros(int(index.max()) + 1 - len(links))))
    return utility.stage_evidence(links)[index]
