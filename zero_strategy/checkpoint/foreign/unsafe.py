"""The process in which pickles of a checkpoint are run that the user trusts as a program."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from zero_strategy.checkpoint.convert import run


def main(request: str) -> int:
    """Convert, and write what was converted as JSON; the reason of a refusal goes to stderr."""
    source, target, kind, weights_only, stored_dtypes, answer = json.loads(request)
    try:
        converted = run(Path(source), Path(target), kind, weights_only, stored_dtypes, unsafe=True)
    except ValueError as error:
        print(" ".join(str(error).splitlines()), file=sys.stderr)
        return 2
    Path(answer).write_text(json.dumps(asdict(converted)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
