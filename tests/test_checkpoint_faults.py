"""Checkpoints under faults: kills at every step of a save, spoilt bytes, full disks."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.save_and_die import whole
from zero_strategy.checkpoint import files, storage
from zero_strategy.checkpoint.casts import Casts
from zero_strategy.checkpoint.codec import decode, encode
from zero_strategy.checkpoint.manifest import NAME, DamagedError, Manifest
from zero_strategy.checkpoint.verify import verify
from zero_strategy.experiments.benchmarks.forks import die_at
from zero_strategy.experiments.benchmarks.launch import free_port, rank_variables
from zero_strategy.experiments.cli import main

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def tensors(version: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(version)
    return {
        "model.a": torch.randn(301, 7, generator=draw),
        "model.b": torch.randn(129, generator=draw).bfloat16(),
        "model.count": torch.tensor(version),
        "model.empty": torch.zeros(0, 3),
        "optim.0.a.m": torch.randn(301, 7, generator=draw),
        "optim.0.flags": torch.rand(77, generator=draw) > 0.5,
    }


def meta(version: int) -> dict[str, Any]:
    return {"version": version, "rng": torch.arange(9) * version, "at": (1, 2.5, {"x": b"y"})}


def save(path: Path, version: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        storage.save(path, tensors(version), meta(version))


def version_of(path: Path) -> int:
    """Load all of it; the version it is, every bit."""
    found = storage.load_meta(path)
    version = found["version"]
    want, wanted_meta = tensors(version), meta(version)
    assert torch.equal(found.pop("rng"), wanted_meta.pop("rng"))
    assert found == wanted_meta
    got = {n: torch.empty(e.size, dtype=e.properties.dtype) for n, e in stored(path).items()}
    assert got.keys() == want.keys()
    storage.load(path, got, Casts(allowed=False))
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name
    return version


def stored(path: Path) -> dict[str, Any]:
    return {n: e for n, e in storage.stored(path).items() if not n.startswith("meta.")}


# Kills.


def killed_at(moment: int, action: Callable[[], None]) -> bool:
    """Run an action in a fork that dies before or after its n-th call of the system.

    Returns: whether it lived to see that moment.
    """
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # a fork has no threads of a pool that the parent had
        die_at(moment)
        try:
            action()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the action itself failed"
    return os.WIFSIGNALED(status)


def moments(action: Callable[[], None], prepare: Callable[[], None]) -> Iterator[int]:
    moment = 0
    while True:
        prepare()
        if not killed_at(moment, action):
            return
        yield moment
        moment += 1


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_kill_at_any_moment_leaves_the_checkpoint_that_was_there(
    tmp_path, exchanges, monkeypatch
):
    path = tmp_path / "last.ckpt"
    if not exchanges:
        monkeypatch.setattr(files, "exchange", lambda one, other: False)

    def prepare() -> None:
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        save(path, 1)

    seen = []
    for _ in moments(lambda: save(path, 2), prepare):
        storage.recover(path)
        seen.append(version_of(path))
        # A dead attempt is in nobody's way.
        save(path, 3)
        assert version_of(path) == 3
        assert [p.name for p in tmp_path.iterdir()] == ["last.ckpt"]
    assert len(seen) >= 24
    assert set(seen) == {1, 2}
    assert seen == sorted(seen)


def test_a_kill_during_a_first_save_leaves_nothing_that_looks_like_a_checkpoint(tmp_path):
    path = tmp_path / "first.ckpt"

    def prepare() -> None:
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()

    seen = []
    for _ in moments(lambda: save(path, 1), prepare):
        if path.exists():
            seen.append(version_of(path))
        else:
            with pytest.raises(ValueError, match="does not exist"):
                storage.load_meta(path)
    assert set(seen) <= {1}


def test_a_kill_while_one_is_removed_leaves_it_whole_or_gone(tmp_path):
    path = tmp_path / "old.ckpt"

    def prepare() -> None:
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        save(path, 1)

    for _ in moments(lambda: storage.remove(path), prepare):
        assert not path.exists() or version_of(path) == 1


@pytest.mark.parametrize(("victim", "moment"), [(0, 5), (0, 14), (1, 3)])
def test_a_rank_that_dies_while_two_save_leaves_the_checkpoint_that_was_there(
    tmp_path, victim, moment
):
    path = tmp_path / "a.ckpt"
    words = [sys.executable, "-m", "tests.save_and_die", str(path), str(victim), str(moment)]
    port = free_port()
    ranks = [
        subprocess.Popen(
            words,
            env={**os.environ, **rank_variables(rank, 2, port)},
            stderr=subprocess.DEVNULL,
        )
        for rank in range(2)
    ]
    try:
        assert ranks[victim].wait(60) == -signal.SIGKILL
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    storage.recover(path)
    version = storage.load_meta(path)["version"]
    assert version == 1
    for name, tensor in whole(version).items():
        assert torch.equal(storage.read(path, storage.contents(path), name), tensor)


# Spoilt bytes.


def outcome(path: Path) -> str:
    try:
        version = version_of(path)
    except ValueError as error:
        return "detected" if str(error).startswith(f"{path}: ") else "unnamed"
    return "equal" if version == 1 else "silent"


def spoil(file: Path, draw: random.Random, kind: str) -> None:
    data = bytearray(file.read_bytes())
    at = draw.randrange(len(data))
    if kind == "flip":
        data[at] ^= 1 << draw.randrange(8)
    elif kind == "cut":
        del data[at:]
    elif kind == "zero":
        data[at : at + 64] = bytes(len(data[at : at + 64]))
    elif kind == "repeat":
        data[at:at] = data[at : at + 8]
    elif kind == "swap":
        other = draw.randrange(len(data))
        data[at], data[other] = data[other], data[at]
    file.write_bytes(bytes(data))


@pytest.mark.parametrize("kind", ["flip", "cut", "zero", "repeat", "swap"])
@pytest.mark.parametrize("name", [NAME, "tensors-0.safetensors"])
def test_no_spoilt_byte_is_ever_read_as_something_else(tmp_path, kind, name):
    whole, path = tmp_path / "whole", tmp_path / "a.ckpt"
    save(whole, 1)
    draw = random.Random(f"{kind} {name}")
    outcomes = []
    for _ in range(40):
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(whole, path)
        spoil(path / name, draw, kind)
        outcomes.append(outcome(path))
    assert set(outcomes) <= {"detected", "equal"}
    # Only a file's own header is written for others, and zeros over zeros are no damage.
    assert outcomes.count("detected") >= 20


def test_missing_and_exchanged_files_are_found(tmp_path):
    one, other = tmp_path / "one.ckpt", tmp_path / "other.ckpt"
    for name in (NAME, "tensors-0.safetensors"):
        for path, version in ((one, 1), (other, 2)):
            shutil.rmtree(path, ignore_errors=True)
            save(path, version)
        shutil.copy(other / name, one / name)
        assert outcome(one) == "detected"
        (one / name).unlink()
        assert outcome(one) == "detected"


@pytest.mark.parametrize("kind", ["flip", "cut", "zero", "repeat", "swap"])
@pytest.mark.parametrize("name", [NAME, "tensors-0.safetensors"])
def test_a_deep_look_finds_every_byte_that_changed(tmp_path, kind, name):
    whole, path = tmp_path / "whole", tmp_path / "a.ckpt"
    save(whole, 1)
    draw = random.Random(f"deep {kind} {name}")
    for _ in range(40):
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(whole, path)
        spoil(path / name, draw, kind)
        changed = (path / name).read_bytes() != (whole / name).read_bytes()
        problems = verify(path, deep=True).problems
        assert bool(problems) == changed, problems
        assert changed or not problems


def test_damage_is_named_by_tensor_file_and_bytes(tmp_path, capsys):
    path = tmp_path / "a.ckpt"
    save(path, 1)
    chunk = Manifest.read(path).tensors["model.a"].chunks[0]
    file = path / chunk.file
    data = bytearray(file.read_bytes())
    data[chunk.start + 5] ^= 1
    file.write_bytes(bytes(data))
    end = chunk.start + 301 * 7 * 4
    wanted = f"model.a: {chunk.file} is not as it was written, in bytes {chunk.start} to {end}"
    assert verify(path, deep=True).problems == (wanted,)
    assert main(["checkpoint", "verify", str(path), "--deep"]) == 1
    assert capsys.readouterr().out == f"{path}: {wanted}\n"
    # The manifest and the sizes are as they were.
    assert main(["checkpoint", "verify", str(path)]) == 0
    assert "--deep reads every byte" in capsys.readouterr().out
    assert main(["checkpoint", "verify", str(tmp_path)]) == 2


def test_any_reader_of_safetensors_reads_the_shards(tmp_path):
    save(tmp_path / "a.ckpt", 1)
    there = load_file(tmp_path / "a.ckpt" / "tensors-0.safetensors")
    for name, tensor in tensors(1).items():
        assert torch.equal(there[name], tensor), name


# Disks.


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_disk_that_fails_is_an_error_and_the_earlier_checkpoint_stays(
    tmp_path, monkeypatch, number, call
):
    path = tmp_path / "last.ckpt"
    save(path, 1)
    real, count = getattr(os, call), [0]

    def fails(*args: Any) -> Any:
        count[0] += 1
        if count[0] == 2:
            raise OSError(number, os.strerror(number))
        return real(*args)

    monkeypatch.setattr(os, call, fails)
    with pytest.raises(RuntimeError, match=f"could not write .*{os.strerror(number)}"):
        save(path, 2)
    monkeypatch.undo()
    assert version_of(path) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["last.ckpt"]


@pytest.mark.parametrize("exchanges", [True, False])
@pytest.mark.parametrize("kind", ["checkpoint", "file", "link", "nothing"])
def test_a_name_that_would_not_last_is_given_back(tmp_path, monkeypatch, kind, exchanges):
    path = tmp_path / "last.ckpt"
    if kind == "checkpoint":
        save(path, 1)
    elif kind == "file":
        path.write_bytes(b"another program's")
    elif kind == "link":
        save(tmp_path / "other.ckpt", 1)
        path.symlink_to("other.ckpt")
    before = sorted(p.name for p in tmp_path.iterdir())

    def fails(folder: Path) -> None:
        if folder == tmp_path:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    if not exchanges:
        monkeypatch.setattr(files, "exchange", lambda one, other: False)
    monkeypatch.setattr(files, "sync_folder", fails)
    with pytest.raises(RuntimeError, match="What was there before is whole"):
        save(path, 2)
    monkeypatch.undo()
    assert sorted(p.name for p in tmp_path.iterdir()) == before
    if kind == "file":
        assert path.read_bytes() == b"another program's"
    elif kind != "nothing":
        assert version_of(path) == 1
        assert path.is_symlink() == (kind == "link")
    # The next save is in nobody's way.
    save(path, 3)
    assert version_of(path) == 3
    assert not path.is_symlink()
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_a_system_that_takes_few_bytes_at_a_time_loses_none(tmp_path, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, bytes(data[:97])))
    save(tmp_path / "a.ckpt", 1)
    monkeypatch.undo()
    assert version_of(tmp_path / "a.ckpt") == 1


# What a manifest may say.


def crafted(path: Path, change: Callable[[dict], None]) -> None:
    """Change a manifest's contents and give it the right checksum."""
    tree = json.loads((path / NAME).read_bytes())["content"]
    change(tree)
    body = json.dumps(tree).encode()
    (path / NAME).write_bytes(b'{"crc32":"%08x","content":' % files.checksum(body) + body + b"}\n")


CRAFTED: dict[str, Callable[[dict], Any]] = {
    "outside": lambda t: t["files"].update({"../x": 1}),
    "absolute": lambda t: t["files"].update({"/etc/passwd": 1}),
    "huge file": lambda t: t["files"].update({"tensors-0.safetensors": 1 << 62}),
    "negative": lambda t: t["files"].update({"tensors-0.safetensors": -1}),
    "huge tensor": lambda t: t["tensors"]["model.a"].update(shape=[1 << 40, 1 << 20]),
    "hole": lambda t: t["tensors"]["model.a"].update(chunks=[]),
    "twice": lambda t: t["tensors"]["model.a"]["chunks"].extend(t["tensors"]["model.a"]["chunks"]),
    "beyond": lambda t: t["tensors"]["model.a"]["chunks"][0].update(start=1 << 40),
    "no such dtype": lambda t: t["tensors"]["model.a"].update(dtype="nn"),
    "other dtype": lambda t: t["tensors"]["model.a"].update(dtype="float64"),
    "no checksums": lambda t: t["tensors"]["model.a"]["chunks"][0].update(checksums=[]),
    "shifted": lambda t: t["tensors"]["model.a"]["chunks"][0].update(offset=[1, 0]),
    "text": lambda t: t.update(tensors="all"),
    "version": lambda t: t.update(version=99),
    "tag": lambda t: t["meta"].update(x={"$": "call", "value": "os.system"}),
    "tensor's name": lambda t: t["meta"].update(x={"$": "tensor", "value": "model.zzz"}),
    "true": lambda t: t["tensors"]["model.a"].update(shape=[True, 7]),
    "extra": lambda t: t["tensors"]["model.a"].update(code="x"),
}


@pytest.mark.parametrize("kind", CRAFTED)
def test_a_manifest_that_cannot_be_is_refused_with_the_path(tmp_path, kind):
    path = tmp_path / "a.ckpt"
    save(path, 1)
    crafted(path, CRAFTED[kind])
    assert outcome(path) == "detected"


# Not "compile": a traceback compiles lines of its own source to mark the place in them.
RUNS_CODE = ("exec", "import", "pickle.", "os.system", "subprocess.", "os.exec", "ctypes.")


def test_no_crafted_manifest_runs_or_writes_anything(tmp_path):
    path = tmp_path / "a.ckpt"
    save(path, 1)
    version_of(path)  # whatever is imported late is there now
    for kind, change in CRAFTED.items():
        shutil.copytree(path, tmp_path / kind)
        crafted(tmp_path / kind, change)
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        seen: list[str] = []

        def note(event: str, args: tuple[Any, ...]) -> None:
            writes = event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+")
            if event.startswith(RUNS_CODE) or writes:
                seen.append(f"{event} {args[:2]}")

        sys.addaudithook(note)
        refused = [outcome(tmp_path / kind) == "detected" for kind in CRAFTED]
        if seen:
            os.write(2, "\n".join(seen).encode())
        os._exit(len(seen) + refused.count(False))
    _, status = os.waitpid(child, 0)
    assert os.WEXITSTATUS(status) == 0


def test_a_link_in_place_of_a_file_is_refused(tmp_path):
    path = tmp_path / "a.ckpt"
    save(path, 1)
    file = path / "tensors-0.safetensors"
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert outcome(path) == "detected"
    for deep in (False, True):
        (problem,) = verify(path, deep=deep).problems
        assert problem == f"{file.name} is a link, must be the file itself: copy it here"


def test_a_deeply_nested_manifest_is_refused(tmp_path):
    path = tmp_path / "a.ckpt"
    save(path, 1)
    body = b"[" * 100_000 + b"]" * 100_000
    (path / NAME).write_bytes(b'{"crc32":"%08x","content":' % files.checksum(body) + body + b"}\n")
    assert outcome(path) == "detected"
    with pytest.raises((DamagedError, RecursionError)):
        Manifest.read(path)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        1 << 80,
        -0.0,
        float("inf"),
        float("-inf"),
        1e-320,
        "ü\x00",
        b"\xff\x00",
        3 - 2j,
        (1, (2, [3])),
        {1, 2},
        {1: "a", (2, 3): "b", None: {"$": 5}},
        {"$": "tuple", "value": [1]},
        torch.bfloat16,
        {},
        [],
    ],
)
def test_plain_data_comes_back_as_it_was(value):
    tree, in_it = encode({"x": value})
    assert in_it == {}
    back = decode(json.loads(json.dumps(tree, allow_nan=False)), in_it.__getitem__)["x"]
    assert back == value
    assert type(back) is type(value)
    assert str(back) == str(value)
