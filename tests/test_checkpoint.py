"""Checkpoints: what is stored, under which names, and what a save leaves in its folder."""

import errno
import os
import re
import time
import warnings
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor

import zero_strategy
from tests import lit
from tests.counting import collectives
from tests.ranks import ranks
from tests.runs import FP32_TOLERANCE, ROWS, Run, assert_same, fit, refusal
from zero_strategy.checkpoint import storage
from zero_strategy.checkpoint.export import export
from zero_strategy.checkpoint.plain import changed, plain

NAMES = ("zero1", "zero2", "zero3")

pytestmark = pytest.mark.filterwarnings(
    # Lightning, in the plain process: a callback of the saved run is missing, a folder is in use.
    "ignore:Be aware that when using",
    "ignore:.*exists and is not empty",
    # torch, where a test writes a directory without any ranks.
    "ignore:.*assuming the intent is to save in a single process",
)


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def names_in(folder: str | Path) -> list[str]:
    return sorted(entry.name for entry in Path(folder).iterdir())


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
    path = tmp_path / "a.ckpt"
    storage.save(path, {}, plain({"value": value}))
    loaded = storage.load_meta(path)["value"]
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

    stored = storage.load_meta(Path(path))["hyper_parameters"]
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


def test_what_comes_back_as_another_type_is_named() -> None:
    value = {"a": Level.HIGH, "b": [1, Path("x")], "c": Settings(0.1, Path("x")), "d": (1.0, "y")}
    assert list(changed(value, "hp")) == ["hp.a (Level)", "hp.b[1] (PosixPath)", "hp.c (Settings)"]


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


def keep_one_while_saves_are_spoilt(folder: str) -> tuple[list[str], list[str]]:
    """Names and warnings of a run that keeps one checkpoint, whose second save goes bad at once."""
    write = storage.Save.write
    saves = []

    def spoil(save: storage.Save) -> None:
        write(save)
        saves.append(save.path)
        if len(saves) == 2 and dist.get_rank() == 0:
            os.truncate(save.path / "tensors-0.safetensors", 100)

    keeper = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=1)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(storage.Save, "write", spoil)
        run = lit.trainer("zero3", max_steps=2, callbacks=[keeper], enable_checkpointing=True)
        run.fit(lit.Lit(), lit.loader())
        dist.barrier()
    return names_in(folder), [str(w.message) for w in caught if "is kept" in str(w.message)]


def test_the_older_checkpoint_is_kept_where_the_newer_is_damaged(tmp_path: Path) -> None:
    names, said = ranks(2).run(keep_one_while_saves_are_spoilt, str(tmp_path))[0]
    assert names == ["step=1.ckpt", "step=2.ckpt"]
    assert len(said) == 1
    assert "step=1.ckpt is kept, since the newest one is damaged." in said[0]
    assert "tensors-0.safetensors has 100 bytes" in said[0]


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


def save_while_a_rank_has_no_room(path: str, rank: int) -> list[Any]:
    """What each rank is told, in how long, and what is found after it."""
    module, run = lit.Lit(), lit.trainer("zero3", max_steps=1)
    run.fit(module, lit.loader())
    run.save_checkpoint(path)
    first = lit.whole(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1.0)
    second = lit.whole(module)

    def no_room(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    begin = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == rank:
            patch.setattr(os, "write", no_room)
        with pytest.raises(RuntimeError) as caught:
            run.save_checkpoint(path)
    seconds = time.monotonic() - begin
    found = zero_strategy.load_state_dict(path)
    dist.barrier()
    run.save_checkpoint(path)
    return [str(caught.value), seconds, first, found, second, zero_strategy.load_state_dict(path)]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_without_room_is_named_on_all_and_the_earlier_checkpoint_stays(
    rank: int, tmp_path: Path
) -> None:
    path = str(tmp_path / "a.ckpt")
    for said, seconds, first, found, second, last in ranks(2).run(
        save_while_a_rank_has_no_room, path, rank
    ):
        assert said.startswith(f"{path}: rank {rank} could not write the checkpoint (OSError:")
        assert "No space left on device" in said
        assert seconds < 5
        assert equal(found, first)
        assert equal(last, second)
    assert names_in(tmp_path) == ["a.ckpt"]


# Export.


def test_export_refuses_another_ending_and_an_incomplete_directory(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"out\.bin'.* Use .*out\.ckpt\."):
        export(tmp_path, tmp_path / "out.bin")
    for name in ("out.ckpt", "out.safetensors"):
        with pytest.raises(ValueError, match=r"must be a checkpoint directory with manifest\.json"):
            export(tmp_path, tmp_path / name)
    with pytest.raises(ValueError, match=r"must be a checkpoint directory with manifest\.json"):
        zero_strategy.load_state_dict(tmp_path)
    assert list(tmp_path.iterdir()) == []
