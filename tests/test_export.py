"""Reading and exporting checkpoints: every odd path is told apart, and none is a traceback."""

import os
import stat
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file
from torch import Tensor

import zero_strategy
from tests import lit
from tests.ranks import ranks
from tests.runs import fit, refusal
from zero_strategy.checkpoint import storage
from zero_strategy.checkpoint.export import export
from zero_strategy.experiments.cli import main

pytestmark = [
    # torch, where a test writes a directory without any ranks.
    pytest.mark.filterwarnings("ignore:.*assuming the intent is to save in a single process"),
]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A complete checkpoint of one weight, written by this process."""
    path = tmp_path / "step-1.ckpt"
    meta: dict[str, Any] = {"model_extra_state": {}, "omegaconf_at": [], "sharded_state": []}
    storage.save(path, {"model.w": torch.arange(3.0)}, meta)
    return path


def weights(file: Path) -> dict[str, Tensor]:
    if file.suffix == ".ckpt":
        return torch.load(file, weights_only=True)["state_dict"]
    from safetensors.torch import load_file

    return load_file(file)


# Where an export may go.


@pytest.mark.parametrize("suffix", [".ckpt", ".safetensors"])
def test_an_export_makes_its_folder_and_has_the_mode_that_the_umask_gives(
    suffix: str, checkpoint: Path, tmp_path: Path
) -> None:
    out = tmp_path / "new" / "folder" / f"model{suffix}"
    before = os.umask(0o027)
    try:
        export(checkpoint, out)
    finally:
        os.umask(before)
    assert torch.equal(weights(out)["w"], torch.arange(3.0))
    assert stat.S_IMODE(out.stat().st_mode) == 0o640
    assert [entry.name for entry in out.parent.iterdir()] == [out.name]


@pytest.mark.parametrize("suffix", [".ckpt", ".safetensors"])
def test_an_export_onto_a_directory_or_into_a_checkpoint_is_refused(
    suffix: str, checkpoint: Path, tmp_path: Path
) -> None:
    folder = tmp_path / f"folder{suffix}"
    folder.mkdir()
    onto_itself = [checkpoint] if suffix == checkpoint.suffix else []
    for out in (folder, checkpoint / f"model{suffix}", *onto_itself):
        with pytest.raises(ValueError, match=rf"must be a file .* Use .*step-1-exported\{suffix}"):
            export(checkpoint, out)
    assert torch.equal(zero_strategy.load_state_dict(checkpoint)["w"], torch.arange(3.0))


def test_an_export_that_cannot_be_written_leaves_the_file_that_was_there(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.ckpt"
    out.write_text("an earlier export")

    def disk_full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", disk_full)
    with pytest.raises(ValueError, match=r"out\.ckpt': cannot be written .*No space left"):
        export(checkpoint, out)
    assert out.read_text() == "an earlier export"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["out.ckpt", "step-1.ckpt"]
    with pytest.raises(ValueError, match=r"cannot be written"):
        export(checkpoint, out / "below" / "a-file.ckpt")


def test_the_command_prints_one_line_and_no_traceback(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for source, out in (
        (tmp_path / "gone.ckpt", tmp_path / "out.ckpt"),
        (checkpoint, checkpoint),
        (checkpoint, checkpoint / "manifest.json" / "out.ckpt"),
    ):
        assert main(["checkpoint", "export", str(source), str(out)]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


# What is read.


def read_by_trainer(path: Path) -> None:
    lit.trainer("zero3", max_steps=1).fit(lit.Lit(), lit.loader(), ckpt_path=str(path))


def read_by_export(path: Path) -> None:
    export(path, path.with_name("out.ckpt"))


READERS: list[Callable[[Path], Any]] = [
    storage.load_meta,
    zero_strategy.load_state_dict,
    read_by_export,
    read_by_trainer,
]


@pytest.mark.parametrize("read", READERS)
def test_a_path_that_does_not_exist_is_called_so_and_the_nearest_is_named(
    read: Callable[[Path], Any], checkpoint: Path
) -> None:
    missing = checkpoint.with_name("step-2.ckpt")
    message = refused(read, missing)
    assert message.startswith(f"{missing}: does not exist")
    assert message.endswith(f"Use {checkpoint}.")


@pytest.mark.parametrize("read", READERS[:3])
def test_a_plain_file_is_told_from_a_directory(read: Callable[[Path], Any], tmp_path: Path) -> None:
    file = tmp_path / "file.ckpt"
    torch.save({"state_dict": {}}, file)
    assert f"{file}: is a file, must be a checkpoint directory" in refused(read, file)


def refused(read: Callable[[Path], Any], path: Path) -> str:
    """The message of the refusal, from one rank where ranks are needed."""
    if read is read_by_trainer:
        return ranks(1).run(refusal, read_by_trainer, path)[0]
    return refusal(read, path)


def write_text(path: Path) -> None:
    path.write_text("learning_rate: 0.1\n")


def write_bare_weights(path: Path) -> None:
    torch.save(lit.Lit().state_dict(), path)


def write_half(path: Path) -> None:
    torch.save({"state_dict": lit.Lit().state_dict()}, path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("write", [write_text, write_bare_weights, write_half])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_file_that_no_trainer_saved_is_refused_as_ckpt_path(
    write: Callable[[Path], None], world_size: int, tmp_path: Path
) -> None:
    file = tmp_path / "file.ckpt"
    write(file)
    for message in ranks(world_size).run(refusal, read_by_trainer, file):
        assert message.startswith(f"{file}: must be a checkpoint directory or a whole file")


# Damage.


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 9])


def fill_with_text(file: Path) -> None:
    file.write_text("spoilt")


DAMAGE = [cut, fill_with_text, Path.unlink]
FILES = ["manifest.json", "tensors-0.safetensors"]


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_damaged_checkpoint_is_named_with_the_cause(
    damage: Callable[[Path], None], file: str, world_size: int, tmp_path: Path
) -> None:
    path = tmp_path / "a.ckpt"
    ranks(world_size).run(fit, "zero3", epochs=1, save=str(path))
    damage(path / file)
    messages = [refusal(zero_strategy.load_state_dict, path)]
    messages.append(refusal(export, path, tmp_path / "out.safetensors"))
    messages += ranks(world_size).run(refusal, read_by_trainer, path)
    wanted = (
        "must be a checkpoint directory with" if file == "manifest.json" else "cannot be read ("
    )
    if damage is not Path.unlink:
        wanted = "cannot be read ("
    for message in messages:
        assert message.startswith(f"{path}: {wanted}")
        assert "Choose an earlier checkpoint." in message
        assert len(message.splitlines()) == 1
    assert not (tmp_path / "out.safetensors").exists()


def test_weights_are_exported_a_tensor_at_a_time(tmp_path: Path) -> None:
    each = 8 << 20  # bytes
    tensors = {f"model.{i}": torch.full((each // 4,), float(i)) for i in range(40)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        storage.save(tmp_path / "a.ckpt", tensors, {"model_extra_state": {}})
    del tensors
    program = (
        "import resource, sys\n"
        "from zero_strategy.checkpoint.export import export\n"
        "peak = lambda: 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = peak()\n"
        "export(*sys.argv[1:])\n"
        "print(peak() - before)\n"
    )
    words = [sys.executable, "-c", program, tmp_path / "a.ckpt", tmp_path / "out.safetensors"]
    grown = int(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    # A shard's blocks, the tensor that they become, and what the first reading loads.
    assert grown <= 8 * each
    there = load_file(tmp_path / "out.safetensors")
    assert all(torch.equal(there[str(i)], torch.full((each // 4,), float(i))) for i in range(40))


# Lightning's own loading.


class Sized(lit.Lit):
    def __init__(self, cfg: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.cfg = cfg


def fit_sized(path: str) -> dict[str, Tensor]:
    module = Sized(OmegaConf.create({"width": 3}))
    run = lit.trainer("zero3", max_epochs=1)
    run.fit(module, lit.loader())
    run.save_checkpoint(path)
    return lit.whole(module)


@pytest.mark.parametrize("weights_only", [None, True, False])
def test_load_from_checkpoint_takes_the_directory(
    weights_only: bool | None, tmp_path: Path
) -> None:
    path = str(tmp_path / "a.ckpt")
    (wanted,) = ranks(1).run(fit_sized, path)
    module = Sized.load_from_checkpoint(path, weights_only=weights_only)
    assert module.cfg.width == 3
    found = lit.whole(module)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_load_from_checkpoint_says_why_another_directory_is_none(tmp_path: Path) -> None:
    said = refusal(lit.Lit.load_from_checkpoint, str(tmp_path))
    assert "must be a checkpoint directory with manifest.json" in said


def save_far() -> str:
    run = lit.trainer("zero3", max_epochs=1)
    run.fit(lit.Lit(), lit.loader())
    return refusal(run.save_checkpoint, "s3://bucket/x.ckpt")


def test_a_remote_store_is_refused_and_not_taken_for_a_folder() -> None:
    (said,) = ranks(1).run(save_far)
    assert said.startswith("s3://bucket/x.ckpt: must be a path of a file system")
