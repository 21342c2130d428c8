"""Checkpoints of other programs are read, never run: crafted ones are refused, with the reason."""

import os
import resource
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from zero_strategy.checkpoint.convert import convert
from zero_strategy.checkpoint.foreign import dcp, torch_file, zero_files
from zero_strategy.experiments.benchmarks.faults_crafted import CASES, MARK, corpus
from zero_strategy.experiments.cli import main

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*assuming the intent is to save in a single process"),
]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    """A payload that should run after all leaves its mark there."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def crafted(tmp_path_factory) -> dict[str, Path]:
    return dict(corpus(tmp_path_factory.mktemp("crafted")))


def test_the_corpus_is_large_and_its_names_differ(crafted):
    assert len(crafted) == len(CASES) >= 60


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_crafted_checkpoint_is_refused_with_the_cause(case, crafted, tmp_path):
    source = crafted[case.name]
    with pytest.raises(ValueError) as refusal:
        convert(source, tmp_path / "out.ckpt")
    assert str(refusal.value).startswith(f"{source}: ")
    assert case.wanted in str(refusal.value)
    assert len(str(refusal.value).splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def refused(source: Path, target: Path) -> bool:
    try:
        convert(source, target)
    except ValueError:
        return True
    return False


# Not "compile": a traceback compiles lines of its own source to mark the place in them.
RUNS_CODE = ("exec", "import", "pickle.", "os.system", "os.exec", "os.fork", "os.posix_spawn")
RUNS_CODE += ("subprocess.", "ctypes.", "socket.")


def test_reading_a_crafted_checkpoint_runs_nothing_and_opens_nothing_outside(crafted, tmp_path):
    target = tmp_path / "out" / "out.ckpt"
    # Whatever is imported late is there afterwards.
    assert all(refused(source, target) for source in crafted.values())
    folder = os.path.commonpath(crafted.values())
    # Where it is written, and the versions of installed packages.
    may_open = (str(target.parent), sys.prefix, sys.base_prefix)
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # a fork has no threads of a pool that the parent had
        seen: list[str] = []

        def note(event: str, args: tuple[Any, ...]) -> None:
            if event.startswith(RUNS_CODE):
                seen.append(f"{event} {args[:2]}")
            if event == "open" and not str(args[0]).startswith(may_open):
                path, _, flags = args
                writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
                if writes or not str(path).startswith(folder) or "elsewhere" in str(path):
                    seen.append(f"open {path} {flags:o}")

        sys.addaudithook(note)
        every = [refused(source, target) for source in crafted.values()]
        if seen:
            os.write(2, "\n".join(seen).encode())
        os._exit(min(len(seen) + every.count(False), 255))
    _, status = os.waitpid(child, 0)
    assert os.WEXITSTATUS(status) == 0
    assert not list(tmp_path.rglob(MARK))


def test_a_crafted_checkpoint_takes_no_memory_that_its_files_do_not_back(crafted, tmp_path):
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        room = 1 << 30
        resource.setrlimit(resource.RLIMIT_AS, (now + room, now + room))
        every = [refused(source, tmp_path / "out.ckpt") for source in crafted.values()]
        os._exit(every.count(False))
    _, status = os.waitpid(child, 0)
    assert os.WEXITSTATUS(status) == 0


def test_what_a_pickle_may_refer_to_is_a_table_that_holds_no_function_of_another_module():
    for table in (torch_file.TABLE, dcp.TABLE, zero_files.TABLE):
        for (module, name), value in table.items():
            if isinstance(value, torch.dtype):
                continue
            made_here = type(value).__module__ if not isinstance(value, type) else value.__module__
            assert made_here.startswith("zero_strategy.checkpoint.foreign"), (module, name)


class Payload:
    """Runs when it is unpickled, harmlessly."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return exec, (f"import os; open({str(self.mark)!r}, 'w').write(str(os.getpid()))",)


def lightning_file(path: Path, **more: Any) -> Path:
    checkpoint = {"pytorch-lightning_version": "2.6.0", "state_dict": {"w": torch.arange(3.0)}}
    torch.save(checkpoint | more, path)
    return path


def test_a_pickle_is_run_where_it_is_asked_for_and_in_another_process(tmp_path):
    mark = tmp_path / MARK
    file = lightning_file(tmp_path / "file.ckpt", callbacks=Payload(mark))
    with pytest.raises(ValueError, match=r"refers to __builtin__\.exec.*--unsafe-pickle"):
        convert(file, tmp_path / "out.ckpt")
    assert not mark.exists()
    done = convert(file, tmp_path / "out.ckpt", unsafe_pickle=True)
    assert int(mark.read_text()) != os.getpid()
    assert (done.kind, done.num_tensors) == ("lightning", 1)


def test_what_a_pickle_raises_in_its_process_is_one_line_here(tmp_path, capsys):
    file = tmp_path / "file.ckpt"
    file.write_bytes(b"nothing of a checkpoint")
    words = ["checkpoint", "convert", str(file), str(tmp_path / "out"), "--unsafe-pickle"]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"{file}: ")
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("unsafe", [False, True])
@pytest.mark.parametrize("url", ["https://host/file.ckpt", "hf://repository", "file:///etc/x"])
def test_a_url_is_refused_whatever_the_options(url, unsafe, tmp_path, capsys):
    words = ["checkpoint", "convert", url, str(tmp_path / "out")]
    assert main([*words, *(["--unsafe-pickle"] if unsafe else [])]) == 2
    assert "must be a path. Download it first" in capsys.readouterr().err
