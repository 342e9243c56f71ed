"""What to load, how long to wait and how much to recompute, by the formulas in loading.py.

The recompute ratio follows CacheBlend (arXiv 2405.16444 §5.1): r = max(r*, r_load), where r_load is
what a load hides.
"""

import itertools
import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sgl_blend.tuning.loading import (
    Chunk,
    Links,
    ModelTimes,
    Place,
    Prompt,
    Step,
    hiding_ratio,
    num_recomputed,
    seconds_of,
    step_seconds,
    steps_of,
)

MAX_RATIO = 0.5
"""More than half is never recomputed only because a load leaves time for it."""
_MAX_PASSES = 4
_PREFIXES = 16
"""How many are looked at: single chunks are tried afterwards."""
_MOST_EXCHANGED = 12
_MOST_ENUMERATED = 8
_MOST_GROUPS = 24
"""Longer lists are searched in about so many groups of chunks: the scheduler waits for the search."""
_MOST_VISITED = 4096
"""Chunks that the tries of single ones look at afterwards: a try looks at all of the prompt's."""
_RATIO_PRECISION = 0.002
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Ratios:
    """Between which ratios the recomputed share may lie; equal ones leave no choice."""

    floor: float
    most: float = MAX_RATIO


@dataclass(frozen=True, slots=True)
class Choice:
    """What the controller does with a prompt.

    Attributes:
        loaded: Indices of the chunks to load, ascending; those on the device are reused as well,
            all others are computed.
        ratio: Share of the reused tokens to recompute.
        stepwise: Whether prefill steps end before awaited chunks; else one step waits for all.
        seconds: Expected, for the whole prefill.
        compute_all_s: The same if nothing is loaded; never less than ``seconds``.
        wait_s: When the last awaited chunk is expected, from now on.
        patience_s: From then on it is better to compute what has not come from the store yet.
    """

    loaded: tuple[int, ...]
    ratio: float
    stepwise: bool
    seconds: float
    compute_all_s: float
    wait_s: float
    patience_s: float


def choose(prompt: Prompt, times: ModelTimes, links: Links, ratios: Ratios) -> Choice:
    """Choose the chunks to load so that the prefill is expected to end first.

    Of at most 8 chunks every set is looked at. More are sorted by seconds saved per second of loading.
    The best prefix of that list is taken, from either end, and improved by single chunks that come, go
    or change places. Of many chunks neighbours come or go together at first, so that the search takes
    milliseconds for any prompt. The result is never slower than loading nothing.

    Args:
        prompt: Chunks of the store count as text where ``links`` has no storage.
        times: Of the model.
        links: Their present speeds.
        ratios: The floor holds for all that is reused; above it lies what the load hides.
    """
    search = _Search(prompt, times, links, ratios.floor)
    none = search.plan(())
    best = _best_of_many(search) if len(prompt.chunks) > _MOST_GROUPS else search.best()
    given_up = search.plan(best.loaded - search.awaited(best.loaded))
    ratio, seconds = _raise_ratio(best, none.seconds, search, ratios)
    wait_s = search.steps(best)[-1].start_s
    return Choice(
        loaded=tuple(sorted(best.loaded)),
        ratio=ratio,
        stepwise=best.stepwise,
        seconds=seconds,
        compute_all_s=none.seconds,
        wait_s=wait_s,
        patience_s=wait_s + max(0.0, given_up.seconds - best.seconds) if wait_s else 0.0,
    )


@dataclass(frozen=True, slots=True)
class _Plan:
    """A set of chunks to load, whether its prefill is cut into steps, and when it ends."""

    loaded: frozenset[int]
    stepwise: bool
    seconds: float


class _Search:
    """Looks for the best set of chunks at a fixed ratio."""

    def __init__(self, prompt: Prompt, times: ModelTimes, links: Links, ratio: float) -> None:
        self.prompt, self.times, self.links, self.ratio = prompt, times, links, ratio
        chunks = prompt.chunks
        self._tokens = [chunk.num_tokens for chunk in chunks]
        self._exact = {index: c.num_tokens for index, c in enumerate(chunks) if c.is_exact}
        self._total = prompt.num_plain + sum(self._tokens)
        on_device = [index for index, c in enumerate(chunks) if c.place is Place.DEVICE]
        self._on_device, self._exact_there = self._reused(on_device)
        self._fetch_s = {
            index: links.storage.seconds(chunk.num_stored_bytes)
            for index, chunk in enumerate(chunks)
            if chunk.place is Place.STORAGE and links.storage is not None
        }
        found = [
            *(i for i, chunk in enumerate(chunks) if chunk.place is Place.HOST),
            *self._fetch_s,
        ]
        gain = {index: self._gain(index) for index in sorted(found)}
        self.loadable = sorted(gain, key=lambda index: -gain[index])

    def awaited(self, loaded: frozenset[int]) -> frozenset[int]:
        """Return those chunks of a set that come from the store."""
        return loaded & self._fetch_s.keys()

    def steps(self, plan: _Plan) -> list[Step]:
        """Return the steps of a plan."""
        return steps_of(self.prompt, plan.loaded, self.links, stepwise=plan.stepwise)

    def plan(self, loaded: Collection[int], less_than_s: float = math.inf) -> _Plan:
        """Return the faster way to prefill with these chunks loaded.

        Args:
            loaded: Indices of chunks.
            less_than_s: A plan that takes longer may be said to take longer than it does.
        """
        fetches = [self._fetch_s[index] for index in loaded if index in self._fetch_s]
        arrived = self.links.storage_queue_s + sum(fetches) if fetches else 0.0
        brought, exact = self._reused(loaded)
        exact += self._exact_there
        there = self._on_device + brought
        whole = Step(self._total - there, there - exact, brought)
        work_s = step_seconds(whole, self.ratio, self.times, self.links.host)
        seconds = arrived + work_s
        plan = _Plan(frozenset(loaded), False, seconds)
        # Steps neither end before the last chunk is there, nor take less work together than one.
        if not fetches or max(arrived, work_s) >= less_than_s:
            return plan
        steps = steps_of(self.prompt, plan.loaded, self.links, stepwise=True)
        stepwise_s = seconds_of(steps, self.ratio, self.times, self.links.host)
        return _Plan(plan.loaded, True, stepwise_s) if stepwise_s < seconds else plan

    def _reused(self, indices: Collection[int]) -> tuple[int, int]:
        """Return how many tokens some chunks have, and how many of them are exact."""
        exact = self._exact
        return (
            sum([self._tokens[index] for index in indices]),
            sum([exact[index] for index in exact if index in indices]),
        )

    def _gain(self, index: int) -> float:
        """Return the seconds that a chunk alone saves for each second of its loading."""
        num_tokens, times = self._tokens[index], self.times
        recomputed = num_recomputed(self.ratio, num_tokens - self._exact.get(index, 0))
        kept = self._total - num_tokens + recomputed
        saved = times.layer_s(self._total) - times.layer_s(kept)
        loading = self.links.host.seconds(num_tokens * times.kv_bytes * times.num_layers)
        return saved / (loading + self._fetch_s.get(index, 0.0))

    def best(self) -> _Plan:
        """Return the best plan found: of all sets where they are few."""
        best = self._best_prefix()
        if len(self.loadable) > _MOST_ENUMERATED:
            return self._improve(best)
        for size in range(1, len(self.loadable) + 1):
            for loaded in itertools.combinations(self.loadable, size):
                best = self._better(best, loaded)
        return best

    def _best_prefix(self) -> _Plan:
        """Return the best plan among prefixes of the sorted chunks, from either end.

        The other end counts where a large chunk gains most, but takes longer than what it hides behind.
        """
        size = len(self.loadable)
        lengths = {*range(0, size, max(1, size // _PREFIXES)), size}
        orders = (self.loadable, self.loadable[::-1])
        plans = [self.plan(order[:length]) for length in sorted(lengths) for order in orders]
        return min(plans, key=lambda plan: plan.seconds)

    def _improve(self, best: _Plan) -> _Plan:
        """Let chunks come and go one by one, or one for another, while the prefill gets shorter.

        Exchanges are left out of long lists: there single chunks come close enough.
        """
        for _ in range(_MAX_PASSES):
            before = best
            for index in self.loadable:
                best = self._better(best, best.loaded ^ {index})
            if len(self.loadable) <= _MOST_EXCHANGED:
                for one, other in itertools.combinations(self.loadable, 2):
                    best = self._better(best, best.loaded ^ {one, other})
            if best is before:
                break
        return best

    def improve_once(self, best: _Plan, num_tries: int) -> _Plan:
        """Let at most so many single chunks, from all over the list, come or go."""
        for index in self.loadable[:: 1 + len(self.loadable) // num_tries]:
            best = self._better(best, best.loaded ^ {index})
        return best

    def _better(self, best: _Plan, loaded: Collection[int]) -> _Plan:
        plan = self.plan(loaded, best.seconds)
        return plan if plan.seconds < best.seconds else best


def _best_of_many(search: _Search) -> _Plan:
    """Return the best plan found among those in which chunks of a group come or go together.

    Afterwards single ones are tried, as many as there is time for.
    """
    chunks, links = search.prompt.chunks, search.links
    groups = _groups_of(chunks)
    together = tuple(_as_one([chunks[index] for index in group], links) for group in groups)
    prompt = Prompt(together, search.prompt.num_plain)
    grouped = _Search(prompt, search.times, links, search.ratio).best()
    members = [index for number in grouped.loaded for index in groups[number]]
    best = min(search.plan(()), search.plan(members), key=lambda plan: plan.seconds)
    return search.improve_once(best, max(1, _MOST_VISITED // len(chunks)))


def _groups_of(chunks: Sequence[Chunk]) -> list[list[int]]:
    """Part chunks into about equal groups of one kind each, in the order of their last chunks."""
    least = sum(chunk.num_tokens for chunk in chunks) / _MOST_GROUPS
    groups: list[list[int]] = []
    begun: dict[tuple[Place, bool], list[int]] = {}
    num_tokens: Counter[tuple[Place, bool]] = Counter()
    for index, chunk in enumerate(chunks):
        kind = chunk.place, chunk.is_exact
        begun.setdefault(kind, []).append(index)
        num_tokens[kind] += chunk.num_tokens
        if num_tokens[kind] >= least:
            groups.append(begun.pop(kind))
            num_tokens[kind] = 0
    return sorted([*groups, *begun.values()], key=lambda group: group[-1])


def _as_one(chunks: Sequence[Chunk], links: Links) -> Chunk:
    """Return a chunk that takes as long to load as some of one kind do together."""
    place = chunks[0].place
    num_bytes = sum(chunk.num_stored_bytes for chunk in chunks)
    if place is Place.STORAGE and links.storage is not None:
        num_bytes += int((len(chunks) - 1) * links.storage.latency_s * links.storage.bytes_per_s)
    num_tokens = sum(chunk.num_tokens for chunk in chunks)
    return Chunk(num_tokens, place, num_bytes, chunks[0].is_exact)


def _raise_ratio(
    plan: _Plan, compute_all_s: float, search: _Search, ratios: Ratios
) -> tuple[float, float]:
    """Return the ratio that the load hides, and when the prefill ends with it.

    r = max(r*, r_load), at most ``ratios.most``, and only as far as the last layer starts no later
    than at the floor. So the formula alone does not decide where the layers up to the check layer
    outlast the load. A store hides nothing: the last step begins when all its chunks are there.
    """
    times, host = search.times, search.links.host
    steps = search.steps(plan)
    whole = Step(
        sum(step.num_computed for step in steps),
        sum(step.num_reused for step in steps),
        sum(step.num_loaded for step in steps),
    )
    layer_load_s = whole.num_loaded * times.kv_bytes / host.bytes_per_s
    hidden = min(ratios.most, hiding_ratio(whole, times, layer_load_s))
    last = steps[-1]

    def seconds(ratio: float) -> float:
        return seconds_of(steps, ratio, times, host)

    def last_layer_starts(ratio: float) -> float:
        rows = num_recomputed(ratio, last.num_reused) + last.num_computed
        return seconds(ratio) - times.layer_s(rows)

    latest_s = last_layer_starts(ratios.floor) * (1 + _ROUNDING)

    def hides(ratio: float) -> bool:
        return last_layer_starts(ratio) <= latest_s and seconds(ratio) <= compute_all_s

    low, high = ratios.floor, max(ratios.floor, hidden)
    if hides(high):
        return high, seconds(high)
    while high - low > _RATIO_PRECISION:
        middle = (low + high) / 2
        low, high = (middle, high) if hides(middle) else (low, middle)
    return low, seconds(low)
