"""Text that every installation has, and the sources of the running interpreter."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

BUILTIN_SHA256 = "26b38f21f5a17ac74f04b43856307ca2487fb992f91109691a91de3407ea3d89"

# Folders of the standard library that hold tests, or packages that are not part of it.
LEFT_OUT = {"test", "tests", "idle_test", "idlelib", "site-packages", "dist-packages"}


def builtin() -> Iterator[str]:
    """Yield the novel "Botchan" in English, one document of 0.26 MB, the same in every release.

    Raises:
        ValueError: the installed file was changed, so losses would not be comparable.
    """
    data = (files("zero_strategy.data") / "corpora" / "botchan.txt").read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    if digest != BUILTIN_SHA256:
        raise ValueError(
            f"corpora/botchan.txt = sha256 {digest[:12]}...: must be {BUILTIN_SHA256[:12]}... for "
            "comparable losses. Install zero-strategy again."
        )
    yield data.decode()


def stdlib() -> Iterator[str]:
    """Yield the interpreter's own modules, sorted by path, without tests: about 10 MB.

    The text depends on the Python version, so losses compare within one version only.
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths = (path.relative_to(root) for path in root.rglob("*.py"))
    for path in sorted(path for path in paths if not LEFT_OUT.intersection(path.parts)):
        yield (root / path).read_text(encoding="utf-8", errors="replace")


CORPORA = {"builtin": builtin, "stdlib": stdlib}
