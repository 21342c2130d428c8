"""The house rules: which room may import which, what is shipped, how large a file may grow.

Folders are walked as they lie at the top level; the links inside `zero_strategy/` are not followed.
"""

import ast
import fnmatch
import graphlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
LINKED = ("experiments", "kernels", "moe", "sequence_parallel")

# An entry may import its own room and these; no other arrow exists.
ROOM_MAY_IMPORT = {
    "experiments": {"zero_strategy", "moe", "sequence_parallel", "kernels"},
    "zero_strategy": {"kernels"},
    "moe": {"kernels"},
    "sequence_parallel": {"kernels"},
    "kernels": set(),
}
LIGHTNING = {"lightning", "lightning_fabric", "pytorch_lightning"}
LIGHTNING_FILES = {
    "zero_strategy/strategy.py",
    "zero_strategy/saving.py",
    "zero_strategy/precision.py",
    "zero_strategy/monitor.py",
    "zero_strategy/ema.py",
    "zero_strategy/events.py",
    "zero_strategy/guarding.py",
    "zero_strategy/watching.py",
    "zero_strategy/data/module.py",
}
LIGHTNING_WHEN_CALLED = {"zero_strategy/autoload.py"}
KERNELS_MAY_IMPORT = {"torch", "triton", *sys.stdlib_module_names}

FILE_LIMIT = 600
FUNCTION_LIMIT = 80
NAMES_THAT_SAY_NOTHING = {"utils.py", "helpers.py", "common.py"}

GENERATED = {
    *("__pycache__", "build", "dist", "runs", "lightning_logs", "node_modules"),
    *(".git", ".venv", ".pytest_cache", ".ruff_cache", ".hypothesis", "*.egg-info"),
}
# Brackets keep these patterns from matching their own text.
PLACES_OF_ONE_MACHINE = re.compile(r"(?<![\w.])/(?:work|root|opt/(?:wheels|pypi))/")
REGISTRY_HOSTS = re.compile(
    r"pypi[.]org|python[h]osted|download[.]pytorch|deb[.]debian|registry[.]npmjs"
)


def walk(top: Path) -> Iterator[Path]:
    """Every real file below `top`, generated folders and linked folders left out."""
    for folder, subfolders, files in os.walk(top):
        subfolders[:] = sorted(name for name in subfolders if not is_generated(name))
        yield from (Path(folder, name) for name in sorted(files))


def is_generated(name: str) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in GENERATED)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def sources(*rooms: str) -> dict[str, ast.Module]:
    """Parsed Python files of the rooms by path from the root, such as "moe/layer.py"."""
    paths = (path for room in rooms for path in walk(ROOT / room) if path.suffix == ".py")
    return {name_of(path): ast.parse(path.read_bytes(), filename=str(path)) for path in paths}


def module_of(path: str) -> str:
    """The import name of a file: "moe/layer.py" is `zero_strategy.moe.layer`."""
    parts = Path(path).with_suffix("").parts
    parts = parts if parts[0] == "zero_strategy" else ("zero_strategy", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    first, second, *_ = (*module.split("."), "")
    return second if first == "zero_strategy" and second in LINKED else first


def run_on_import(tree: ast.Module) -> Iterator[ast.AST]:
    """Nodes that run while the module is imported: not in a function, not for the type checker."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending.extend(node.orelse)
            continue
        yield node
        pending.extend(ast.iter_child_nodes(node))


def imports(tree: ast.Module, *, on_import: bool = False) -> Iterator[str]:
    """Imported names in full, `from torch import nn` as "torch.nn"; all, or those run on import."""
    for node in run_on_import(tree) if on_import else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module or ''}.{a.name}" for a in node.names)


def expect_none(found: Iterator[str]) -> None:
    lines = sorted(set(found))
    if lines:
        pytest.fail("\n".join(lines), pytrace=False)


@pytest.mark.parametrize("room", ROOM_MAY_IMPORT)
def test_a_room_imports_only_the_rooms_below_it(room):
    allowed = {room, *ROOM_MAY_IMPORT[room]}
    expect_none(
        f"{path}: imports {name}, which lies in {room_of(name)}"
        for path, tree in sources(room).items()
        for name in imports(tree)
        if room_of(name) in ROOM_MAY_IMPORT and room_of(name) not in allowed
    )


def test_imports_are_absolute_and_go_through_the_one_import_name():
    expect_none(
        f"{path}: imports {name}"
        for path, tree in sources(*ROOM_MAY_IMPORT, "tests").items()
        for name in imports(tree)
        if name.startswith(".") or name.split(".")[0] in LINKED
    )


def test_lightning_is_imported_only_by_the_files_that_meet_it():
    expect_none(
        f"{path}: imports {name}"
        for path, tree in sources("zero_strategy", "moe", "sequence_parallel", "kernels").items()
        for name in imports(tree, on_import=path in LIGHTNING_WHEN_CALLED)
        if name.split(".")[0] in LIGHTNING and path not in LIGHTNING_FILES
    )


def test_kernels_import_torch_and_triton_only():
    expect_none(
        f"{path}: imports {name}"
        for path, tree in sources("kernels").items()
        for name in imports(tree)
        if name.split(".")[0] not in {*KERNELS_MAY_IMPORT, "zero_strategy"}
    )


def test_no_modules_import_each_other_in_a_circle():
    modules = {module_of(path): tree for path, tree in sources(*ROOM_MAY_IMPORT).items()}

    def target(name: str) -> str | None:
        """The module that holds the imported name: itself, or the one it is an attribute of."""
        return next((m for m in (name, name.rpartition(".")[0]) if m in modules), None)

    graph = {
        module: {target(name) for name in imports(tree, on_import=True)} - {None}
        for module, tree in modules.items()
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"import loop: {' <- '.join(error.args[1])}")


def test_file_names_say_what_the_file_is_for():
    named = (path for path in sources(*ROOM_MAY_IMPORT, "tests"))
    expect_none(
        f"{path}: must be named after its purpose"
        for path in named
        if Path(path).name in NAMES_THAT_SAY_NOTHING
    )
    assert not (ROOT / "kernels/__init__.py").exists(), "would hide the published `kernels` package"


def test_files_and_functions_stay_short():
    def length(node: ast.stmt) -> int:
        """Lines of a function without its docstring."""
        body = getattr(node, "body", [])
        start = body[0].end_lineno if ast.get_docstring(node, clean=False) else node.lineno
        return node.end_lineno - start

    def too_long() -> Iterator[str]:
        for path, tree in sources(*ROOM_MAY_IMPORT, "tests").items():
            if Path(path).name == "triton.py":
                continue
            num_lines = (ROOT / path).read_text().count("\n")
            if num_lines > FILE_LIMIT:
                yield f"{path}: {num_lines} lines, at most {FILE_LIMIT}"
            for node in ast.walk(tree):
                is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                if is_function and length(node) > FUNCTION_LIMIT:
                    yield f"{path}:{node.lineno}: {node.name} has {length(node)} lines"

    expect_none(too_long())


def test_the_repository_names_no_machine_and_no_registry():
    def found() -> Iterator[str]:
        for path in walk(ROOT):
            lines = path.read_bytes().decode("utf-8", errors="replace").splitlines()
            for number, line in enumerate(lines, start=1):
                for match in (PLACES_OF_ONE_MACHINE.search(line), REGISTRY_HOSTS.search(line)):
                    if match:
                        yield f"{name_of(path)}:{number}: {match.group()}"

    expect_none(found())


def test_every_direct_dependency_is_pinned_within_its_range():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    pins = {canonicalize_name(name): version for name, version in pins.items()}
    for requirement in map(Requirement, wanted):
        pin = pins.get(canonicalize_name(requirement.name))
        assert pin, f"constraints.txt: {requirement.name} must be pinned"
        assert requirement.specifier.contains(pin), f"constraints.txt: {pin} is not {requirement}"


def run_python(code: str, *, cwd: Path = ROOT, isolated: bool = False) -> str:
    """Run code in a fresh interpreter; what it printed. Its own errors fail the test."""
    command = [sys.executable, *(["-I"] if isolated else []), "-c", code]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_neither_imports_lightning_nor_initialises_cuda():
    rooms = ("zero_strategy", "kernels", "moe", "sequence_parallel")
    paths = (p for p in sources(*rooms) if p not in LIGHTNING_FILES and Path(p).name != "triton.py")
    code = f"""
import importlib, os, sys
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
import torch

def refuse():
    raise AssertionError("initialised CUDA")

# Say that there is a GPU, so that code behind this question is tried too.
torch.cuda.is_available = lambda: True
torch.cuda._lazy_init = refuse
for name in {[module_of(path) for path in paths]!r}:
    importlib.import_module(name)
    loaded = {LIGHTNING!r} & set(sys.modules)
    assert not loaded, f"importing {{name}} imported {{loaded}}"
"""
    run_python(code)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel built from an sdist built from a copy of the tree, as a release is."""
    tree, dist = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    for path in walk(ROOT):
        copy = tree / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    for room in LINKED:
        (tree / "zero_strategy" / room).symlink_to(f"../{room}")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), str(tree)]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(dist.glob("*.whl"))


def test_the_rooms_are_linked_under_the_one_import_name():
    links = {
        path.name: path.readlink()
        for path in (ROOT / "zero_strategy").iterdir()
        if path.is_symlink()
    }
    assert links == {room: Path("..", room) for room in LINKED}


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(wheel):
    in_tree = {name_of(path) for room in ROOM_MAY_IMPORT for path in walk(ROOT / room)}
    expected = {
        path if path.startswith("zero_strategy/") else f"zero_strategy/{path}"
        for path in in_tree
        if not path.endswith(".md")
    }
    shipped = set(zipfile.ZipFile(wheel).namelist())
    shipped = {name for name in shipped if ".dist-info/" not in name}
    assert not sorted(expected - shipped), "in the tree, not in the wheel"
    assert not sorted(shipped - expected), "in the wheel, not in the tree"
    assert "zero_strategy/py.typed" in shipped


def test_every_module_imports_from_an_installed_wheel(wheel, tmp_path):
    target, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(target), str(wheel)], check=True, capture_output=True)
    optional = ("triton", "hf", "benchmarks")  # need Triton or an extra
    names = [module_of(path) for path in sources(*ROOM_MAY_IMPORT)]
    names = [name for name in names if not set(name.split(".")) & set(optional)]
    code = f"""
import importlib, sys
sys.path.insert(0, {str(target)!r})
for name in {names!r}:
    module = importlib.import_module(name)
    assert module.__file__.startswith({str(target)!r}), f"{{name}} came from {{module.__file__}}"
"""
    run_python(code, cwd=empty, isolated=True)
