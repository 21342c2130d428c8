"""A run that resumes is the run that was not interrupted, bit by bit: losses, samples, weights.

Each rank and each run starts from a seed of its own, so nothing is equal by chance.
"""

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    WeightedRandomSampler,
)

from tests import lit, noisy
from tests.noisy import NUM_ROWS, SaveAt, train
from tests.ranks import ranks
from zero_strategy.checkpoint import storage
from zero_strategy.checkpoint.random_state import RandomState
from zero_strategy.data import ResumableLoader, ResumableSampler
from zero_strategy.experiments.benchmarks import faults_resume
from zero_strategy.experiments.benchmarks.faults_resume import Noisy, Outcome, Rows

CPU = torch.device("cpu")


def told(found: list[warnings.WarningMessage]) -> list[str]:
    """What users are told beside Lightning's advice."""
    texts = [str(w.message) for w in found]
    lightnings = ("treespec", "num_workers", "callbacks used to create the checkpoint")
    return [text for text in texts if not any(words in text for words in lightnings)]


def resume_each(strategy: str, folder: str, whole: Outcome, **options: Any) -> list[str]:
    """Resume from each checkpoint of a folder; what differs from the whole run."""
    if dist.is_initialized():
        dist.barrier()
    wrong = []
    for path in sorted(Path(folder).iterdir()):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            resumed = train(strategy, resume=path, seed=99, **options)
        trained = len(whole.losses) - len(resumed.losses)
        if not resumed.repeats(whole, batches=trained):
            wrong.append(f"{path.name}: differs, with {trained} micro-batches left out")
        wrong += [f"{path.name}: {text}" for text in told(found)]
    return wrong


def interrupt(
    strategy: str, folder: str, hook: str, after: list[int] | None = None, **options: Any
) -> list[str]:
    """Train with saves in a hook, and resume from each; what differs from the run without."""
    Path(folder).mkdir(exist_ok=True)
    whole = train(strategy, callbacks=[SaveAt(folder, hook, after)], **options)
    wrong = [] if list(Path(folder).iterdir()) else ["nothing was saved"]
    return wrong + resume_each(strategy, folder, whole, **options)


def run_all(world_size: int, function: Callable[..., list[str]], *args: Any, **kwargs: Any) -> None:
    for rank, wrong in enumerate(ranks(world_size).run(function, *args, **kwargs)):
        assert not wrong, f"rank {rank}: {wrong}"


# Random states.


@pytest.mark.parametrize(
    ("strategy", "world_size", "workers", "options"),
    [
        ("zero3", 1, 2, {}),
        ("zero3", 2, 0, {}),
        ("zero2", 2, 2, {}),
        ("zero3_offload", 1, 0, {"precision": "bf16-mixed", "gradient_clip_val": 0.5}),
    ],
)
def test_a_run_resumed_in_the_middle_of_an_epoch_is_the_uninterrupted_one(
    strategy: str, world_size: int, workers: int, options: dict[str, Any], tmp_path: Path
) -> None:
    per_epoch = NUM_ROWS // 2 // world_size
    inside = [n for n in range(1, 2 * per_epoch) if n % per_epoch]
    after = random.Random(world_size + workers).sample(inside, 3)
    folder = str(tmp_path)
    options = {**options, "workers": workers}
    run_all(world_size, interrupt, strategy, folder, "on_train_batch_end", after, **options)


@pytest.mark.parametrize("limits", [{"max_epochs": 3}, {"max_steps": 66, "max_epochs": -1}])
@pytest.mark.parametrize(
    ("hook", "after"),
    [
        ("on_train_batch_end", [22, 44]),
        ("on_validation_end", [4, 20]),
        ("on_train_epoch_end", [22]),
        ("on_train_epoch_start", [44]),
        ("on_before_optimizer_step", [3, 23]),
    ],
)
def test_any_hook_may_save_also_at_the_end_of_an_epoch(
    hook: str, after: list[int], limits: dict[str, int], tmp_path: Path
) -> None:
    run_all(1, interrupt, "zero3", str(tmp_path), hook, after, **limits)


def interrupt_by_model_checkpoint(folder: str, **when: Any) -> list[str]:
    keeping = ModelCheckpoint(folder, save_top_k=-1, filename="{step}", **when)
    whole = train("zero3", callbacks=[keeping], enable_checkpointing=True)
    names = {path.name for path in Path(folder).iterdir()}
    missing = {"step=22.ckpt", "step=44.ckpt"} - names
    return [*missing, *resume_each("zero3", folder, whole)]


@pytest.mark.parametrize(
    "when", [{"every_n_train_steps": 11}, {"every_n_epochs": 1, "save_on_train_epoch_end": True}]
)
def test_what_model_checkpoint_saves_resumes_exactly(when: dict[str, int], tmp_path: Path) -> None:
    run_all(1, interrupt_by_model_checkpoint, str(tmp_path), **when)


def stop_and_go_on(folder: str) -> list[str]:
    whole = train("zero3", max_epochs=3)
    wrong = []
    for stop in ({"max_steps": 7}, {"max_steps": 30}, {"max_steps": 44}):
        module, run = Noisy(), lit.trainer("zero3", max_epochs=3, val_check_interval=4, **stop)
        faults_resume.seed_rank(0)
        run.fit(module, noisy.loader(Rows(NUM_ROWS, noise=True)), noisy.loader(Rows(5)))
        run.save_checkpoint(Path(folder) / f"{run.global_step}.ckpt")
        for limits in ({"max_epochs": 3}, {"max_epochs": -1, "max_steps": 66}):
            resumed = train("zero3", resume=f"{folder}/{run.global_step}.ckpt", seed=9, **limits)
            if not resumed.repeats(whole, batches=run.global_step):
                wrong.append(f"{stop}, {limits}: {len(resumed.losses)} micro-batches")
    return wrong


def test_a_run_that_a_number_of_steps_ended_goes_on_inside_the_epoch(tmp_path: Path) -> None:
    run_all(1, stop_and_go_on, str(tmp_path))


class FailsInValidation(Noisy):
    def validation_step(self, batch: Any, index: int) -> None:
        super().validation_step(batch, index)
        if len(self.losses) >= 8:
            raise RuntimeError("broken on purpose")


def interrupt_validation(folder: str) -> list[str]:
    whole = train("zero3")
    keeping = ModelCheckpoint(folder, save_on_exception=True, save_top_k=0)
    with suppress(RuntimeError):
        train("zero3", module=FailsInValidation(), callbacks=[keeping], enable_checkpointing=True)
    return resume_each("zero3", folder, whole)


def test_a_validation_that_failed_leaves_a_checkpoint_that_resumes_exactly(tmp_path: Path) -> None:
    run_all(1, interrupt_validation, str(tmp_path))


class Again(Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.save_checkpoint(self.path)


def save_again(folder: str) -> list[str]:
    again = Path(folder) / "again"
    again.mkdir()
    whole = train("zero3", callbacks=[SaveAt(folder, "on_train_batch_end", [5])])
    resume = Path(folder) / "5.ckpt"
    train("zero3", resume=resume, seed=9, callbacks=[Again(str(again / "5.ckpt"))])
    return resume_each("zero3", str(again), whole)


def test_a_save_before_a_resumed_run_trains_resumes_like_the_one_it_came_from(
    tmp_path: Path,
) -> None:
    run_all(1, save_again, str(tmp_path))


def with_and_without_validation() -> bool:
    validated = train("zero3", max_epochs=1)
    return train("zero3", max_epochs=1, limit_val_batches=0).repeats(validated, batches=0)


def test_validation_leaves_no_trace_in_what_training_draws() -> None:
    assert ranks(1).run(with_and_without_validation) == [True]


class DrawsInValidation(Noisy):
    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[float] = []

    def training_step(self, batch: Any, index: int) -> Any:
        return self.head(batch[1]).sum()

    def on_train_epoch_start(self) -> None: ...

    def validation_step(self, batch: Any, index: int) -> None:
        self.drawn.append(float(torch.rand(())) + random.random() + float(np.random.rand()))


def draws_in_validation() -> list[float]:
    module = DrawsInValidation()
    train("zero3", module=module, workers=1, max_epochs=1, num_sanity_val_steps=0)
    return module.drawn


def test_validations_draw_other_numbers_each_time_though_training_draws_none() -> None:
    (drawn,) = ranks(1).run(draws_in_validation)
    assert len(drawn) == len(set(drawn)) > 3


def draw() -> list[float]:
    normal = [random.gauss(0, 1), float(np.random.randn()), float(torch.randn(()))]
    return [*normal, random.random(), float(np.random.rand()), float(torch.rand(()))]


def test_states_of_torch_numpy_and_python_survive_as_plain_data() -> None:
    draw()  # of each pair of normal numbers, one is kept for later
    stored = RandomState.now(CPU).plain()
    expected = draw()
    draw()
    RandomState.from_plain(stored).restore(CPU)
    assert draw() == expected


def test_a_state_that_would_be_read_beyond_its_end_is_refused() -> None:
    stored = RandomState.now(CPU).plain()
    stored["numpy"]["pos"] = 1000
    with pytest.raises(ValueError, match="random state with 624 and 625 words at 1000: must be"):
        RandomState.from_plain(stored)


def test_a_numpy_generator_of_another_kind_is_refused_when_it_is_saved() -> None:
    own = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        with pytest.raises(ValueError, match="numpy's global generator is PCG64: must be MT19937"):
            RandomState.now(CPU).plain()
    finally:
        np.random.set_bit_generator(own)


def save_once(folder: str, after: int = 3, **options: Any) -> Outcome:
    Path(folder).mkdir(exist_ok=True)
    return train("zero3", callbacks=[SaveAt(folder, "on_train_batch_end", [after])], **options)


def resume(path: str, **options: Any) -> tuple[Outcome, list[str]]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        return train("zero3", resume=path, seed=99, **options), told(found)


def test_each_rank_draws_on_from_its_own_state(tmp_path: Path) -> None:
    ranks(2).run(save_once, str(tmp_path))
    meta = storage.load_meta(tmp_path / "3.ckpt")
    first, second = (rank["random"] for rank in meta["resume"]["ranks"])
    assert all(first[name] != second[name] for name in ("cpu", "numpy", "python"))


# Positions in the data.


def flat(steps: list[list[int]]) -> list[int]:
    return [sample for step in steps for sample in step]


def dealt(outcomes: list[Outcome]) -> list[int]:
    """Samples in the order in which ranks are dealt them."""
    by_rank = [flat(o.samples) for o in outcomes]
    return flat([list(samples) for samples in zip(*by_rank, strict=True)])


@pytest.mark.parametrize(
    ("saving", "batch_size", "resuming", "new_batch_size"),
    [(1, 4, 2, 2), (2, 2, 1, 4), (2, 3, 1, 2), (1, 3, 2, 3)],
)
def test_the_order_of_samples_goes_on_with_other_ranks_and_batch_sizes(
    saving: int, batch_size: int, resuming: int, new_batch_size: int, tmp_path: Path
) -> None:
    options = {"max_epochs": 2, "workers": 1}
    whole = dealt(ranks(saving).run(save_once, str(tmp_path), batch_size=batch_size, **options))
    path = str(tmp_path / "3.ckpt")
    found = ranks(resuming).run(resume, path, batch_size=new_batch_size, **options)
    consumed = 3 * saving * batch_size
    epochs = dealt([outcome for outcome, _ in found])
    # Where ranks do not divide the rows, some come twice at an epoch's end.
    rest = NUM_ROWS - consumed
    assert epochs[:rest] == whole[consumed:NUM_ROWS]
    assert sorted(set(epochs[rest + rest % resuming :])) == list(range(NUM_ROWS))
    said = found[0][1]
    if saving != resuming:
        assert any(f"saved on {saving} ranks, resumed on {resuming}" in text for text in said)
        said = said[1:]
    assert said == []


def steps(outcomes: list[Outcome], accumulate: int) -> list[set[int]]:
    """Samples of each optimizer step, of all ranks together."""
    batches = [
        flat(list(ranks_batches))
        for ranks_batches in zip(*(o.samples for o in outcomes), strict=True)
    ]
    starts = range(0, len(batches), accumulate)
    return [set(flat(batches[n : n + accumulate])) for n in starts]


@pytest.mark.parametrize("own", [False, True], ids=["DataLoader", "ResumableLoader"])
def test_steps_on_other_ranks_take_the_samples_of_the_uninterrupted_runs_steps(
    own: bool, tmp_path: Path
) -> None:
    options = {"make": "resumable" if own else None, "max_epochs": 1}
    saving = {"after": 6, "accumulate_grad_batches": 2}
    whole = steps(ranks(2).run(save_own, str(tmp_path), **saving, **options), 2)
    path = str(tmp_path / "6.ckpt")
    found = ranks(1).run(resume_own, path, accumulate_grad_batches=4, **options)
    assert steps([outcome for outcome, _ in found], 4) == whole[3:]
    # Not the same samples per step: said, since a step of half as many changes what is learned.
    found = ranks(1).run(resume_own, path, accumulate_grad_batches=5, **options)
    said = [text for text in found[0][1] if "at micro-batch" in text]
    assert len(said) == (0 if own else 1)


def resumable(seed: int = 0) -> ResumableLoader:
    size, rank = dist.get_world_size(), dist.get_rank()
    rows = Rows(NUM_ROWS)
    order = ResumableSampler(rows, num_replicas=size, rank=rank, seed=seed)
    return ResumableLoader(rows, sampler=order, batch_size=2)


def save_own(folder: str, make: str | None, **options: Any) -> Outcome:
    return save_once(folder, make=resumable if make else None, **options)


def resume_own(path: str, make: str | None, **options: Any) -> tuple[Outcome, list[str]]:
    return resume(path, make=resumable if make else None, **options)


def losses_at(strategy: str, **options: Any) -> list[float]:
    """Losses of the small GPT, which draws nothing; a step has the same samples on any ranks."""
    module = lit.Lit()
    callbacks = [SaveAt(*options.pop("save"))] if "save" in options else []
    resume = options.pop("resume", None)
    run = lit.trainer(strategy, max_epochs=1, callbacks=callbacks, **options)
    run.fit(module, lit.loader(6 * lit.GLOBAL_BATCH), ckpt_path=resume)
    return module.losses


def test_a_run_resumed_in_the_middle_of_an_epoch_on_other_ranks_repeats_the_loss(
    tmp_path: Path,
) -> None:
    save = (str(tmp_path), "on_train_batch_end", [2])
    whole = ranks(2).run(losses_at, "zero3", save=save)[0]
    (losses,) = ranks(1).run(losses_at, "zero2", resume=str(tmp_path / "2.ckpt"))
    assert losses == pytest.approx(whole[2:], rel=2e-6)  # see tests/test_parity.py


class Backwards(Sampler[int]):
    """An order that torch does not know."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(NUM_ROWS - 1, -1, -1))

    def __len__(self) -> int:
        return NUM_ROWS


class Unseekable(Backwards):
    """Shuffles by a generator that nobody can set back."""

    own = random.Random()

    def __iter__(self) -> Iterator[int]:
        order = list(range(NUM_ROWS))
        self.own.shuffle(order)
        return iter(order)


def samplers() -> dict[str, Callable[[], dict[str, Any]]]:
    rows, generator = range(NUM_ROWS), lambda: torch.Generator().manual_seed(4)
    return {
        "sequential": lambda: {"sampler": SequentialSampler(rows), "batch_size": 2},
        "random": lambda: {"shuffle": True, "batch_size": 2},
        "own generator": lambda: {"shuffle": True, "batch_size": 2, "generator": generator()},
        "weighted": lambda: {
            "sampler": WeightedRandomSampler([1.0, 2.0] * (NUM_ROWS // 2), NUM_ROWS),
            "batch_size": 2,
        },
        "backwards": lambda: {"sampler": Backwards(), "batch_size": 2},
        "own batches": lambda: {"batch_sampler": BatchSampler(RandomSampler(rows), 3, True)},
        "no batches": lambda: {"shuffle": True, "batch_size": None, "collate_fn": single},
        "unseekable": lambda: {"sampler": Unseekable(), "batch_size": 2},
        "another seed": lambda: {"sampler": seeded(), "batch_size": 2},
    }


def seeded() -> DistributedSampler:
    """As from a script that is started with another seed each time."""
    return DistributedSampler(Rows(NUM_ROWS), 1, 0, seed=int(torch.initial_seed()) % 1000)


def single(row: tuple[int, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([row[0]]), row[1][None]


def interrupt_sampled(folder: str, kind: str) -> list[str]:
    return interrupt(
        "zero3",
        folder,
        "on_train_batch_end",
        [5, 30],
        make=lambda: DataLoader(Rows(NUM_ROWS), **samplers()[kind]()),
        use_distributed_sampler=False,
    )


@pytest.mark.parametrize("kind", [*samplers()][:-2])
def test_a_plain_loader_goes_on_in_its_order_whatever_sampler_it_has(
    kind: str, tmp_path: Path
) -> None:
    run_all(1, interrupt_sampled, str(tmp_path), kind)


@pytest.mark.parametrize("kind", [*samplers()][-2:])
def test_an_order_that_is_another_one_is_noticed_and_the_loader_named(
    kind: str, tmp_path: Path
) -> None:
    (wrong,) = ranks(1).run(interrupt_sampled, str(tmp_path), kind)
    said = [text for text in wrong if "differs" not in text]
    assert len(said) == 2
    assert "training loader DataLoader(Rows): its order is not that of the run that" in said[0]


def resume_on_other_rows(folder: str) -> list[str]:
    first, others = range(NUM_ROWS), range(NUM_ROWS - 1, -1, -1)
    made = iter([first, others])
    return interrupt(
        "zero3",
        folder,
        "on_train_batch_end",
        [5],
        make=lambda: DataLoader(Subset(Rows(NUM_ROWS), next(made)), batch_size=2),
    )


def test_other_samples_in_the_same_places_are_noticed(tmp_path: Path) -> None:
    (said,) = ranks(1).run(resume_on_other_rows, str(tmp_path))
    assert any("it has samples of Subset of" in text for text in said), said


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        rows = Rows(NUM_ROWS)
        return (rows[i] for i in range(NUM_ROWS))

    def __len__(self) -> int:
        return NUM_ROWS


class Stateful(DataLoader):
    """A loader that keeps its own position."""

    start = 0

    def __iter__(self) -> Iterator[Any]:
        return self._from(super().__iter__())

    def _from(self, batches: Iterator[Any]) -> Iterator[Any]:
        for index, batch in enumerate(batches):
            if index >= self.start:
                self.start = index + 1
                yield batch
        self.start = 0

    def state_dict(self) -> dict[str, Any]:
        return {"start": self.start}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.start = state_dict["start"]


class Unsized(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        return iter(Stream())


def stream() -> DataLoader:
    return DataLoader(Stream(), batch_size=2)


def unsized() -> DataLoader:
    return Stateful(Unsized(), batch_size=2)


def stateful() -> DataLoader:
    return Stateful(Rows(NUM_ROWS), batch_size=2)


def paired(mode: str) -> CombinedLoader:
    short = noisy.loader(Rows(12), shuffle=True)
    return CombinedLoader([noisy.loader(Rows(NUM_ROWS), shuffle=True), short], mode)


class Paired(Noisy):
    def training_step(self, batch: Any, index: int) -> Any:
        (first, x), second = batch
        number = first if second is None else first + 100 * second[0][: len(first)]
        return super().training_step((number, x), index)


def interrupt_other(folder: str, kind: str, **options: Any) -> list[str]:
    make = {"stream": stream, "stateful": stateful, "unsized": unsized}[kind]
    return interrupt(
        "zero3", folder, "on_train_batch_end", make=make, use_distributed_sampler=False, **options
    )


def test_a_loader_that_cannot_go_on_is_named_and_what_repeats(tmp_path: Path) -> None:
    (wrong,) = ranks(1).run(interrupt_other, str(tmp_path), "stream", after=[5, 22])
    assert [text.split(":")[0] for text in wrong] == ["5.ckpt", "5.ckpt"]
    assert "training loader DataLoader(Stream): it cannot go on" in wrong[1]
    assert "its first 5 batches come twice" in wrong[1]
    assert "TokenDataModule" in wrong[1]


def test_a_loader_that_keeps_its_own_position_is_left_to_itself(tmp_path: Path) -> None:
    run_all(1, interrupt_other, str(tmp_path), "stateful", after=[5, 22, 30])


def test_a_batch_that_lightning_asks_for_ahead_is_told_to_be_left_out(tmp_path: Path) -> None:
    (wrong,) = ranks(1).run(
        interrupt_other, str(tmp_path), "unsized", after=[5], val_check_interval=1.0
    )
    assert any("Stateful(Unsized): has no length" in text for text in wrong)


def interrupt_paired(folder: str, mode: str) -> list[str]:
    Path(folder).mkdir(exist_ok=True)
    options = {"make": lambda: paired(mode), "use_distributed_sampler": False}
    saving = SaveAt(folder, "on_train_batch_end", [3, 6, 9, 22])
    whole = train("zero3", callbacks=[saving], module=Paired(), max_epochs=3, **options)
    wrong = []
    for path in sorted(Path(folder).iterdir()):
        resumed = train("zero3", resume=path, module=Paired(), max_epochs=3, **options)
        if not resumed.repeats(whole, batches=int(path.stem)):
            wrong.append(path.name)
    return wrong


@pytest.mark.parametrize("mode", ["max_size_cycle", "min_size", "max_size"])
def test_several_loaders_go_on_together(mode: str, tmp_path: Path) -> None:
    run_all(1, interrupt_paired, str(tmp_path), mode)
