"""A run that was saved inside an optimizer step takes the step again when it resumes."""

import os
import signal
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    Callback,
    GradientAccumulationScheduler,
    ModelCheckpoint,
)

from tests import lit, noisy
from tests.noisy import NUM_ROWS, train
from tests.ranks import ranks
from tests.test_exact_resume import (
    interrupt,
    interrupt_other,
    resumable,
    resume,
    resume_each,
    run_all,
    save_once,
    stateful,
    told,
)
from zero_strategy.experiments.benchmarks import faults_resume
from zero_strategy.experiments.benchmarks.faults_resume import Noisy, Rows

# Steps in progress.


@pytest.mark.parametrize(("strategy", "world_size"), [("zero1", 2), ("zero3", 1)])
def test_a_save_in_the_middle_of_accumulation_resumes_at_the_steps_first_micro_batch(
    strategy: str, world_size: int, tmp_path: Path
) -> None:
    after = [1, 4, 6, 11, 13]
    run_all(
        world_size,
        interrupt,
        strategy,
        str(tmp_path),
        "on_train_batch_end",
        after,
        accumulate_grad_batches=4,
    )


def interrupt_scheduled(folder: str) -> list[str]:
    def scheduled() -> Callback:
        return GradientAccumulationScheduler({0: 1, 1: 3})

    saving = noisy.SaveAt(folder, "on_train_batch_end", [5, 22, 26, 28])
    whole = train("zero3", callbacks=[saving, scheduled()])
    return [
        f"{path.name}: {len(resumed.losses)} micro-batches"
        for path in Path(folder).iterdir()
        if not (resumed := train("zero3", resume=path, seed=9, callbacks=[scheduled()])).repeats(
            whole, batches=len(whole.losses) - len(resumed.losses)
        )
    ]


def test_accumulation_that_a_scheduler_set_goes_on_inside_the_epoch(tmp_path: Path) -> None:
    run_all(1, interrupt_scheduled, str(tmp_path))


class OnPlateau(Noisy):
    """Lowers its rate where validation no longer improves, and logs its loss over epochs."""

    def training_step(self, batch: Any, index: int) -> Any:
        loss = super().training_step(batch, index)
        self.log("over_epoch", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        super().validation_step(batch, index)
        self.log("val", 1.0)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        told = {"scheduler": schedule, "monitor": "val", "interval": "epoch"}
        return {"optimizer": optimizer, "lr_scheduler": told}


def interrupt_plateau(folder: str) -> tuple[list[str], list[str]]:
    saving = noisy.SaveAt(folder, "on_train_batch_end", [5, 27])
    whole = train("zero3", callbacks=[saving], module=OnPlateau(), max_epochs=3)
    wrong, said = [], []
    for path in Path(folder).iterdir():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            resumed = train("zero3", resume=path, seed=9, module=OnPlateau(), max_epochs=3)
        if not resumed.repeats(whole, batches=len(whole.losses) - len(resumed.losses)):
            wrong.append(path.name)
        said += [str(w.message) for w in caught if "over_epoch: over the epoch" in str(w.message)]
    return wrong, said


def test_a_plateau_scheduler_steps_at_the_end_of_the_epoch_that_goes_on(tmp_path: Path) -> None:
    ((wrong, said),) = ranks(1).run(interrupt_plateau, str(tmp_path))
    assert not wrong
    # What is logged over the epoch has lost its first batches, and says so, once per resume.
    assert len(said) == 2


class Fails(Noisy):
    """Fails in the middle of a training step, or is sent a signal in one, on one rank."""

    def __init__(self, at: int, how: str) -> None:
        super().__init__()
        self.at, self.how = at, how

    def training_step(self, batch: Any, index: int) -> Any:
        loss = super().training_step(batch, index)
        if len(self.losses) == self.at and self.how == "exception":
            raise RuntimeError("broken on purpose")
        if len(self.losses) == self.at and dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return loss


def interrupt_step(folder: str, how: str, at: int, own: bool, **options: Any) -> list[str]:
    options = {"make": resumable if own else None, **options}
    whole = train("zero3", **options)
    keeping = ModelCheckpoint(folder, save_on_exception=True, save_top_k=0)
    saving = {"callbacks": [keeping], "enable_checkpointing": True}
    with suppress(RuntimeError, SystemExit):
        train("zero3", module=Fails(at, how), **saving, **options)
    wrong = [] if len(list(Path(folder).iterdir())) == 1 else ["not one checkpoint"]
    return wrong + resume_each("zero3", folder, whole, **options)


@pytest.mark.parametrize("own", [False, True], ids=["DataLoader", "ResumableLoader"])
@pytest.mark.parametrize(("how", "accumulate"), [("exception", 1), ("signal", 1), ("signal", 3)])
def test_a_step_that_an_exception_or_a_signal_ended_is_taken_again(
    how: str, accumulate: int, own: bool, tmp_path: Path
) -> None:
    run_all(2, interrupt_step, str(tmp_path), how, 5, own, accumulate_grad_batches=accumulate)


def test_a_position_past_the_last_step_is_told_when_it_is_saved(tmp_path: Path) -> None:
    (wrong,) = ranks(1).run(
        interrupt_other, str(tmp_path), "stateful", after=[6], accumulate_grad_batches=4
    )
    assert any("goes on at micro-batch 2 of the 4 of an optimizer step" in text for text in wrong)


def saved_with_warnings(folder: str) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        options = {"use_distributed_sampler": False, "accumulate_grad_batches": 4}
        save_once(folder, 6, make=stateful, **options)
    return told(found)


def test_gradients_that_a_save_cannot_hold_are_told_by_loader_and_number(tmp_path: Path) -> None:
    (said,) = ranks(1).run(saved_with_warnings, str(tmp_path))
    assert len(said) == 1
    stores = "training loader Stateful(Rows) stores a position of its own, which is 2 batches"
    assert stores in said[0]


# Our own loader.


def interrupt_own(folder: str, **options: Any) -> list[str]:
    return interrupt("zero3", folder, "on_train_batch_end", make=resumable, **options)


def test_resumable_loaders_go_on_with_the_draws_of_the_uninterrupted_run(tmp_path: Path) -> None:
    run_all(2, interrupt_own, str(tmp_path), after=[3, 11, 13], max_epochs=3)


def test_a_checkpoint_without_random_states_says_what_differs(tmp_path: Path) -> None:
    path = str(tmp_path / "plain.ckpt")
    run = lit.trainer("auto", max_epochs=1)
    run.fit(Noisy(), noisy.loader(Rows(NUM_ROWS)))
    run.save_checkpoint(path)
    ((_, said),) = ranks(1).run(resume, path)
    assert len(said) == 1
    assert said[0].startswith("the checkpoint holds no random states")


def test_the_benchmarks_resumed_runs_are_all_bit_equal() -> None:
    assert ranks(1).run(faults_resume.run, 1) == [{"cases": 2, "bit_equal": 2}]
