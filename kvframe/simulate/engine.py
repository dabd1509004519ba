"""A plain engine around the block manager, on no device: it admits, decodes, preempts and finishes requests.

Time is counted, not spent. A round gives every running request a piece of its prompt, or up to `quantum` tokens of its
output, in one call of the manager; then it admits waiting requests, first come first served. So a decoding request that
opens a block every 16 tokens is looked at once in that time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from kvframe.blocks import (
    Admission,
    BlockConfig,
    BlockRequest,
    Deferred,
    KVCacheManager,
    Refused,
    StepResult,
    chunk_stops,
)
from kvframe.checks import at_least
from kvframe.simulate.counts import Counts
from kvframe.simulate.meter import Meter
from kvframe.simulate.streams import Arrival, Tokens


@attrs.frozen(kw_only=True)
class Pace:
    """How fast the simulated engine is, and how finely it is looked at.

    Args:
        token_seconds: time of one decode step.
        prefill_rate: prompt tokens a second.
        quantum: tokens that a request decodes between two looks at the queue.
        chunk: most prompt tokens of one request in a round.
        ramp: until the first refusal the running requests grow by at most this share a round (and by one), where the
            stream has no arrival times of its own: so that the pool fills under churn, not at one blow.
    """

    token_seconds: float = 0.02
    prefill_rate: float = 20_000.0
    quantum: int = attrs.field(default=64, validator=at_least(1))
    chunk: int = attrs.field(default=8192, validator=at_least(1))
    ramp: float = 0.02


@attrs.define(kw_only=True)
class _Run:
    """A request under way, or waiting to go on after it was preempted."""

    arrival: Arrival
    request: BlockRequest
    output: Sequence[int]
    known: int  # tokens that it has when it is admitted: the prompt, and what it said before it was preempted
    resumed: bool = False


class Engine:
    """Runs one stream through one manager.

    Args:
        manager: fresh.
        arrivals: the requests, in order of arrival.
        pace: the engine's speed.
        meter: measures what the pool holds.
        progress: called with the requests done, now and then.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        arrivals: Sequence[Arrival],
        pace: Pace,
        meter: Meter,
        progress: Callable[[int], None] = lambda done: None,
    ) -> None:
        self.manager, self.pace, self.counts = manager, pace, Counts()
        self._config: BlockConfig = manager.config
        self._meter, self._progress = meter, progress
        self._coming = deque(arrivals)
        self._waiting: deque[Arrival | _Run] = deque()
        self._running: dict[int, _Run] = {}  # by slot, in order of admission
        self._tokens = Tokens()
        rows = self._config.max_requests
        self._computed = np.zeros(rows, np.int32)
        self._prompt = np.zeros(rows, np.int32)  # tokens after which a request decodes
        self._target = np.zeros(rows, np.int32)
        self._limit = 1.0
        self._ramping = bool(pace.ramp) and all(arrival.arrival == 0 for arrival in arrivals)
        self._stops = any(self._config.groups[g].lifetime.state for g in self._config.keyed)
        self._now = 0.0

    def run(self) -> Counts:
        """All requests, to the end of the last."""
        while self._coming or self._waiting or self._running:
            self._arrive()
            alive = len(self._running)
            stepped = self._step()
            self.counts.note_round(alive, stepped)
            prefilled = self._admit()
            self._work()
            self.counts.note_round(len(self._running), prefilled)
            self._now += stepped + prefilled
        self.counts.seconds = self._now
        return self.counts

    def _work(self) -> None:
        """The worker copies and zeroes, in one of a round's many steps; until then what is on its lists is held."""
        if self.manager.has_copies:
            self.manager.take_copies()
        self.manager.take_fresh()

    # --- the queue ---

    def _arrive(self) -> None:
        if self._coming and not self._waiting and not self._running:
            self._now = max(self._now, self._coming[0].arrival)
        while self._coming and self._coming[0].arrival <= self._now:
            arrival = self._coming.popleft()
            if arrival.tokens > self._config.max_model_len:
                self.counts.too_long += 1
                self._done()
            else:
                self._waiting.append(arrival)

    def _admit(self) -> float:
        """Admit from the front until one is refused. Returns the seconds that their first chunks take."""
        later: list[_Run] = []
        prefilled = 0
        while self._waiting and not (self._ramping and len(self._running) >= self._limit):
            self._work()
            run = self._prepare(self._waiting[0])
            hit = self.manager.lookup(run.request)
            size = max(1, self._chunk(hit.tokens, run.known, hit.junction))
            asked = Admission(request=run.request, num_new_tokens=size, hit=hit)
            (answer,) = self.manager.admit([asked], busy=bool(self._running))
            if isinstance(answer, Deferred) and answer.reason != "no_slot":
                self._waiting.popleft()
                later.append(run)
                continue
            if not isinstance(answer, (Refused, Deferred)):
                self._waiting.popleft()
                self._start(run, answer.slot, hit.tokens, size)
                prefilled += size
                continue
            self._waiting[0] = run
            if isinstance(answer, Refused):
                self._refused()
                if not self._running and not later:
                    self._waiting.popleft()
                    self.counts.unservable += 1
                    self._done()
                    continue
            break
        self._waiting.extendleft(reversed(later))
        self._limit = max(self._limit + 1, self._limit * (1 + self.pace.ramp))
        return prefilled / self.pace.prefill_rate

    def _prepare(self, waiting: Arrival | _Run) -> _Run:
        if isinstance(waiting, _Run):
            return waiting
        prompt: npt.NDArray[np.int32] | range = range(waiting.prompt)
        output: Sequence[int] = range(waiting.output)
        if self._config.prefix_caching:  # else tokens are only counted
            prompt, said = self._tokens.of(waiting)
            output = said.tolist()
        request = self.manager.request(prompt)
        return _Run(arrival=waiting, request=request, output=output, known=waiting.prompt)

    def _start(self, run: _Run, slot: int, hit: int, size: int) -> None:
        self._running[slot] = run
        self._computed[slot] = hit + size
        # The last token is never computed: its key and value are read by nobody.
        self._target[slot] = run.arrival.tokens - 1
        self._prompt[slot] = min(run.known, run.arrival.tokens - 1)
        if run.resumed:
            self.counts.recomputed_tokens += max(0, run.known - hit)
        else:
            # All that it will say is told at once: nothing is keyed before it is computed.
            self.manager.append([slot], [run.output])
            self.counts.prompt_tokens += run.arrival.prompt
            self.counts.hit_tokens += hit

    def _chunk(self, start: int, prompt: int, junction: int = 0) -> int:
        """Tokens of the prompt's next piece, from `start` on."""
        stop = min(prompt, start + self.pace.chunk)
        if self._stops:
            stop = chunk_stops(self._config, start, stop, prompt, junction)
        return stop - start

    # --- a round ---

    def _step(self) -> float:
        """Every running request goes on. Returns the seconds that it takes."""
        if not self._running:
            return 0.0
        rows = max(self._running) + 1
        computed, prompt = self._computed[:rows], self._prompt[:rows]
        new = np.minimum(self._target[:rows] - computed, self.pace.quantum)
        prefilling = (computed < prompt).nonzero()[0].tolist()
        prefilled = 0
        for slot in prefilling:
            junction = self._running[slot].request.junction
            new[slot] = self._chunk(int(computed[slot]), int(prompt[slot]), junction)
            prefilled += int(new[slot])
        decoding = np.delete(new, prefilling) if prefilling else new
        longest = int(decoding.max()) if decoding.size else 0
        # What ends in this round goes first: on average it gives its blocks back before the others have grown.
        ends = computed + new >= self._target[:rows]
        self._go_on(rows, np.where(ends, new, 0))
        self._finish()
        self._go_on(rows, np.where(ends, 0, new))
        return longest * self.pace.token_seconds + prefilled / self.pace.prefill_rate

    def _go_on(self, rows: int, new: npt.NDArray[np.int32]) -> None:
        """Give rows room for their next tokens; preempt the youngest requests until there is room."""
        if not new.any():
            return
        self._work()
        result = self.manager.step(rows, new)
        stuck = _slots(result)
        if stuck:
            self._refused()
        while stuck:
            stuck = self._make_room(stuck, new)
        self._computed[:rows] += new

    def _make_room(self, stuck: list[int], new: npt.NDArray[np.int32]) -> list[int]:
        """Preempt the youngest request, then ask again for those that were refused."""
        victim = next(reversed(self._running))
        run = self._running.pop(victim)
        if not self._running:
            self.manager.release([victim])
            self.counts.unservable += 1
            self._done()
        else:
            (run.request,) = self.manager.preempt([victim])
            run.known, run.resumed = max(run.known, int(self._computed[victim]) + 1), True
            self._waiting.appendleft(run)
            self.counts.preemptions += 1
        self._computed[victim] = self._prompt[victim] = self._target[victim] = new[victim] = 0
        left = [slot for slot in stuck if slot != victim]
        again = self.manager.step(left, new[left], starts=False)
        return _slots(again)

    def _refused(self) -> None:
        self._ramping = False
        self.counts.note_refusal(self._meter, self.manager, self._now, len(self._running))

    def _finish(self) -> None:
        done = ((self._computed >= self._target) & (self._target > 0)).nonzero()[0].tolist()
        if not done:
            return
        self.manager.release(done)
        for slot in done:
            run = self._running.pop(slot)
            self.counts.output_tokens += run.arrival.output
            self.counts.finished += 1
        self._computed[done] = self._prompt[done] = self._target[done] = 0
        self._done()

    def _done(self) -> None:
        counts = self.counts
        self._progress(counts.finished + counts.too_long + counts.unservable)


def _slots(result: StepResult) -> list[int]:
    return [answer.slot for answer in result.refused if answer.slot is not None]
