"""C libraries: built once, in a cache nobody else can write, and never run when cut short."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from zero_strategy.kernels import build

ROOT = Path(__file__).parent.parent
NOT_ROOT = os.geteuid() != 0


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ZERO_STRATEGY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "_outcomes", {})
    return tmp_path / "cache/kernels"


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Return a function that makes CC a script; it logs each compilation before the body runs."""
    real = build.find_compiler()[0]

    def make(body='exec "$REAL" "$@"'):
        script, log = tmp_path / "compiler", tmp_path / "log"
        version = f'[ "$1" = --version ] && exec {real} --version\n'
        body = body.replace("$REAL", real)
        script.write_text(f"#!/bin/sh\n{version}echo built >> {log}\n{body}\n")
        script.chmod(0o755)
        monkeypatch.setenv("CC", str(script))
        log.write_text("")
        return lambda: log.read_text().count("built")

    return make


def test_two_processes_race_and_one_builds(compiler):
    num_built = compiler('sleep 0.5; exec "$REAL" "$@"')
    code = "from zero_strategy.kernels import build; print(build.load('adam', 'baseline')._name)"
    command = [sys.executable, "-c", code]
    racers = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    paths = {racer.communicate(timeout=120)[0] for racer in racers}
    assert [racer.returncode for racer in racers] == [0, 0, 0]
    assert len(paths) == 1
    assert num_built() == 1


def test_a_cached_library_is_not_built_again(compiler):
    num_built = compiler()
    assert build.build("adam", "baseline") == build.build("adam", "baseline")
    assert num_built() == 1


def test_flags_and_compiler_are_part_of_the_name(compiler, monkeypatch):
    compiler()
    first = build.build("adam", "baseline")
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g0"))
    second = build.build("adam", "baseline")
    monkeypatch.delenv("CC")
    third = build.build("adam", "baseline")
    assert len({first, second, third}) == 3


def test_the_cache_is_the_users_alone_and_holds_no_leftovers(cache):
    library = build.build("adam", "baseline")
    assert cache.stat().st_mode & 0o777 == 0o700
    assert sorted(path.name for path in cache.iterdir()) == sorted(["lock", library.name])


@pytest.mark.parametrize("mode", [0o777, 0o720])
def test_a_cache_that_others_can_write_is_refused(cache, mode):
    cache.mkdir(parents=True)
    cache.chmod(mode)
    with pytest.raises(build.BuildError, match=rf"mode 0{mode:o}: must not be writable by others"):
        build.load("adam", "baseline")
    assert not list(cache.iterdir())


def test_a_cache_that_is_a_link_is_refused(cache, tmp_path):
    cache.parent.mkdir()
    cache.symlink_to(tmp_path)
    with pytest.raises(build.BuildError, match="must be a directory of the user who runs this"):
        build.load("adam", "baseline")


def test_a_cache_of_someone_else_is_refused(cache, monkeypatch):
    cache.mkdir(parents=True, mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: cache.stat().st_uid + 1)
    with pytest.raises(build.BuildError, match="must be a directory of the user who runs this"):
        build.load("adam", "baseline")


def test_a_cache_that_cannot_be_made_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("ZERO_STRATEGY_CACHE", str(tmp_path / "file/cache"))
    with pytest.raises(build.BuildError, match=r"must be writable .*or set ZERO_STRATEGY_CACHE"):
        build.load("adam", "baseline")


@pytest.mark.skipif(not NOT_ROOT, reason="root may write anywhere")
def test_a_read_only_cache_is_refused(cache):
    cache.mkdir(parents=True, mode=0o500)
    with pytest.raises(build.BuildError, match="must be writable"):
        build.load("adam", "baseline")


def test_the_cache_follows_the_desktop_convention(tmp_path, monkeypatch):
    monkeypatch.delenv("ZERO_STRATEGY_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert build.cache_directory() == tmp_path / "xdg/zero_strategy/kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert build.cache_directory() == tmp_path / "home/.cache/zero_strategy/kernels"


@pytest.mark.parametrize("damage", ["empty", "cut short", "one byte"])
def test_a_damaged_library_is_built_again(compiler, damage):
    num_built = compiler()
    library = build.build("adam", "baseline")
    content = library.read_bytes()
    damaged = {
        "empty": b"",
        "cut short": content[: len(content) // 2],
        "one byte": content[:5000] + bytes([content[5000] ^ 1]) + content[5001:],
    }
    library.write_bytes(damaged[damage])
    assert build.build("adam", "baseline") == library
    assert build.is_whole(library)
    assert num_built() == 2
    build.load("adam", "baseline")


def test_a_failed_build_shows_its_cause_and_is_not_tried_again(cache, compiler):
    num_built = compiler("echo no room on device >&2; exit 4")
    for _ in range(2):
        with pytest.raises(build.BuildError, match=r"exited with 4(?s:.*)no room on device"):
            build.load("adam", "baseline")
    assert num_built() == 1
    assert [path.name for path in cache.iterdir()] == ["lock"]


def test_a_compiler_that_hangs_is_given_up(compiler, monkeypatch):
    compiler("exec sleep 20")
    monkeypatch.setattr(build, "COMPILE_LIMIT_S", 0.5)
    with pytest.raises(build.BuildError, match=r"must end within 0\.5 s"):
        build.load("adam", "baseline")


def test_a_compiler_that_makes_no_library_is_an_error(compiler):
    compiler('for last; do :; done; while [ "$1" != -o ]; do shift; done; echo text > "$2"')
    with pytest.raises(build.BuildError, match="adam for baseline cannot be used"):
        build.load("adam", "baseline")


def test_a_lock_that_is_never_let_go_is_an_error(cache, monkeypatch):
    cache.mkdir(parents=True, mode=0o700)
    monkeypatch.setattr(build, "COMPILE_LIMIT_S", 0.1)
    with (
        build._locked(cache / "lock"),
        pytest.raises(build.BuildError, match="is held by another"),
        build._locked(cache / "lock"),
    ):
        pytest.fail("the lock was had twice")


def test_no_compiler_is_an_error_that_names_the_remedy(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(build.BuildError, match="Install gcc, or set CC"):
        build.load("adam", "baseline")


def test_a_named_compiler_that_is_missing_is_not_replaced_silently(monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler -m64")
    with pytest.raises(build.BuildError, match="CC = 'no-such-compiler': must be a C compiler"):
        build.find_compiler()


def test_a_named_compiler_may_hold_arguments(monkeypatch):
    real = build.find_compiler()[0]
    monkeypatch.setenv("CC", f"{real} -pipe")
    assert build.find_compiler() == [real, "-pipe"]
    assert build.is_whole(build.build("adam", "baseline"))
