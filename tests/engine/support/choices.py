"""How long a policy may leave the rows of a request: alike, at random, or all it has to give to a few of them.

Nothing is scored. Scores decide which rows get how much of a budget, so instead of scores a request has rows that take
all they can get before the others do. What they can get is left to the policies' own arithmetic.
"""

import zlib
from collections.abc import Sequence

import numpy as np

from vllm_kvevict.policies import EvictionConfig, layer_budgets
from vllm_kvevict.policies.budgets import guaranteed_tokens, provisional_layer_budgets, safeguard
from vllm_kvevict.policies.registry import lookup
from vllm_kvevict.policies.sinks import num_sinks
from vllm_kvevict.schedules.base import RankCapacity
from vllm_kvevict.schedules.plan import Admission, Phase

GREEDS = ("none", "random", "rank", "layer", "head", "row")
"""What takes all it can get: nothing; a random share; a rank (under pipeline parallelism a stage's); a layer; a head of
all layers; in each layer a head of its own."""


class Choices:
    """What the workers choose. A request's admissions all choose alike, as on real workers.

    Args:
        ranks: all of them.
        replicas: how many ranks in a row hold the same KV heads.
        seed: of everything random.
        greeds: of :data:`GREEDS`, those that a request may have.
    """

    def __init__(
        self, ranks: Sequence[RankCapacity], replicas: int = 1, seed: int = 0, greeds: Sequence[str] = GREEDS
    ):
        self.ranks = ranks
        self.replicas = replicas
        self.seed = seed
        self.greeds = greeds
        self.num_layers = ranks[0].num_model_layers
        self.num_heads = max(sum(self._heads(layer)) for layer in range(self.num_layers))

    def weights(self, request_id: str) -> list[float]:
        """What the layers are worth where they share a budget by weight."""
        greed, order = self._greed(request_id)
        random = self._random(request_id, "weights")
        if greed in ("rank", "layer"):
            return [1.0 if row.min() < 0 else 1e-9 for row in order]
        shape = 100.0 if greed in ("none", "head") else 0.3
        return list(random.gamma(shape, size=self.num_layers) + 1e-9)

    def lengths(
        self, admission: Admission, budgets: Sequence[int] | None = None, part: Phase | None = None
    ) -> list[np.ndarray]:
        """Entries that each rank's rows keep of a part of a prompt when that is evicted last, [layers, KV heads].

        Args:
            part: None for the first, which is the only one of most prompts.
            budgets: candidates per KV head of the model's layers, or of the first of them; None: what the policy
                gives them.
        """
        part = part or admission.plan.prompt
        assert part is not None
        n, config = part.n, part.config
        always = config.window_for(n) + num_sinks(config, n)
        if budgets is None:
            budgets = self._budgets(admission.request_id, config, n)
        counts = [always + row for row in self._candidates(admission.request_id, config, n - always, budgets)]
        return self._by_rank(counts)

    def provisional(self, admission: Admission, seen: int) -> list[np.ndarray]:
        """The same of the model's first layers, while the weights of the others are not known."""
        n, config = admission.plan.prompt.end, admission.plan.config
        assert n is not None
        window, weights = config.window_for(n), self.weights(admission.request_id)[:seen]
        most = config.budget_for(n) - window
        return self.lengths(admission, provisional_layer_budgets(weights, most, n - window, self.num_layers))

    def _budgets(self, request_id: str, config: EvictionConfig, n: int) -> list[int]:
        """Candidates per KV head of each layer."""
        if lookup(config.policy).schedule == "by weight":
            return layer_budgets(config, self.weights(request_id), n)
        always = config.window_for(n) + num_sinks(config, n)
        return [budget - always for budget in config.layer_budgets(n, self.num_layers)]

    def _candidates(
        self, request_id: str, config: EvictionConfig, m: int, budgets: Sequence[int]
    ) -> list[np.ndarray]:
        """How many of its m candidates each KV head of the layers keeps."""
        greed, order = self._greed(request_id)
        random = self._random(request_id, "heads")
        sizes = [self._heads(layer) for layer in range(len(budgets))]

        def share(total: int, order: np.ndarray, most: int) -> np.ndarray:
            if greed == "none":
                return even(total, order.size)
            if greed == "random":
                return split(total, order.size, most, random)
            return fill(total, order, most)

        if lookup(config.policy).schedule in ("by score", "by repeat"):
            rows = np.concatenate([order[layer, : sum(heads)] for layer, heads in enumerate(sizes)])
            together = share(len(rows) * budgets[0], rows, m)
            return np.split(together, np.cumsum([sum(heads) for heads in sizes])[:-1])
        counts = []
        for layer, (budget, heads) in enumerate(zip(budgets, sizes, strict=True)):
            if not config.heads_compete:
                counts.append(np.full(sum(heads), budget))
                continue
            counts.append(_compete(config, budget, m, order[layer, : sum(heads)], share))
        return counts

    def _by_rank(self, counts: Sequence[np.ndarray]) -> list[np.ndarray]:
        """From the heads of each layer to the rows of each rank; nothing for layers that are not there."""
        parts = [np.zeros((rank.num_layers, rank.num_kv_heads), dtype=np.int64) for rank in self.ranks]
        for layer, heads in enumerate(counts):
            sizes = self._heads(layer)
            shares = np.split(heads, np.cumsum(sizes)[:-1])
            for index, rank in enumerate(self._owners(layer)):
                parts[rank][layer - self.ranks[rank].first_layer] = shares[index // self.replicas]
        return parts

    def _owners(self, layer: int) -> list[int]:
        """The ranks that have a layer."""
        return [
            index
            for index, rank in enumerate(self.ranks)
            if rank.first_layer <= layer < rank.first_layer + rank.num_layers
        ]

    def _heads(self, layer: int) -> list[int]:
        """How many KV heads of a layer each of its ranks has, replicas left out."""
        return [self.ranks[rank].num_kv_heads for rank in self._owners(layer)[:: self.replicas]]

    def _greed(self, request_id: str) -> tuple[str, np.ndarray]:
        """What takes all it can get, and [layers, KV heads] the order in which rows do; what takes it is below 0."""
        random = self._random(request_id, "greed")
        greed = str(random.choice(list(self.greeds)))
        order = random.random((self.num_layers, self.num_heads))
        if greed == "layer":
            order[random.integers(self.num_layers)] -= 1
        elif greed == "head":
            order[:, random.integers(self.num_heads)] -= 1
        elif greed == "rank":
            chosen = int(random.integers(len(self.ranks)))
            for layer in range(self.num_layers):
                owners = self._owners(layer)
                if chosen in owners:
                    group = owners.index(chosen) // self.replicas
                    first = sum(self._heads(layer)[:group])
                    order[layer, first : first + self.ranks[chosen].num_kv_heads] -= 1
        return greed, order

    def _random(self, request_id: str, purpose: str) -> np.random.Generator:
        # What one document keeps does not depend on the question: "document: question".
        document = request_id.split(":")[0]
        return np.random.default_rng([self.seed, zlib.crc32(f"{purpose} {document}".encode())])


def _compete(config: EvictionConfig, budget: int, m: int, order: np.ndarray, share) -> np.ndarray:
    """Candidates of heads that share ``budget`` per head, with what the policy guarantees each of them."""
    alpha = config.params.get("alpha", 0.0)
    if config.params.get("ada_safeguard") == "guarantee":
        own = guaranteed_tokens(alpha, budget)
        return own + share(order.size * (budget - own), order, m - own)
    counts = share(order.size * budget, order, m)
    return np.array(safeguard(counts.tolist(), budget, alpha))


def even(total: int, rows: int) -> np.ndarray:
    """Share ``total`` out among rows alike."""
    return np.full(rows, total // rows) + (np.arange(rows) < total % rows)


def fill(total: int, order: np.ndarray, longest: int) -> np.ndarray:
    """Give the lowest of ``order`` all it can take of ``total``, then the next."""
    counts = np.zeros(order.size, dtype=np.int64)
    for row in np.argsort(order, kind="stable"):
        counts[row] = min(longest, total)
        total -= counts[row]
    return counts


def split(total: int, rows: int, longest: int, random: np.random.Generator) -> np.ndarray:
    """Share ``total`` out among rows at random, anything between even and very uneven.

    Returns:
        [rows] int64 that sum to ``total``, each at most ``longest``.
    """
    weights = random.gamma(random.choice([0.1, 1.0, 100.0]), size=rows) + 1e-9
    if random.random() < 0.3:
        weights = np.sort(weights)  # whole ranks get less than others
    counts = np.minimum((weights / weights.sum() * total).astype(np.int64), longest)
    while (missing := total - int(counts.sum())) > 0:
        room = np.flatnonzero(counts < longest)
        extra = np.minimum(longest - counts[room], max(1, missing // len(room)))
        counts[room] += extra * (np.cumsum(extra) <= missing)
    return counts
