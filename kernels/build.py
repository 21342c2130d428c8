"""C sources become shared libraries once per machine: compiler, cache, lock.

A library's file name holds a hash of everything that decides its contents, so a cache never serves
a stale one. The cache directory must be the user's alone, because what lies in it is run. A file
ends with its own digest: one that was cut short is seen before it is mapped, and built again.

Only the standard library is imported, so any kernel may build at run time.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shlex
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CSRC = Path(__file__).resolve().parent / "csrc"
COMPILE_LIMIT_S = 120.0
COMPILERS = ("cc", "gcc", "clang")
# No contraction: which products are fused with which sums is written in the source.
FLAGS = (
    *("-std=gnu11", "-O3", "-fno-math-errno", "-ffp-contract=off"),
    *("-fPIC", "-shared", "-fvisibility=hidden", "-pthread"),
)
ISA_FLAGS = {
    "avx512": (
        *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"),
        *("-mavx2", "-mfma", "-mprefer-vector-width=512"),
    ),
    "avx2": ("-mavx2", "-mfma"),
    "baseline": (),
}
DIGEST_BYTES = hashlib.sha256().digest_size

_outcomes: dict[tuple[str, str], ctypes.CDLL | BuildError] = {}


class BuildError(RuntimeError):
    """A library could not be built or must not be loaded; says why and what to do."""


def load(name: str, isa: str) -> ctypes.CDLL:
    """Build `csrc/<name>.c` for an instruction set unless the cache has it, and load it.

    Args:
        name: of the source, without suffix.
        isa: "avx512", "avx2" or "baseline".

    Returns:
        The library; the same object for every call in this process. Calls into it release the GIL.

    Raises:
        BuildError: no compiler, a failed or too slow compilation, an unsafe or unwritable cache.
            The same error is raised again by later calls, without a new attempt.

    Cost: one run of `cc --version`, and about 2 s when nothing is cached; other processes wait.
    """
    key = (name, isa)
    if key not in _outcomes:
        try:
            _outcomes[key] = ctypes.CDLL(str(build(name, isa)))
        except BuildError as error:
            _outcomes[key] = error
        except OSError as error:
            _outcomes[key] = BuildError(f"kernels.build: {name} for {isa} cannot be used: {error}")
    outcome = _outcomes[key]
    if isinstance(outcome, BuildError):
        raise outcome
    return outcome


def build(name: str, isa: str) -> Path:
    """Return the path of the built library; see `load`."""
    compiler = find_compiler()
    folder = cache_directory()
    target = folder / f"{name}-{isa}-{_fingerprint(compiler, isa)}.so"
    if not is_whole(target):
        with _locked(folder / "lock"):
            # Another process may have built it while this one waited.
            if not is_whole(target):
                _compile(compiler, name, isa, target)
    return target


def find_compiler() -> list[str]:
    """Return the command of a C compiler: `CC` (which may hold arguments), else cc, gcc or clang.

    Raises:
        BuildError: `CC` names nothing that runs, or there is no compiler.
    """
    named = shlex.split(os.environ.get("CC", ""))
    for command in [named] if named else [[compiler] for compiler in COMPILERS]:
        found = shutil.which(command[0])
        if found:
            return [found, *command[1:]]
    if named:
        raise BuildError(f"CC = '{named[0]}': must be a C compiler that is installed. Unset CC.")
    raise BuildError("PATH: must hold a C compiler (cc, gcc or clang). Install gcc, or set CC.")


def cache_directory() -> Path:
    """Return the directory of built libraries, made if missing, for this user alone.

    It is `$ZERO_STRATEGY_CACHE/kernels`, else `zero_strategy/kernels` in the user's cache
    directory (`$XDG_CACHE_HOME`, `~/.cache`).

    Raises:
        BuildError: it cannot be made or written, belongs to someone else, is a link, or others may
            write into it.
    """
    chosen = os.environ.get("ZERO_STRATEGY_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "zero_strategy"
    folder = (Path(chosen).expanduser() if chosen else base) / "kernels"
    elsewhere = "or set ZERO_STRATEGY_CACHE to a directory of your own."
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        reason = f"cache directory '{folder}': must be writable ({error.strerror})."
        raise BuildError(f"{reason} Make it so, {elsewhere}") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise BuildError(
            f"cache directory '{folder}': must be a directory of the user who runs this. "
            f"Remove it, {elsewhere}"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BuildError(
            f"cache directory '{folder}' = mode {stat.S_IMODE(status.st_mode):04o}: must not be "
            f"writable by others. Empty it and `chmod 700` it, {elsewhere}"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise BuildError(
            f"cache directory '{folder}': must be writable. `chmod 700` it, {elsewhere}"
        )
    return folder


def is_whole(library: Path) -> bool:
    """Tell whether a cached library is there and ends with the digest of what precedes it."""
    try:
        content = library.read_bytes()
    except FileNotFoundError:
        return False
    code, digest = content[:-DIGEST_BYTES], content[-DIGEST_BYTES:]
    return hashlib.sha256(code).digest() == digest


def _fingerprint(compiler: list[str], isa: str) -> str:
    version = _run([*compiler, "--version"])
    sources = [path.read_bytes() for path in sorted(CSRC.glob("*.[ch]"))]
    parts = [version, shlex.join([*compiler, *FLAGS, *ISA_FLAGS[isa]]).encode(), *sources]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _compile(compiler: list[str], name: str, isa: str, target: Path) -> None:
    """Compile beside the target and rename, so that the name never shows a half-written file."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        built = Path(folder) / target.name
        flags = [*FLAGS, *ISA_FLAGS[isa]]
        source = str(CSRC / f"{name}.c")
        _run([*compiler, *flags, source, "-o", str(built), "-lm"])
        # The loader ignores what follows the last section.
        with built.open("ab") as file:
            file.write(hashlib.sha256(built.read_bytes()).digest())
        built.rename(target)


def _run(command: list[str]) -> bytes:
    try:
        done = subprocess.run(command, capture_output=True, timeout=COMPILE_LIMIT_S, check=True)
    except subprocess.TimeoutExpired as error:
        raise BuildError(
            f"{shlex.join(command)}: must end within {COMPILE_LIMIT_S:g} s. Try again when the "
            "machine is idle."
        ) from error
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip()
        raise BuildError(
            f"{shlex.join(command)}: must succeed, but exited with {error.returncode}. Mend the "
            f"compiler or name another in CC. It said:\n{said}"
        ) from error
    return done.stdout


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock between processes; the system lets go of a dead one's."""
    deadline = time.monotonic() + 2 * COMPILE_LIMIT_S
    with path.open("ab") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise BuildError(
                        f"'{path}': is held by another process for {2 * COMPILE_LIMIT_S:g} s. "
                        "End that process, or set ZERO_STRATEGY_CACHE to another directory."
                    ) from error
                time.sleep(0.02)
        yield
