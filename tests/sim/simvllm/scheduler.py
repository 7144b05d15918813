"""A tiny model of vLLM's scheduler: chunked prefill, paged KV blocks, preemption. Pure."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    # (job, number of tokens generated so far, finish reason or None)
    Output = tuple[int, int, str | None]
    # outputs, jobs scheduled first, prompt tokens, all tokens, iterations,
    # running, waiting, blocks in use, preemptions so far
    Step = tuple[list[Output], list[int], int, int, int, int, int, int, int]


class Job:
    """One request inside the engine."""

    __slots__ = ("blocks", "cached", "computed", "eos", "generated", "id", "limit", "prompt")

    def __init__(self, number: int, prompt: int, cached: int, limit: int, eos: int) -> None:
        self.id = number
        self.prompt = prompt
        self.cached = cached
        self.limit = limit
        self.eos = eos
        self.computed = 0
        self.generated = 0
        self.blocks = 0

    @property
    def left(self) -> int:
        """Tokens to compute before the next token comes out."""
        return self.prompt + self.generated - self.computed


class Scheduler:
    """Batches of tokens, one after the other; the caller owns the clock."""

    def __init__(self, blocks: int, block_size: int, max_seqs: int, max_batched: int) -> None:
        self.pool = max(1, blocks - 1)  # one null block is reserved
        self.block_size = block_size
        self.max_seqs = max_seqs
        self.max_batched = max_batched
        self.running: list[Job] = []
        self.waiting: list[Job] = []
        self.used = 0
        self.preemptions = 0
        self.mood: dict[str, Any] = {}
        self._shapes: dict[int, int] = {}
        self._started: list[int] = []
        self._batch: list[tuple[Job, int]] | None = None
        self._due = 0.0
        self._told_waiting = 0

    def add(self, job: Job) -> None:
        self.waiting.append(job)

    def abort(self, number: int) -> None:
        """Forget a request; the gauges stay as they are until the next step, as in vLLM."""
        for jobs in (self.running, self.waiting):
            for job in jobs:
                if job.id == number:
                    jobs.remove(job)
                    self._free(job)
                    return

    def wait_s(self, now: float) -> float | None:
        """Seconds until `advance` has something to do; None: not before the next request."""
        if self._batch is not None:
            return max(0.0, self._due - now)
        if self.running or (self.waiting and self.mood["admit"] and self._fits(self.waiting[0])):
            return 0.0
        return 0.0 if len(self.waiting) != self._told_waiting else None

    def advance(self, now: float) -> Step | None:
        """Finish the batch that is due, begin the next one."""
        step: Step | None = None
        begin_at = now
        if self._batch is not None:
            if now < self._due:
                return None
            if now - self._due < 0.05:
                begin_at = self._due  # no drift
            step = self._finish()
        self._begin(begin_at)
        if step is None and self._batch is None and len(self.waiting) != self._told_waiting:
            step = self._report([], 0, 0, 0)
        return step

    def _first_chunk(self, job: Job, budget: int) -> int:
        return min(job.prompt + job.generated - max(job.computed, job.cached), budget)

    def _fits(self, job: Job) -> bool:
        need = self._need(job, self._first_chunk(job, self.max_batched))
        return need <= self.pool - self.used

    def _need(self, job: Job, tokens: int) -> int:
        wanted = max(job.computed, job.cached) + tokens
        return -(-wanted // self.block_size) - job.blocks

    def _free(self, job: Job) -> None:
        self.used -= job.blocks
        job.blocks = 0

    def _grow(self, job: Job, tokens: int) -> bool:
        """Blocks for the next tokens of a running job, at the cost of the youngest ones."""
        need = self._need(job, tokens)
        while need > self.pool - self.used:
            victim = self.running.pop()
            self._free(victim)
            victim.computed = victim.cached = 0
            self.waiting.insert(0, victim)
            self.preemptions += 1
            if victim is job:
                return False
        self.used += need
        job.blocks += need
        return True

    def _admit(self, job: Job, tokens: int) -> bool:
        need = self._need(job, tokens)
        if need > self.pool - self.used:
            return False
        self.used += need
        job.blocks += need
        if job.generated == 0 and job.computed == 0:
            self._started.append(job.id)
        job.computed = max(job.computed, job.cached)
        self.running.append(job)
        return True

    def _begin(self, now: float) -> None:
        budget = self.max_batched
        batch: list[tuple[Job, int]] = []
        slow_s = 0.0
        prefilled = 0
        preempted_before = self.preemptions
        for job in list(self.running):
            tokens = min(job.left, budget)
            if tokens > 0 and job in self.running and self._grow(job, tokens):
                batch.append((job, tokens))
                budget -= tokens
                prefilled += tokens if tokens > 1 else 0
        admit = self.mood["admit"] and self.preemptions == preempted_before
        while admit and self.waiting and len(self.running) < self.max_seqs and budget:
            job = self.waiting[0]
            tokens = self._first_chunk(job, budget)
            if not self._admit(job, tokens):
                break
            self.waiting.pop(0)
            batch.append((job, tokens))
            budget -= tokens
            prefilled += tokens
            slow_s = max(slow_s, self._first_delay(job))
        batch = [(job, tokens) for job, tokens in batch if job in self.running]
        self._batch = batch or None
        rate, prefill_rate = self.mood["tokens_per_s"], self.mood["prefill_tokens_per_s"]
        self._due = now + max(1 / max(rate, 0.01), prefilled / max(prefill_rate, 0.01)) + slow_s

    def _first_delay(self, job: Job) -> float:
        """New prompt lengths (by powers of two) are slow until warmed up."""
        delay: float = self.mood["first_delay_s"]
        shape = job.prompt.bit_length()
        seen = self._shapes.get(shape, 0)
        self._shapes[shape] = seen + 1
        return delay if seen < self.mood["first_delay_requests"] else 0.0

    def _finish(self) -> Step:
        outputs: list[Output] = []
        prompt_tokens = tokens = 0
        for job, count in self._batch or []:
            tokens += count
            if job not in self.running:
                continue  # aborted meanwhile
            if job.generated == 0:
                prompt_tokens += count
            job.computed += count
            if job.left > 0:
                continue
            job.generated += 1
            reason = None
            if job.generated >= job.limit:
                reason = "length"
            elif job.eos and job.generated >= job.eos:
                reason = "stop"
            outputs.append((job.id, job.generated, reason))
            if reason:
                self.running.remove(job)
                self._free(job)
        self._batch = None
        return self._report(outputs, prompt_tokens, tokens, 1)

    def _report(self, outputs: list[Output], prompt: int, tokens: int, iterations: int) -> Step:
        started, self._started = self._started, []
        self._told_waiting = len(self.waiting)
        return (
            outputs, started, prompt, tokens, iterations,
            len(self.running), len(self.waiting), self.used, self.preemptions,
        )  # fmt: skip
