"""The commands of `zs` beside `train`, and how any of them ends."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch

from zero_strategy.data import TokenFile
from zero_strategy.experiments.cli import main
from zero_strategy.experiments.config import load_config


def test_data_build_makes_a_token_file_that_train_takes(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"t": "x" * 50}) for _ in range(9)))
    out = tmp_path / "a.tok"
    assert main(["data", "build", str(out), str(tmp_path / "a.jsonl"), "--field", "t"]) == 0
    assert capsys.readouterr().out == f"{out}: 459 tokens, 9 documents, 450 bytes of text\n"
    assert TokenFile.open(out).num_documents == 9
    assert load_config("tiny.yaml", [f"data.corpus={out}"]).data.vocab_size() == 257


def test_a_wrong_input_file_ends_with_code_2_and_its_reason(tmp_path, capsys):
    (tmp_path / "a.tok").write_bytes(b"no tokens")
    assert main(["train", "tiny.yaml", f"data.corpus={tmp_path / 'a.tok'}"]) == 2
    assert "must be a token file" in capsys.readouterr().err
    assert main(["data", "build", str(tmp_path / "b.tok"), str(tmp_path / "gone.txt")]) == 2
    assert "must be existing files" in capsys.readouterr().err


def test_report_says_versions_devices_names_and_kernels(capsys):
    assert main(["report"]) == 0
    text = capsys.readouterr().out
    for expected in (f"torch {torch.__version__}", "zero3: registered", "kernels", "cpu"):
        assert expected in text


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        ([], "COMMAND"),
        (["train"], "config"),
        (["data"], "COMMAND"),
        (["data", "build"], "out, inputs"),
        (["data", "build", "a.tok"], "inputs"),
        (["checkpoint"], "COMMAND"),
        (["checkpoint", "export"], "directory, out"),
    ],
)
def test_an_incomplete_command_names_what_is_missing_and_nothing_else(words, missing, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    problem = capsys.readouterr().err
    assert problem.startswith("usage: zs")
    assert problem.endswith(f"error: the following arguments are required: {missing}\n")


def test_an_unknown_command_is_refused_with_those_there_are(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["no-such-command"])
    assert stopped.value.code == 2
    assert re.search("train.*report.*bench.*data.*checkpoint", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("out", "problem"),
    [
        (".", "must be a token file or not exist, but is a folder. Name a file in it, such as"),
        ("book.txt/a.tok", "must lie in a folder, but {folder}/book.txt is a file."),
        ("book.txt/b/a.tok", "must lie in a folder, but {folder}/book.txt is a file."),
    ],
)
def test_a_token_file_that_cannot_lie_there_is_refused_and_nothing_made(
    tmp_path, capsys, out, problem
):
    (tmp_path / "book.txt").write_text("years of work")
    code = main(["data", "build", str(tmp_path / out), str(tmp_path / "book.txt")])
    assert code == 2
    assert f"out = '{tmp_path / out}': {problem.format(folder=tmp_path)}" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["book.txt"]


def test_the_folder_of_a_token_file_is_made_once_the_inputs_were_found(tmp_path, capsys):
    out = tmp_path / "new" / "deep" / "a.tok"
    assert main(["data", "build", str(out), str(tmp_path / "gone.txt")]) == 2
    assert not list(tmp_path.iterdir())
    (tmp_path / "book.txt").write_text("years of work")
    assert main(["data", "build", str(out), str(tmp_path / "book.txt")]) == 0
    assert TokenFile.open(out).num_documents == 1
    assert "13 bytes of text" in capsys.readouterr().out


def test_a_reader_that_has_gone_ends_the_command_without_a_traceback():
    code = (
        "import sys; from zero_strategy.experiments import cli;"
        "cli._report = lambda args: print('a line');"
        "sys.exit(cli.main(['report']))"
    )
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as closed:
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_path_that_may_not_be_read_ends_with_code_2_and_its_name(monkeypatch, capsys):
    def refuse(args):
        raise PermissionError(13, "Permission denied", "secret.yaml")

    monkeypatch.setattr("zero_strategy.experiments.cli._train", refuse)
    assert main(["train", "secret.yaml"]) == 2
    assert capsys.readouterr().err == "[Errno 13] Permission denied: 'secret.yaml'\n"
