"""Saves in the background hold the step at which they began, and fail where everybody sees it."""

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from tests import lit
from tests.ranks import ranks
from tests.test_offload import Lit
from zero_strategy import OffloadConfig, SaveConfig, ZeroStrategy
from zero_strategy.checkpoint import files
from zero_strategy.checkpoint.diff import diff
from zero_strategy.checkpoint.staging import Ring, StagedSavePlanner
from zero_strategy.checkpoint.verify import verify
from zero_strategy.offload.host import HostState
from zero_strategy.offload.layout import Layout
from zero_strategy.offload.snapshot import Snapshot

NUM_STEPS = 6
FOREGROUND = SaveConfig()
# Less than any tensor: one lies in the ring at a time, and one chunk is copied.
SCARCE = SaveConfig(background=True, staging_gib=1e-9)
AMPLE = SaveConfig(background=True)


class SaveEach(Callback):
    """Saves after every optimizer step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


def slowly(monkeypatch: pytest.MonkeyPatch, delay_s: float) -> None:
    """Let every write take so long, so that steps are taken meanwhile."""
    write_all = files.write_all

    def late(*args: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(delay_s)
        write_all(*args)

    monkeypatch.setattr(files, "write_all", late)


def run(
    name: str, folder: str, saving: SaveConfig, *, delay_s: float = 0.0, **options: Any
) -> list[float]:
    """Train and save after every step."""
    offload = OffloadConfig(placement="host", chunk_elements=256) if "offload" in name else None
    strategy = ZeroStrategy(stage=int(name[4]), offload=offload, saving=saving)
    torch.manual_seed(3)
    module = Lit()
    with pytest.MonkeyPatch.context() as patch:
        slowly(patch, delay_s)
        trainer = lit.trainer(
            strategy,
            max_steps=NUM_STEPS,
            gradient_clip_val=1.0,
            precision="bf16-mixed",
            callbacks=[SaveEach(Path(folder))],
            **options,
        )
        trainer.fit(module, lit.loader())
    return module.losses


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("saving", [SCARCE, AMPLE], ids=["scarce", "ample"])
@pytest.mark.parametrize("name", ["zero2", "zero3", "zero3_offload"])
def test_a_background_save_holds_what_a_save_that_is_waited_for_holds(
    name: str, saving: SaveConfig, world_size: int, tmp_path: Path
) -> None:
    folders = [tmp_path / "foreground", tmp_path / "background"]
    losses = [
        ranks(world_size).run(run, name, str(folder), how, delay_s=0.002)[0]
        for folder, how in zip(folders, (FOREGROUND, saving), strict=True)
    ]
    assert losses[0] == losses[1]
    for step in range(1, NUM_STEPS + 1):
        paths = [folder / f"{step}.ckpt" for folder in folders]
        assert not verify(paths[1], deep=True).problems
        assert list(diff(*paths)) == []


class Refuses(SaveEach):
    """Lets one save fail on the last rank, as a full disk does."""

    def __init__(self, folder: Path, step: int) -> None:
        super().__init__(folder)
        self.step = step
        self.steps_after = 0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step > self.step:
            self.steps_after += 1
            time.sleep(0.3)  # the failure is there by then
        elif trainer.global_rank == trainer.world_size - 1 and trainer.global_step == self.step:
            self._fail_next()
        if trainer.global_step <= self.step:
            super().on_train_batch_end(trainer)

    def _fail_next(self) -> None:
        def full(*_: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        files.write_all = full


def run_with_a_failing_save(folder: str) -> tuple[str, int]:
    callback, write_all = Refuses(Path(folder), step=2), files.write_all
    trainer = lit.trainer(
        ZeroStrategy(stage=3, saving=AMPLE), max_steps=NUM_STEPS, callbacks=[callback]
    )
    try:
        trainer.fit(lit.Lit(), lit.loader())
    except RuntimeError as error:
        return str(error), callback.steps_after
    finally:
        files.write_all = write_all
    return "", callback.steps_after


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_save_that_fails_ends_the_run_on_all_ranks_soon_and_leaves_the_one_before(
    world_size: int, tmp_path: Path
) -> None:
    outcomes = ranks(world_size).run(run_with_a_failing_save, str(tmp_path))
    assert len({steps for _, steps in outcomes}) == 1
    for message, steps_after in outcomes:
        assert f"rank {world_size - 1} could not write the checkpoint" in message
        assert "No space left" in message
        assert steps_after <= 3
    assert not verify(tmp_path / "1.ckpt", deep=True).problems
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1.ckpt"]


class SaveThenRemove(SaveEach):
    """Keeps one checkpoint, as ModelCheckpoint does: removes the older right after the newer."""

    seen: list[bool]

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        super().on_train_batch_end(trainer)
        step = trainer.global_step
        older = self.folder / f"{step - 1}.ckpt"
        if step > 1:
            trainer.strategy.remove_checkpoint(older)
            newer = (self.folder / f"{step}.ckpt").exists()
            self.seen.append(older.exists() or newer)


def run_that_keeps_one(folder: str) -> list[bool]:
    callback = SaveThenRemove(Path(folder))
    callback.seen = []
    with pytest.MonkeyPatch.context() as patch:
        slowly(patch, 0.01)
        strategy = ZeroStrategy(stage=3, saving=AMPLE)
        lit.trainer(strategy, max_steps=4, callbacks=[callback]).fit(lit.Lit(), lit.loader())
    return callback.seen


def test_the_older_checkpoint_is_removed_once_the_newer_is_complete(tmp_path: Path) -> None:
    (seen,) = ranks(1).run(run_that_keeps_one, str(tmp_path))
    assert all(seen)
    assert [p.name for p in tmp_path.iterdir()] == ["4.ckpt"]


class Interrupts(SaveEach):
    """Is interrupted by the user while a save copies."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StagedSavePlanner, "shard", interrupt)
            super().on_train_batch_end(trainer)


def run_that_is_interrupted(folder: str) -> str:
    trainer = lit.trainer(
        ZeroStrategy(stage=3, saving=AMPLE), max_steps=2, callbacks=[Interrupts(Path(folder))]
    )
    try:
        trainer.fit(lit.Lit(), lit.loader())
    except BaseException as error:  # noqa: BLE001 - what ended it is the result
        return f"{type(error).__name__}: {error}"
    return ""


def test_an_interrupt_while_a_save_copies_ends_the_save_too(tmp_path: Path) -> None:
    ended = ranks(1).run(run_that_is_interrupted, str(tmp_path))
    assert ended[0]
    assert not any(thread.name == "save" for thread in threading.enumerate())
    assert list(tmp_path.iterdir()) == []


# The ring.


def test_a_ring_hands_out_apart_what_is_not_given_back() -> None:
    ring = Ring(4096, pinned=False)
    held: list[tuple[int, torch.Tensor, int]] = []
    draw = torch.Generator().manual_seed(5)
    for number in range(500):
        size = int(torch.randint(1, 4097, (), generator=draw))
        while (part := ring.take(size)) is None:
            end, old, value = held.pop(0)
            assert bool((old == value).all())
            ring.give_back(end)
        part.fill_(number % 251)
        held.append((ring.end, part, number % 251))
    assert all(bool((old == value).all()) for _, old, value in held)


# The snapshot.


def host_state(num_chunks: int) -> HostState:
    state = HostState(Layout.of({"a": {"a.w": 64 * num_chunks}}, 64), moments=torch.float32)
    state.write_master("a.w", torch.arange(64.0 * num_chunks))
    return state


def test_what_is_held_is_read_as_it_was_though_it_is_written_to() -> None:
    state = host_state(3)
    held = state.hold({"a.w": 2}, budget_bytes=1 << 20)
    state.write_master("a.w", torch.zeros(192))
    state.write_moment("a.w", "m", torch.ones(192))
    assert torch.equal(held.master("a.w"), torch.arange(192.0))
    assert not held.moment("a.w", "m").any()
    assert not state.master("a.w").any()
    with pytest.raises(RuntimeError, match="more often than was announced"):
        held.master("a.w")


def test_a_writer_waits_for_a_reader_where_there_is_no_room_for_a_copy() -> None:
    state = host_state(3)
    one_chunk = 64 * 12
    held = state.hold({"a.w": 1}, budget_bytes=one_chunk)
    state.keep(0)
    waited = threading.Event()

    def write() -> None:
        state.keep(1)
        waited.set()

    writer = threading.Thread(target=write)
    writer.start()
    assert not waited.wait(0.05)
    assert torch.equal(held.master("a.w"), torch.arange(192.0))
    writer.join(5)
    assert waited.is_set()


def test_a_writer_waits_until_nobody_reads_the_chunk_itself() -> None:
    state = host_state(1)
    snapshot = Snapshot(lambda _: state.chunk(state.layout.chunks[0]), {0: 2}, 1 << 20)
    written = threading.Event()

    def write() -> None:
        snapshot.keep(0)
        written.set()

    with snapshot.reading(0):
        writer = threading.Thread(target=write)
        writer.start()
        assert not written.wait(0.05)
    writer.join(5)
    assert written.is_set()


def test_the_end_of_a_snapshot_frees_who_waits() -> None:
    state = host_state(2)
    held = state.hold({"a.w": 1}, budget_bytes=64 * 12)
    state.keep(0)
    writer = threading.Thread(target=state.keep, args=(1,))
    writer.start()
    held.snapshot.end()
    writer.join(5)
    assert not writer.is_alive()


def save_after_the_run(folder: str) -> int:
    run = lit.trainer(ZeroStrategy(stage=3, saving=AMPLE), max_epochs=1)
    run.fit(lit.Lit(), lit.loader())
    path = Path(folder) / "after.ckpt"
    run.save_checkpoint(path)
    return len(verify(path, deep=True).problems)


def test_a_save_after_the_run_is_there_when_it_returns(tmp_path: Path) -> None:
    assert ranks(2).run(save_after_the_run, str(tmp_path)) == [0, 0]
