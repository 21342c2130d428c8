"""The documents keep their word: links lead to files, and each guarantee is held by a test."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "moe/*.md", "sequence_parallel/*.md", "kernels/*.md")
    for path in ROOT.glob(pattern)
)
RELATIVE_LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")
TEST_NAME = re.compile(r"`(test_\w+\.py)::(test_\w+)`")


def guarantees() -> list[tuple[str, str]]:
    """The first and the last cell of each row: what holds, and what holds it."""
    lines = (ROOT / "docs/guarantees.md").read_text().splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    return [(row[0], row[-1]) for row in rows if row[0] != "holds"]


def has_test(file: str, name: str) -> bool:
    path = next((ROOT / "tests").rglob(file), None)
    if path is None:
        return False
    nodes = ast.walk(ast.parse(path.read_bytes()))
    return any(isinstance(node, ast.FunctionDef) and node.name == name for node in nodes)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_to_files(document):
    path = ROOT / document
    targets = RELATIVE_LINK.findall(path.read_text())
    assert not [target for target in targets if not (path.parent / target).exists()]


@pytest.mark.parametrize(("holds", "held_by"), guarantees())
def test_a_guarantee_names_tests_that_exist(holds, held_by):
    named = TEST_NAME.findall(held_by)
    assert named, f"no test is named for: {holds}"
    assert not [f"{file}::{name}" for file, name in named if not has_test(file, name)]
