"""From moments to figures: the recorder hears what begins and ends, and tells the sinks.

Between log steps it only notes: no tensor is read, no collective is called. On a log step every
rank brings one row of figures together and rank 0 hands the resulting `Step` to its sinks.
"""

import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from zero_strategy.telemetry.clock import Phase, PhaseClock
from zero_strategy.telemetry.events import Done, RunFacts, Save, Sink, Step, Validation
from zero_strategy.telemetry.probes import Probes, Progress
from zero_strategy.telemetry.tiers import offload_fields, offload_row

_NUM_FIGURES = 9
"""Of a rank's row without those of offload, which stand behind."""


class Recorder:
    """Figures of one start of training, on one rank.

    Args:
        facts: what is known at the start.
        clock: sees the device's phases.
        probes: the other sources.
        sinks: take the events; empty on all ranks but 0.
        progress: counted on in place.
        every: optimizer steps between log steps. The first and the last step of a start are log
            steps too: the first so that warm-up stands in a row of its own.
        counts_tokens: whether `batch_started` will be told token counts.
    """

    def __init__(
        self,
        *,
        facts: RunFacts,
        clock: PhaseClock,
        probes: Probes,
        sinks: Sequence[Sink],
        progress: Progress,
        every: int,
        counts_tokens: bool,
    ) -> None:
        self._facts = facts
        self._clock = clock
        self._probes = probes
        self._sinks = sinks
        self._progress = progress
        self._every = every
        self._counts_tokens = counts_tokens

        self._step = facts.start_step
        self._logged_step: int | None = None
        self._window_steps = 0
        self._window_tokens = 0
        self._window_exposed_ms = 0.0
        self._losses: list[Tensor] = []
        self._lr: float | Tensor | None = None
        self._save: tuple[float, int, Callable[[], tuple[str | None, float | None]]] | None = None
        self._productive_ms = 0.0

        self._elapsed_before_s = progress.elapsed_s
        self._started_s = time.perf_counter()
        # When, and at which step, the first step of this start was done.
        self._pace_from = (self._started_s, self._step)
        clock.enter("data")

    # What begins and ends. None of these syncs the host, unless the step is a log step.

    def enter(self, phase: Phase) -> None:
        """A phase begins."""
        self._finish_save()
        self._clock.enter(phase)

    def batch_started(self, num_tokens: int) -> None:
        """A micro-batch of this rank's arrived."""
        self.enter("forward")
        self._window_tokens += num_tokens

    def optimizer_started(self, lr: float | Tensor) -> None:
        """An optimizer step begins, at this learning rate."""
        self.enter("optimizer")
        # Schedulers change a learning rate kept as a tensor in place, before the step ends.
        self._lr = lr.detach().clone() if isinstance(lr, Tensor) else lr

    def batch_ended(self, loss: Tensor | None, *, step: int, epoch: int) -> None:
        """A micro-batch is done.

        Args:
            loss: its loss, 0-dim, detached; kept, not read.
            step: optimizer steps done so far.
            epoch: epochs done so far.
        Cost: on log steps one all-reduce, on all ranks, and a few host syncs.
        """
        self.enter("data")
        if loss is not None:
            self._losses.append(loss)
        if step == self._step:
            return
        self._step = step
        self._window_steps += 1
        if self._is_log_step():
            # Telling takes time too; it belongs to no phase, and shows in `elapsed_s`.
            self._clock.enter(None)
            self._log_step(epoch)
            self._clock.enter("data")
        self._losses.clear()

    def validation_started(self) -> None:
        """Stop counting step time and step communication."""
        self._finish_save()
        self._clock.enter(None)
        self._window_exposed_ms += self._probes.exposed_comm_ms() or 0.0

    def validation_ended(self, metrics: Mapping[str, float]) -> None:
        """Count again; tell what was measured.

        Args:
            metrics: as `validation_figures` gives them, the same on all ranks.
        """
        others = dict(metrics)
        loss = others.pop("loss", None)
        bits_per_byte = others.pop("bits_per_byte", None)
        self._tell(
            Validation(
                step=self._step,
                tokens=self._tokens(),
                elapsed_s=self._elapsed_s(),
                loss=loss,
                bits_per_byte=bits_per_byte,
                others=others,
            )
        )
        # What validation waited for is not the step's.
        self._probes.exposed_comm_ms()
        self._clock.enter("data")

    def save_started(self, outcome: Callable[[], tuple[str | None, float | None]]) -> None:
        """A checkpoint is being written; the next word from the loop ends it.

        Args:
            outcome: says what was written and in how many seconds, once it was. Without the
                seconds, the time until that next word counts.
        """
        self._finish_save()
        self._clock.enter(None)
        self._save = (time.perf_counter(), self._step, outcome)

    def close(self, reason: str | None = None) -> None:
        """Training ended, early if there is a reason."""
        self._finish_save()
        if reason is None:
            # After an error the device may not answer, and the error must not be masked.
            self._add_productive(self._clock.take())
        wall_s = time.perf_counter() - self._started_s
        self._tell(
            Done(
                step=self._step,
                wall_s=wall_s,
                productive_share=min(self._productive_ms / 1e3 / wall_s, 1.0),
                reason=reason,
            )
        )

    def progress(self) -> Progress:
        """What a checkpoint should keep. Between log steps, tokens assume equal ranks."""
        return Progress(tokens=self._tokens() or 0, elapsed_s=self._elapsed_s())

    # Log steps.

    def _is_log_step(self) -> bool:
        if self._logged_step is None or self._step == self._facts.total_steps:
            return True
        # A step may count by more than one (two optimizers), so multiples can be jumped over.
        return self._step // self._every > self._logged_step // self._every

    def _log_step(self, epoch: int) -> None:
        row, exposed_measured = self._local_row()
        rows = self._probes.gather(row)
        columns = list(zip(*(row[:_NUM_FIGURES] for row in rows), strict=True))
        has_loss, loss, tokens, data, forward, backward, exposed, optimizer, memory = columns
        busy_ms = [sum(times) - times[3] for times in zip(*columns[3:8], strict=True)]
        step_ms = _mean(data) + _mean(forward) + _mean(backward) + _mean(exposed) + _mean(optimizer)
        tokens_per_s = self._tokens_per_s(_mean(tokens), step_ms)
        self._progress.tokens += round(sum(tokens))
        plan = self._facts.plan
        record = Step(
            step=self._step,
            epoch=epoch,
            tokens=self._progress.tokens if self._counts_tokens else None,
            elapsed_s=self._elapsed_s(),
            loss=sum(loss) / sum(has_loss) if sum(has_loss) else None,
            grad_norm=self._probes.grad_norm(),
            lr=None if self._lr is None else float(self._lr),
            tokens_per_s=tokens_per_s,
            mfu=self._mfu(tokens_per_s),
            step_ms=step_ms,
            data_ms=_mean(data),
            forward_ms=_mean(forward),
            backward_ms=_mean(backward),
            exposed_comm_ms=_mean(exposed) if exposed_measured else None,
            optimizer_ms=_mean(optimizer),
            memory_bytes=int(max(memory)),
            planned_bytes=plan.total_bytes if plan else None,
            rank_skew_ms=max(busy_ms) - min(busy_ms),
            skipped_steps=self._probes.skipped_steps(),
            eta_s=self._eta_s(),
            **offload_fields([row[_NUM_FIGURES:] for row in rows]),
        )
        self._open_window()
        self._tell(record)

    def _local_row(self) -> tuple[list[float], bool]:
        """This rank's figures per step, and whether communication was measured."""
        times = self._clock.take()
        self._add_productive(times)
        measured_ms = self._probes.exposed_comm_ms()
        compute_ms = times["forward"] + times["backward"]
        exposed_ms = min(self._window_exposed_ms + (measured_ms or 0.0), compute_ms)
        # Waits lie inside forward and backward; which of them is not known, so both give their
        # share and the phases still add up to the step.
        kept = 1 - exposed_ms / compute_ms if compute_ms else 1.0
        phases_ms = (
            times["data"],
            times["forward"] * kept,
            times["backward"] * kept,
            exposed_ms,
            times["optimizer"],
        )
        loss = float(torch.stack(self._losses).mean()) if self._losses else None
        row = [
            float(loss is not None),
            loss or 0.0,
            float(self._window_tokens),
            *(ms / self._window_steps for ms in phases_ms),
            float(self._probes.memory_bytes()),
            *offload_row(self._probes.offload(), self._window_steps),
        ]
        return row, measured_ms is not None

    def _open_window(self) -> None:
        if self._logged_step is None:
            self._pace_from = (time.perf_counter(), self._step)
        self._logged_step = self._step
        self._window_steps = self._window_tokens = 0
        self._window_exposed_ms = 0.0

    def _add_productive(self, times: Mapping[Phase, float]) -> None:
        self._productive_ms += times["forward"] + times["backward"] + times["optimizer"]

    # Figures derived from others.

    def _tokens_per_s(self, window_tokens: float, step_ms: float) -> float | None:
        if not self._counts_tokens or not step_ms:
            return None
        return window_tokens / self._window_steps / step_ms * 1e3

    def _mfu(self, tokens_per_s: float | None) -> float | None:
        flops, peak = self._probes.flops_per_token, self._probes.peak_flops
        if tokens_per_s is None or flops is None or peak is None:
            return None
        return tokens_per_s * flops / peak

    def _eta_s(self) -> float | None:
        since, step = self._pace_from
        if self._facts.total_steps is None or self._logged_step is None:
            # The first step warms up and says little about the others.
            return None
        left = max(self._facts.total_steps - self._step, 0)
        return left * (time.perf_counter() - since) / (self._step - step)

    def _elapsed_s(self) -> float:
        return self._elapsed_before_s + time.perf_counter() - self._started_s

    def _tokens(self) -> int | None:
        if not self._counts_tokens:
            return None
        return self._progress.tokens + self._window_tokens * self._facts.world_size

    def _finish_save(self) -> None:
        if self._save is None:
            return
        since, step, outcome = self._save
        self._save = None
        name, seconds = outcome()
        blocking_s = time.perf_counter() - since if seconds is None else seconds
        self._tell(Save(step=step, name=name, blocking_s=blocking_s))

    def _tell(self, event: Step | Validation | Save | Done) -> None:
        for sink in self._sinks:
            sink.write(event)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
