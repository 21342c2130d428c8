"""Checkpoints: every way out and back in continues the run as it would have gone on.

Epochs have 3 steps and are saved at their end: Lightning replays an epoch that was left in the
middle, so only there does a resumed run see the batches of the uninterrupted one.
"""

import re
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BaseFinetuning, Callback, ModelCheckpoint
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor

import zero_strategy
from tests import lit
from tests.counting import collectives
from tests.ranks import ranks
from zero_strategy.checkpoint import storage
from zero_strategy.checkpoint.export import export
from zero_strategy.checkpoint.plain import plain

NAMES = ("zero1", "zero2", "zero3")
WORLD_SIZES = (1, 2, 4)
ROWS = 3 * lit.GLOBAL_BATCH
FP32_TOLERANCE = 2e-6  # see tests/test_parity.py

pytestmark = pytest.mark.filterwarnings(
    # Lightning, in the plain process: a callback of the saved run is missing, a folder is in use.
    "ignore:Be aware that when using",
    "ignore:.*exists and is not empty",
    # torch, where a test writes a directory without any ranks.
    "ignore:.*assuming the intent is to save in a single process",
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """All that a run of some epochs leaves behind, as whole tensors."""

    losses: list[float]
    weights: dict[str, Tensor]
    slots: dict[str, Tensor]
    lrs: list[float]


class SaveAfter(Callback):
    """Saves at the end of one epoch."""

    def __init__(self, epoch: int, path: str, *, weights_only: bool = False) -> None:
        self.epoch, self.path, self.weights_only = epoch, path, weights_only

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == self.epoch:
            trainer.save_checkpoint(self.path, self.weights_only)


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def fit(
    strategy: Any,
    *,
    epochs: int = 2,
    module: pl.LightningModule | None = None,
    save: str | None = None,
    save_after: int = 0,
    resume: str | None = None,
    callbacks: list[Callback] | None = None,
    data: Any = None,
    weights_only: bool | None = None,
    **options: Any,
) -> Run:
    """Train from the start or from a checkpoint; ranks in a group must call it together."""
    module = module or lit.Lit()
    callbacks = [*(callbacks or []), *([SaveAfter(save_after, save)] if save else [])]
    run = lit.trainer(strategy, max_epochs=epochs, callbacks=callbacks, **options)
    data = data or lit.loader(ROWS)
    run.fit(module, data, ckpt_path=resume, weights_only=weights_only)
    names = {id(p): n for n, p in module.named_parameters()}
    return Run(
        losses=module.losses,
        weights=lit.whole(module),
        slots={
            f"{i}.{names[id(p)]}.{slot}": whole(value)
            for i, optimizer in enumerate(run.optimizers)
            for p, slots in optimizer.state.items()
            for slot, value in slots.items()
        },
        lrs=[group["lr"] for optimizer in run.optimizers for group in optimizer.param_groups],
    )


def assert_same(run: Run, expected: Run, *, first: int = 0) -> None:
    """The run repeats the expected one from step `first` on."""
    wanted_losses = pytest.approx(expected.losses[first:], rel=FP32_TOLERANCE, abs=FP32_TOLERANCE)
    assert run.losses == wanted_losses
    assert run.lrs == pytest.approx(expected.lrs, rel=1e-12)
    for found, wanted in ((run.weights, expected.weights), (run.slots, expected.slots)):
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(
                found[name], value, rtol=FP32_TOLERANCE, atol=FP32_TOLERANCE, msg=name
            )


@cache
def uninterrupted() -> Run:
    """One plain process over two epochs."""
    return fit("auto")


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def names_in(folder: str | Path) -> list[str]:
    return sorted(entry.name for entry in Path(folder).iterdir())


def refusal(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The message this rank is refused with, or nothing."""
    try:
        call(*args, **kwargs)
    except (ValueError, KeyError) as error:
        return str(error)
    return ""


# Other ranks, other programs.


def fit_each(strategies: list[str], paths: list[str]) -> list[Run]:
    return [fit(strategy, resume=path) for strategy, path in zip(strategies, paths, strict=True)]


def test_a_run_resumed_at_any_stage_on_any_number_of_ranks_repeats_the_uninterrupted_one(
    tmp_path: Path,
) -> None:
    paths = [str(tmp_path / f"{name}.ckpt") for name in NAMES]
    saving = []
    for world_size, name, path in zip(WORLD_SIZES, NAMES, paths, strict=True):
        saving.append(ranks(world_size).run(fit, name, save=path)[0])
        assert_same(saving[-1], uninterrupted())
    for index, world_size in enumerate(WORLD_SIZES):
        # A Latin square: every two numbers of ranks meet, and so do every two stages.
        strategies = [NAMES[(index + other) % 3] for other in range(3)]
        resumed = ranks(world_size).run(fit_each, strategies, paths)[0]
        for run in resumed:
            assert_same(run, uninterrupted(), first=3)
        # On as many ranks as before, sums are taken in the same order.
        assert resumed[index].losses == saving[index].losses[3:]


def test_a_plain_file_resumes_sharded_and_an_exported_directory_resumes_plain(
    tmp_path: Path,
) -> None:
    file, folder, out = (str(tmp_path / n) for n in ("plain.ckpt", "sharded.ckpt", "out.ckpt"))
    fit("auto", epochs=1, save=file)
    assert_same(ranks(2).run(fit, "zero3", resume=file)[0], uninterrupted(), first=3)
    ranks(2).run(fit, "zero3", epochs=1, save=folder)
    export(folder, out)
    assert_same(fit("auto", resume=out), uninterrupted(), first=3)
    # A file that came from a directory is a plain one in every respect.
    assert_same(ranks(2).run(fit, "zero3", resume=out)[0], uninterrupted(), first=3)


def evaluate(strategy: str, path: str | None, module: pl.LightningModule) -> list[Any]:
    """Validation loss, test loss and predictions of the weights in a checkpoint."""
    data = lit.loader(24)
    run = lit.trainer(strategy)
    val = run.validate(module, data, ckpt_path=path, verbose=False)
    test = run.test(module, data, ckpt_path=path, verbose=False)
    rows = torch.cat(run.predict(module, data, ckpt_path=path))
    return [val[0]["val_loss"], test[0]["test_loss"], rows]


def evaluate_fresh(strategy: str, path: str) -> list[Any]:
    return evaluate(strategy, path, lit.Lit(seed=99))


def test_a_directory_loads_in_every_run_of_a_trainer_and_into_a_plain_module(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.ckpt"
    weights = ranks(2).run(fit, "zero3", epochs=1, save=str(path))[0].weights
    module = lit.Lit(seed=99)
    module.load_state_dict(zero_strategy.load_state_dict(path))
    for name, value in weights.items():
        assert torch.equal(module.get_parameter(name), value)
    expected = evaluate("auto", None, module)
    for world_size, name in [(2, "zero1"), (2, "zero3"), (4, "zero2")]:
        results = ranks(world_size).run(evaluate_fresh, name, str(path))
        for val, test, _ in results:
            assert [val, test] == pytest.approx(expected[:2], rel=FP32_TOLERANCE)
        rows = torch.stack([rows for *_, rows in results], dim=1).flatten(0, 1)
        assert torch.equal(rows, expected[2])
    export(path, tmp_path / "a.safetensors")
    assert load_file(tmp_path / "a.safetensors").keys() == module.state_dict().keys()
    for name, value in load_file(tmp_path / "a.safetensors").items():
        assert torch.equal(module.state_dict()[name], value)


def test_export_refuses_another_ending_and_an_incomplete_directory(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"out\.bin'.* Use .*out\.ckpt\."):
        export(tmp_path, tmp_path / "out.bin")
    for name in ("out.ckpt", "out.safetensors"):
        with pytest.raises(ValueError, match=r"must be a checkpoint directory with meta\.pt"):
            export(tmp_path, tmp_path / name)
    with pytest.raises(ValueError, match=r"must be a checkpoint directory with meta\.pt"):
        zero_strategy.load_state_dict(tmp_path)
    assert list(tmp_path.iterdir()) == []


# Names.


class Stateful(nn.Linear):
    """Keeps state beside its tensors, as a dictionary or as bytes."""

    def __init__(self, state: Any) -> None:
        super().__init__(3, 2)
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


class Odd(lit.Lit):
    """Tied, frozen and wrapped modules, buffers of both kinds, and extra state."""

    def __init__(self, seen: int = 0) -> None:
        super().__init__(replace(lit.TINY, tied=True))
        self.gpt.layers[1] = checkpoint_wrapper(self.gpt.layers[1])
        self.frozen = nn.Linear(5, 3).requires_grad_(False)
        self.register_buffer("steps", torch.tensor(seen))
        self.register_buffer("table", torch.full((3, 2), float(seen)))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.described = Stateful({"seen": seen, "kinds": ["a", "b"]})
        self.packed = Stateful(torch.arange(seen, dtype=torch.uint8))

    def loss(self, row_BT: Tensor) -> Tensor:
        extra = self.packed(
            self.described(self.frozen(self.table.new_ones(5)).sum().expand(3))[[0, 1, 1]]
        )
        return super().loss(row_BT) + extra.square().sum()


def odd_names(strategy: Any, path: str, resume: str | None = None) -> list[Any]:
    if strategy == "compiled":
        torch._dynamo.config.disable = True  # names change at compile(), before any code runs
        strategy = zero_strategy.ZeroStrategy(compile="blocks")
    try:
        module = Odd(0 if resume else 4)
        fit(strategy, module=module, epochs=2 if resume else 1, save=path, resume=resume)
    finally:
        torch._dynamo.config.disable = False
    state = [module.steps.item(), module.table.tolist(), module.described.state]
    return [*state, module.packed.state.tolist()]


@pytest.mark.parametrize("strategy", ["zero1", "zero3", "compiled"])
def test_stored_names_are_the_plain_modules_whatever_wraps_it(
    strategy: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "a.ckpt")
    ranks(2).run(odd_names, strategy, path)
    expected = Odd(4).state_dict()
    assert zero_strategy.load_state_dict(path).keys() == expected.keys()
    Odd(0).load_state_dict(zero_strategy.load_state_dict(path))
    names = [n for n in storage.stored(Path(path)) if n.startswith("optim.")]
    trained = {re.sub(r"^optim\.0\.|\.[^.]+$", "", name) for name in names}
    # A tied weight is stepped once, under the first of its names.
    stepped = {n for n in expected if n.endswith(("weight", "bias"))} - {"gpt.head.weight"}
    assert trained == {n for n in stepped if not n.startswith("frozen")}


@pytest.mark.parametrize("strategy", ["zero3", "compiled"])
def test_buffers_and_extra_state_come_back(strategy: str, tmp_path: Path) -> None:
    first, second, out = (str(tmp_path / n) for n in ("a.ckpt", "b.ckpt", "out.ckpt"))
    kept = [4, [[4.0, 4.0]] * 3, {"seen": 4, "kinds": ["a", "b"]}, [0, 1, 2, 3]]
    for state in ranks(2).run(odd_names, strategy, first):
        assert state == kept
    for state in ranks(2).run(odd_names, strategy, second, first):
        assert state == kept
    export(first, out)
    assert odd_names("auto", str(tmp_path / "plain.ckpt"), out) == kept


# Metadata.


class Colour(StrEnum):
    RED = "red"


class Level(IntEnum):
    HIGH = 3


Point = namedtuple("Point", "x y")


@dataclass
class Settings:
    rate: float
    folder: Path


METADATA = {
    "number": (3, 3),
    "infinity": (float("-inf"), float("-inf")),
    "complex": (1 + 2j, 1 + 2j),
    "bytes": (b"\x00\xff", b"\x00\xff"),
    "none": (None, None),
    "enum": (Colour.RED, "red"),
    "int enum": (Level.HIGH, 3),
    "enum keys": ({Colour.RED: 1, Level.HIGH: 2}, {"red": 1, 3: 2}),
    "tuple keys": ({(1, "a"): 1}, {(1, "a"): 1}),
    "enum in tuple keys": ({(Colour.RED, np.int64(2)): 1}, {("red", 2): 1}),
    "path": (Path("a/b"), "a/b"),
    "path keys": ({Path("a"): 1}, {"a": 1}),
    "numpy number": (np.float32(0.5), 0.5),
    "numpy keys": ({np.int64(3): 1, np.str_("s"): 2}, {3: 1, "s": 2}),
    "numpy text": (np.str_("text"), "text"),
    "dtype": (torch.bfloat16, torch.bfloat16),
    "device": (torch.device("cpu"), "cpu"),
    "size": (torch.Size([2, 3]), (2, 3)),
    "set": ({1, 2}, {1, 2}),
    "frozen set": (frozenset({1}), {1}),
    "named tuple": (Point(1, [Point(2, 3)]), (1, [(2, 3)])),
    "ordered": (OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
    "default": (defaultdict(list, {"a": [1]}), {"a": [1]}),
    "dataclass": (Settings(0.1, Path("x")), {"rate": 0.1, "folder": "x"}),
    "omegaconf": (OmegaConf.create({"a": [1, "${b}"], "b": 2}), {"a": [1, "${b}"], "b": 2}),
}


@pytest.mark.parametrize("kind", METADATA)
def test_metadata_becomes_plain_and_loads_without_running_code(kind: str, tmp_path: Path) -> None:
    value, expected = METADATA[kind]
    torch.save(plain({"value": value}), tmp_path / "meta.pt")
    loaded = torch.load(tmp_path / "meta.pt", weights_only=True)["value"]
    assert loaded == expected
    assert type(loaded) is type(expected)


class Configured(lit.Lit):
    """Takes its settings from OmegaConf, as one argument or spread out."""

    def __init__(self, cfg: DictConfig) -> None:
        super().__init__(replace(lit.TINY, num_layers=cfg.model.num_layers), lr=cfg.optim.lr)
        self.save_hyperparameters()


class Spread(Configured):
    def __init__(self, cfg: DictConfig) -> None:
        lit.Lit.__init__(self, replace(lit.TINY, num_layers=cfg.model.num_layers), lr=cfg.optim.lr)
        self.save_hyperparameters(cfg)


def config() -> DictConfig:
    return OmegaConf.create(
        {"model": {"num_layers": 2, "same": "${model.num_layers}"}, "optim": {"lr": 0.004}}
    )


def fit_configured(kind: type[Configured], strategy: str, **options: Any) -> Run:
    return fit(strategy, module=kind(config()), **options)


@pytest.mark.parametrize("kind", [Configured, Spread])
def test_omegaconf_hyper_parameters_come_back(kind: type[Configured], tmp_path: Path) -> None:
    path, out = str(tmp_path / "a.ckpt"), str(tmp_path / "out.ckpt")
    expected = fit_configured(kind, "auto")
    ranks(2).run(fit_configured, kind, "zero3", epochs=1, save=path)
    resumed = ranks(2).run(fit_configured, kind, "zero3", resume=path)[0]
    assert_same(resumed, expected, first=3)

    meta = torch.load(Path(path) / "meta.pt", weights_only=True)
    stored = meta["hyper_parameters"]
    wanted = OmegaConf.to_container(config(), resolve=False)
    assert (stored["cfg"] if kind is Configured else stored) == wanted

    export(path, out)
    assert_same(fit_configured(kind, "auto", resume=out, weights_only=False), expected, first=3)


def test_an_exported_file_builds_its_module_from_omegaconf_as_a_plain_one_does(
    tmp_path: Path,
) -> None:
    path, out = str(tmp_path / "a.ckpt"), str(tmp_path / "out.ckpt")
    run = ranks(2).run(fit_configured, Configured, "zero3", epochs=1, save=path)[0]
    export(path, out)
    module = Configured.load_from_checkpoint(out, weights_only=False)
    assert module.hparams == Configured(config()).hparams
    assert equal(lit.whole(module), run.weights)


def test_a_plain_file_with_omegaconf_in_it_resumes_when_it_is_trusted(tmp_path: Path) -> None:
    file = str(tmp_path / "file.ckpt")
    expected = fit_configured(Configured, "auto", save=file)
    for strategy, group in (("auto", None), ("zero3", ranks(2))):
        run = group.run if group else lambda f, *args, **kwargs: [f(*args, **kwargs)]
        call = {"resume": file, "weights_only": False}
        assert_same(run(fit_configured, Configured, strategy, **call)[0], expected, first=3)


class Unplain(lit.Lit):
    def __init__(self, nested: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters({"nested": [1, {"act": nn.GELU()}]})


def save_unplain(path: str) -> tuple[str, list[str]]:
    run = lit.trainer("zero3", max_steps=1)
    run.fit(Unplain(), lit.loader())
    return refusal(run.save_checkpoint, path), names_in(Path(path).parent)


def test_unplain_hyper_parameters_are_refused_with_their_path(tmp_path: Path) -> None:
    for message, left in ranks(2).run(save_unplain, str(tmp_path / "a.ckpt")):
        assert "hyper_parameters.nested[1].act is a torch.nn.modules.activation.GELU" in message
        assert "save_hyperparameters(ignore=[...])" in message
        assert left == []


# ModelCheckpoint.


class Scored(lit.Lit):
    """Validation losses that rise and fall, so that the best epoch is not the last."""

    SHIFTS = (5.0, 3.0, 8.0, 1.0, 4.0, 6.0)

    def validation_step(self, batch: Tensor, index: int) -> None:
        shift = self.SHIFTS[min(self.trainer.current_epoch, 5)]
        self.log("val_loss", self.loss(batch) + shift, sync_dist=True)


def keep_best(
    strategy: str, folder: str, *, epochs: int, resume: str | None = None, last: Any = True
) -> dict[str, Any]:
    """What a ModelCheckpoint kept, and what its checkpoints are good for."""
    keeping = ModelCheckpoint(
        folder, filename="{epoch}", monitor="val_loss", save_top_k=2, save_last=last
    )
    options: dict[str, Any] = {"enable_checkpointing": True, "num_sanity_val_steps": 0}
    run = lit.trainer(strategy, max_epochs=epochs, callbacks=[keeping], **options)
    module = Scored()
    run.fit(module, lit.loader(ROWS), lit.loader(24), ckpt_path=resume)
    after = {
        which: run.validate(module, lit.loader(24), ckpt_path=which, verbose=False)
        for which in ("best", "last")
    }
    return {
        "kept": names_in(folder),
        "best": keeping.best_model_path,
        "last": keeping.last_model_path,
        "score": float(keeping.best_model_score or 0.0),
        "scores": sorted((Path(p).name, float(s)) for p, s in keeping.best_k_models.items()),
        "validated": {which: metrics[0]["val_loss"] for which, metrics in after.items()},
        "losses": module.losses,
    }


@pytest.mark.parametrize("last", [True, "link"])
def test_model_checkpoint_keeps_what_it_keeps_in_a_plain_process(last: Any, tmp_path: Path) -> None:
    expected = keep_best("auto", str(tmp_path / "plain"), epochs=5, last=last)
    assert expected["kept"] == ["epoch=1.ckpt", "epoch=3.ckpt", "last.ckpt"]
    folder = tmp_path / "zero3"
    (folder / "epoch=0-notes").mkdir(parents=True)
    (folder / "epoch=2.ckpt.json").write_text("{}")
    foreign = {"epoch=0-notes", "epoch=2.ckpt.json"}
    ranks(2).run(keep_best, "zero3", str(folder), epochs=2, last=last)
    resume = str(folder / "epoch=1.ckpt")
    results = ranks(4).run(keep_best, "zero3", str(folder), epochs=5, last=last, resume=resume)
    for found in results:
        assert sorted(set(found["kept"]) - foreign) == expected["kept"]
        assert foreign < set(found["kept"])
        assert found["best"] == str(folder / "epoch=3.ckpt")
        assert Path(found["last"]).resolve().is_dir()
        for key in ("score", "validated"):
            assert found[key] == pytest.approx(expected[key], rel=FP32_TOLERANCE), key
        assert [n for n, _ in found["scores"]] == [n for n, _ in expected["scores"]]
        assert found["losses"] == pytest.approx(expected["losses"][6:], rel=FP32_TOLERANCE)


def directory(path: Path) -> Path:
    """A complete checkpoint of one tensor, written by this process."""
    storage.save(path, {"model.w": torch.ones(3)}, {})
    return path


def test_removing_deletes_a_checkpoint_and_never_anything_else(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign.ckpt"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("years of work")
    ours = directory(tmp_path / "ours.ckpt")
    link = tmp_path / "last.ckpt"
    link.symlink_to(ours.name)
    file = tmp_path / "file.ckpt"
    file.write_bytes(b"a plain Lightning file")

    storage.remove(foreign)
    storage.remove(tmp_path / "gone.ckpt")
    assert (foreign / "thesis.tex").exists()
    storage.remove(link)
    assert not link.is_symlink()
    assert storage.is_checkpoint(ours)
    storage.remove(file)
    storage.remove(ours)
    assert names_in(tmp_path) == ["foreign.ckpt"]


def test_saving_over_a_directory_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    foreign = tmp_path / "results"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("years of work")
    with pytest.raises((ValueError, OSError), match="results"):
        directory(foreign)
    assert (foreign / "thesis.tex").exists()


def test_saving_over_a_link_leaves_its_target_and_no_remains(tmp_path: Path) -> None:
    ours = directory(tmp_path / "step-1.ckpt")
    (tmp_path / "last.ckpt").symlink_to(ours.name)
    directory(tmp_path / "last.ckpt")
    assert storage.is_checkpoint(ours)
    assert storage.is_checkpoint(tmp_path / "last.ckpt")
    assert names_in(tmp_path) == ["last.ckpt", "step-1.ckpt"]


# Saving.


def count_while_saving(name: str, path: str) -> tuple[int, int, list[Any]]:
    run = lit.trainer(name, max_steps=2)
    module = lit.Lit()
    with collectives() as training:
        run.fit(module, lit.loader())
    with collectives() as saving:
        run.save_checkpoint(path)
    return training["all_gather"], saving["all_gather"], [type(p) for p in module.parameters()]


@pytest.mark.parametrize("name", NAMES)
def test_saving_gathers_no_parameter(name: str, tmp_path: Path) -> None:
    for training, saving, kinds in ranks(2).run(count_while_saving, name, str(tmp_path / "a.ckpt")):
        assert training > 0
        assert saving == 0
        assert all(issubclass(kind, DTensor) for kind in kinds)


class Killed(BaseException):
    """Stands for the end of the process: nothing may catch it."""


def cut_off(trainer: pl.Trainer, path: str, moment: str) -> None:
    """Save, but die at a moment of the first rank's renaming."""
    swap, rename = storage._swap, Path.rename

    def die(*_: Any) -> None:
        raise Killed

    def rename_or_die(source: Path, target: Path) -> Path:
        into_place = str(target) == path
        if into_place and moment == "between the renames":
            raise Killed
        rename(source, target)
        if into_place:
            raise Killed
        return target

    if moment == "before the renames":
        storage._swap = die
    else:
        Path.rename = rename_or_die  # type: ignore[method-assign]
    try:
        trainer.save_checkpoint(path)
    except Killed:
        # The others wait for this rank at the end of the trainer's save.
        dist.barrier()
    finally:
        storage._swap, Path.rename = swap, rename  # type: ignore[method-assign]


def save_and_be_cut_off(path: str, moment: str) -> list[dict[str, Tensor]]:
    """Weights of a first save, of a second one that is cut off, and what is found after each."""
    module, run = lit.Lit(), lit.trainer("zero3", max_steps=1)
    run.fit(module, lit.loader())
    run.save_checkpoint(path)
    first = lit.whole(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1.0)
    second = lit.whole(module)
    cut_off(run, path, moment)
    run.validate(module, lit.loader(12), ckpt_path=path, verbose=False)
    found = lit.whole(module)
    run.save_checkpoint(path)
    return [first, second, found, zero_strategy.load_state_dict(path)]


@pytest.mark.parametrize(
    "moment", ["before the renames", "between the renames", "after the renames"]
)
def test_a_save_that_was_cut_off_leaves_a_whole_checkpoint_under_its_name(
    moment: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "a.ckpt")
    for first, second, found, last in ranks(2).run(save_and_be_cut_off, path, moment):
        assert equal(found, second if moment == "after the renames" else first)
        assert equal(last, found)
    assert names_in(tmp_path) == ["a.ckpt"]


# Refusals.


class Wider(lit.Lit):
    def __init__(self) -> None:
        super().__init__(replace(lit.TINY, intermediate_size=41))


class Deeper(lit.Lit):
    """One layer more, and one module renamed."""

    def __init__(self) -> None:
        super().__init__(replace(lit.TINY, num_layers=4))
        self.gpt.normed = self.gpt.norm
        del self.gpt.norm

    def forward(self, token_BT: Tensor) -> Tensor:
        self.gpt.__dict__["norm"] = self.gpt.normed
        return super().forward(token_BT)


def validate(
    path: str, kind: type[lit.Lit], strict: bool = True, precision: str = "32-true"
) -> tuple[str, dict[str, Tensor]]:
    """The message of a refusal, and the weights after."""
    module = kind()
    module.strict_loading = strict
    run = lit.trainer("zero3", precision=precision)
    message = refusal(run.validate, module, lit.loader(24), ckpt_path=path, verbose=False)
    return message, lit.whole(module)


@pytest.mark.parametrize("source", ["directory", "file"])
def test_weights_of_another_model_are_refused_by_name_and_loose_names_only_when_asked(
    source: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "a.ckpt")
    if source == "directory":
        stored = ranks(2).run(fit, "zero3", epochs=1, save=path)[0].weights
    else:
        stored = fit("auto", epochs=1, save=path).weights
    for strict in (True, False):
        for message, _ in ranks(2).run(validate, path, Wider, strict):
            assert re.search(
                r"model\.gpt\.layers\.0\.feed_forward\.down\.weight: stored as \(24, 37\).*"
                r"must be \(24, 41\)",
                message,
            )
    for message, _ in ranks(2).run(validate, path, Deeper):
        assert "model.gpt.layers.3.attention.qkv.weight: missing in the checkpoint" in message
        assert "(nearest there: gpt.norm.weight)" in message
        assert "model.gpt.norm.weight: in the checkpoint, not in the module" in message
        assert "strict_loading = False" in message
    for message, weights in ranks(2).run(validate, path, Deeper, strict=False):
        assert message == ""
        common = weights.keys() & stored.keys()
        assert len(common) == len(stored) - 1
        assert all(torch.equal(weights[n], stored[n]) for n in common)
    if source == "directory":
        for message, _ in ranks(2).run(validate, path, lit.Lit, precision="bf16-true"):
            assert "stored as (61, 24) torch.float32, must be (61, 24) torch.bfloat16" in message


def resume_weights_only(path: str) -> tuple[list[Any], str]:
    return evaluate_fresh("zero3", path), refusal(fit, "zero3", resume=path)


def save_weights_only(path: str) -> dict[str, Tensor]:
    return fit("zero3", epochs=1, callbacks=[SaveAfter(0, path, weights_only=True)]).weights


def test_weights_alone_load_for_evaluation_and_say_what_they_lack_for_training(
    tmp_path: Path,
) -> None:
    path = str(tmp_path / "a.ckpt")
    ranks(2).run(save_weights_only, path)
    module = lit.Lit(seed=99)
    module.load_state_dict(zero_strategy.load_state_dict(path))
    expected = evaluate("auto", None, module)
    for found, message in ranks(2).run(resume_weights_only, path):
        assert found[:2] == pytest.approx(expected[:2], rel=FP32_TOLERANCE)
        assert "optimizer" in message
        assert "weights_only" in message or "weights only" in message
    export(path, tmp_path / "out.ckpt")
    out = str(tmp_path / "out.ckpt")
    assert evaluate("auto", out, lit.Lit(seed=99))[:2] == pytest.approx(expected[:2])


# Optimizers that differ from one run to the next.


class Unscheduled(lit.Lit):
    def configure_optimizers(self) -> Any:
        return super().configure_optimizers()["optimizer"]


def fit_unscheduled(strategy: str, *, scheduled: bool, **options: Any) -> Run:
    return fit(strategy, module=(lit.Lit if scheduled else Unscheduled)(), **options)


@pytest.mark.parametrize("scheduled_first", [True, False])
def test_a_scheduler_may_come_or_go_between_runs(scheduled_first: bool, tmp_path: Path) -> None:
    # A scheduler, and LearningRateFinder, put `initial_lr` into the groups.
    expected: list[Run] = []
    for strategy in ("auto", "zero3"):
        path = str(tmp_path / f"{strategy}.ckpt")
        run = ranks(2).run if strategy == "zero3" else lambda f, *a, **k: [f(*a, **k)]
        run(fit_unscheduled, strategy, scheduled=scheduled_first, epochs=1, save=path)
        resumed = run(fit_unscheduled, strategy, scheduled=not scheduled_first, resume=path)[0]
        expected.append(resumed)
    assert_same(expected[1], expected[0])


class Grown(lit.Lit):
    """A rate that falls tenfold an epoch, over parameters of which some may be new."""

    def __init__(self, *, grown: bool = True) -> None:
        super().__init__(lr=1e-2)
        if grown:
            self.adapter = nn.Linear(3, 3)
            self.strict_loading = False

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1)]


def fit_grown(strategy: str, *, grown: bool, **options: Any) -> Run:
    return fit(strategy, module=Grown(grown=grown), **options)


def test_a_group_that_gained_a_parameter_keeps_its_learning_rate(tmp_path: Path) -> None:
    path = str(tmp_path / "a.ckpt")
    expected = ranks(2).run(fit_grown, "zero3", grown=False, save=path)[0]
    assert expected.lrs == pytest.approx([1e-2 * 0.1**2])
    for run in ranks(2).run(fit_grown, "zero3", grown=True, resume=path):
        assert run.lrs == pytest.approx(expected.lrs)
        assert run.losses == pytest.approx(expected.losses[3:], rel=FP32_TOLERANCE)


class TwoPlayers(pl.LightningModule):
    """Two optimizers with schedulers, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(3)
        self.maker = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 9))
        self.judge = nn.Sequential(nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 1))
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, index: int) -> None:
        rows = batch.float() / lit.TINY.vocab_size
        made = self.maker(rows[:, :5])
        self._step(1, self.judge(made.detach()).mean() - self.judge(rows[:, 5:]).mean())
        self._step(0, -self.judge(self.maker(rows[:, :5])).mean())

    def _step(self, which: int, loss: Tensor) -> None:
        optimizer, scheduler = self.optimizers()[which], self.lr_schedulers()[which]
        self.toggle_optimizer(optimizer)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        scheduler.step()
        self.untoggle_optimizer(optimizer)
        self.losses.append(float(self.trainer.strategy.reduce(loss.detach().clone())))

    def configure_optimizers(self) -> Any:
        optimizers = [
            torch.optim.Adam(self.maker.parameters(), lr=2e-3),
            torch.optim.SGD(self.judge.parameters(), lr=3e-2, momentum=0.9),
        ]
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in optimizers]


def fit_players(strategy: str, **options: Any) -> Run:
    return fit(strategy, module=TwoPlayers(), **options)


def fit_one_player(resume: str) -> str:
    module = TwoPlayers()
    module.configure_optimizers = lambda: torch.optim.Adam(module.maker.parameters())
    return refusal(fit, "zero3", module=module, resume=resume)


def test_several_optimizers_resume(tmp_path: Path) -> None:
    path, out = str(tmp_path / "a.ckpt"), str(tmp_path / "out.ckpt")
    expected = fit_players("auto")
    ranks(2).run(fit_players, "zero3", epochs=1, save=path)
    assert_same(ranks(4).run(fit_players, "zero2", resume=path)[0], expected, first=6)
    export(path, out)
    assert_same(fit_players("auto", resume=out), expected, first=6)
    for message in ranks(2).run(fit_one_player, path):
        assert "the checkpoint holds 2 optimizers, must be 1" in message


class Unfreezing(BaseFinetuning):
    """The blocks stay frozen for one epoch, then join as a parameter group of their own."""

    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        self.freeze(pl_module.gpt.layers)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.gpt.layers, optimizer, lr=2e-3)
        if epoch > 1:
            self.make_trainable(pl_module.gpt.layers)


class HeadFirst(lit.Lit):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr)


def fit_unfreezing(strategy: str, **options: Any) -> Run:
    return fit(strategy, module=HeadFirst(), epochs=3, callbacks=[Unfreezing()], **options)


def test_a_parameter_group_that_joined_late_resumes(tmp_path: Path) -> None:
    path, out = str(tmp_path / "a.ckpt"), str(tmp_path / "out.ckpt")
    expected = fit_unfreezing("auto")
    for run in ranks(2).run(fit_unfreezing, "zero3", save=path, save_after=1):
        assert_same(run, expected)
    export(path, out)
    assert_same(fit_unfreezing("auto", resume=out), expected, first=6)
    for run in ranks(2).run(fit_unfreezing, "zero3", resume=path):
        assert_same(run, expected, first=6)
