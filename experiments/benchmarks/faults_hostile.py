"""Checkpoints and configurations that were made to harm, read while every event is watched."""

from __future__ import annotations

import dataclasses
import encodings.cp437  # of names in zip files, which are decoded late  # noqa: F401
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any, cast, get_type_hints

import torch

from zero_strategy.checkpoint import files
from zero_strategy.checkpoint.convert import convert
from zero_strategy.checkpoint.manifest import NAME
from zero_strategy.experiments.benchmarks import faults_crafted
from zero_strategy.experiments.benchmarks.faults_versions import save, version_of
from zero_strategy.experiments.benchmarks.forks import run_ranks
from zero_strategy.experiments.config import PACKAGED, load_config
from zero_strategy.experiments.schema import RunConfig

# Not "compile": a traceback compiles lines of its own source to mark the place in them.
RUNS_CODE = (
    *("exec", "import", "pickle.find_class", "os.system", "os.exec", "os.spawn", "os.posix_spawn"),
    *("os.fork", "subprocess.", "ctypes.", "socket.connect"),
)
BASE = "defaults: [base.yaml]\n"
"""Everything that a configuration needs, so that nothing but the rest of a text is at fault."""

_TAGS = (
    "!!python/object/apply:os.system [touch PWNED]",
    "!!python/object/new:os.system [touch PWNED]",
    "!!python/object:pathlib.Path {}",
    "!!python/name:os.system x",
    "!!python/module:os x",
    "!!python/object/apply:subprocess.check_output [[touch, PWNED]]",
    '!!python/object/apply:builtins.eval [\'open("PWNED", "w")\']',
    '!!python/object/apply:builtins.exec [\'open("PWNED", "w")\']',
    "!!python/object/apply:importlib.import_module [antigravity]",
    "!!python/tuple [1, 2]",
    "!!python/complex 1j",
    "!!python/bytes eA==",
    "!!binary eA==",
    "!!set {a}",
    "!!omap [a: 1]",
    "!<tag:yaml.org,2002:python/name:os.system> x",
    "!torch.load x.ckpt",
    "!include /etc/passwd",
)
_INTERPOLATIONS = (
    "${oc.env:HOME}",
    "${oc.env:PWD,/tmp}",
    "${oc.decode:'[1]'}",
    "${oc.create:{a: 1}}",
    "${oc.dict.values:model}",
    "${eval:__import__('os').system('touch PWNED')}",
    "${seed}",
    "${${seed}}",
    "${..seed}",
    "a${oc.env:HOME}b",
)
_TARGETS = (
    "_target_: os.system",
    "model: {_target_: os.system, command: touch PWNED}",
    "optim: {_target_: builtins.eval, _args_: ['1']}",
    "trainer: {callbacks: [{class_path: os.system}]}",
    "trainer: {strategy: 'os:system'}",
    "trainer: {strategy: torch.load}",
    "__class__: os",
    "model: {__init__: 1}",
    "hydra: {run: {dir: /tmp}}",
)
_VALUES = (
    "seed: 1e999",
    "seed: -1",
    "optim: {lr: .nan}",
    "optim: {lr: 1e-3, lr: 1e-4}",
    "out_dir: &a x\ndata: {path: *a}",
    "model: {num_layers: 3.5}",
    "--- 1\n--- 2",
)
_TEXTS = (
    "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]",
    "a: &a {b: *a}",
    "defaults: [/etc/passwd]",
    "defaults: [../../etc/passwd]",
    "defaults: [a.yaml]",
    "defaults: ['http://localhost/a.yaml']",
    "[" * 3000,
    "{a: " * 3000,
    "\n".join(f"k{i}: {i}" for i in range(3000)),
    "# " + "x" * 100_000,
    "%TAG ! tag:yaml.org,2002:python/\n--- !name:os.system x",
    "\0",
    "\ufeff!!python/name:os.system x",
)
CONFIGURATIONS = (
    *(f"{BASE}seed: {tag}" for tag in _TAGS),
    *(f"{BASE}out_dir: {json.dumps(text)}" for text in _INTERPOLATIONS),
    *(BASE + text for text in (*_TARGETS, *_VALUES)),
    *_TEXTS,
)


def _change(key: str, **values: Any) -> Callable[[dict[str, Any]], None]:
    """Return what sets values at a dotted key of a manifest."""

    def change(tree: dict[str, Any]) -> None:
        for part in key.split("/"):
            tree = tree[int(part)] if part.isdecimal() else tree[part]  # type: ignore[reportArgumentType]
        tree.update(values)

    return change


_CHUNK = "tensors/model.a/chunks/0"
MANIFESTS: dict[str, Callable[[dict[str, Any]], None]] = {
    "a file upwards": _change("files", **{"../x": 1}),
    "an absolute file": _change("files", **{"/etc/passwd": 1}),
    "a file larger than any disk": _change("files", **{"tensors-0.safetensors": 1 << 62}),
    "a tensor larger than any memory": _change("tensors/model.a", shape=[1 << 40, 1 << 20]),
    "a negative size": _change("files", **{"tensors-0.safetensors": -1}),
    "a hole": _change("tensors/model.a", chunks=[]),
    "beyond its file": _change(_CHUNK, start=1 << 40),
    "a part of another folder": _change(_CHUNK, file="../last.ckpt/tensors-0.safetensors"),
    "no checksums": _change(_CHUNK, checksums=[]),
    "a dtype to be called": _change("tensors/model.a", dtype="load"),
    "a tag to be called": _change("meta", x={"$": "call", "value": "os.system"}),
    "a tag to be imported": _change("meta", x={"$": "os.system", "value": "touch PWNED"}),
    "a tensor that is not there": _change("meta", x={"$": "tensor", "value": "model.zzz"}),
    "code beside": _change("tensors/model.a", code="x"),
}


def hostile(*, every: int) -> dict[str, Any]:
    """Read all of them.

    Args:
        every: take every n-th.

    Returns: "checkpoints" and "configurations" that were read, "executed": lines that say which
        ran something, "accepted": which were not refused.
    """
    torch.set_num_threads(1)
    executed: list[str] = []
    accepted: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoints = _checkpoints(folder)[::every]
        configurations = _configurations(folder)[::every]
        for what, read in (*checkpoints, *configurations):
            outcome = _watched(folder, read)
            executed += [f"{what}: {line}" for line in outcome["seen"]]
            accepted += [] if outcome["refused"] else [what]
    return {
        "checkpoints": len(checkpoints),
        "configurations": len(configurations),
        "executed": executed,
        "accepted": accepted,
    }


def _checkpoints(folder: Path) -> list[tuple[str, Callable[[], Any]]]:
    own = folder / "own"
    own.mkdir()
    save(own / "a.ckpt", 1)
    version_of(own / "a.ckpt")  # what a load imports late is there for all forks
    found = []
    for number, (name, change) in enumerate(MANIFESTS.items()):
        path = own / f"{number}.ckpt"
        shutil.copytree(own / "a.ckpt", path)
        tree = json.loads((path / NAME).read_bytes())["content"]
        change(tree)
        body = json.dumps(tree).encode()
        head = b'{"crc32":"%08x","content":' % files.checksum(body)
        (path / NAME).write_bytes(head + body + b"}\n")
        found.append((f"manifest with {name}", lambda path=path: version_of(path)))
    others = folder / "others"
    others.mkdir()
    torch.save(
        {"pytorch-lightning_version": "2.6", "state_dict": {"w": torch.ones(3)}},
        folder / "sane.ckpt",
    )
    convert(folder / "sane.ckpt", folder / "sane")
    for name, path in faults_crafted.corpus(others):
        found.append((name, lambda path=path: convert(path, folder / "out.ckpt")))
    return found


def _configurations(folder: Path) -> list[tuple[str, Callable[[], Any]]]:
    place = folder / "configurations"
    place.mkdir()
    shutil.copy(PACKAGED / "tiny.yaml", place / "base.yaml")
    (place / "sane.yaml").write_text(f"{BASE}seed: 3")
    load_config(place / "sane.yaml")
    found = []
    for number, text in enumerate(CONFIGURATIONS):
        path = place / f"{number}.yaml"
        path.write_text(text)
        found.append((f"configuration {text[:60]!r}", lambda path=path: load_config(path)))
    return found


def _annotations(schema: type) -> set[CodeType]:
    """Return what our own sections evaluate to know the types of their fields."""
    texts = [str(field.type) for field in dataclasses.fields(schema)]
    found = {compile(text, "<string>", "eval", dont_inherit=True) for text in texts}
    for hint in get_type_hints(schema).values():
        if dataclasses.is_dataclass(hint):
            found |= _annotations(cast(type, hint))
    return found


def _watched(folder: Path, read: Callable[[], Any]) -> dict[str, Any]:
    """Read in a fork and in an empty folder; returns what ran, and whether it was refused."""
    work, report = folder / "work", folder / "report.json"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    report.unlink(missing_ok=True)
    annotations = _annotations(RunConfig)

    def watch(rank: int) -> None:
        os.chdir(work)
        seen: list[str] = []
        watching = True

        def note(event: str, args: tuple[Any, ...]) -> None:
            writes = event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+")
            if event == "exec" and args[0] in annotations:
                return
            if watching and (event.startswith(RUNS_CODE) or writes):
                seen.append(f"{event} {args[:2]}"[:200])

        sys.addaudithook(note)
        refused = False
        try:
            read()
        except ValueError:
            refused = True
        except BaseException as error:  # noqa: BLE001 - told as a finding
            seen.append(f"raised {type(error).__name__}")
        watching = False
        report.write_text(json.dumps({"seen": seen, "refused": refused}))

    codes = run_ranks(1, watch)
    outcome: dict[str, Any] = {"seen": [f"ended with {codes}"], "refused": False}
    if report.exists():
        outcome = json.loads(report.read_text())
    outcome["seen"] += [f"left {path.name}" for path in work.iterdir()]
    if (folder / "out.ckpt").exists():
        outcome["seen"].append("left a checkpoint")
        shutil.rmtree(folder / "out.ckpt")
    return outcome
