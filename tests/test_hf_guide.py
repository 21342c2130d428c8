"""The guide's example of a Hugging Face model does what it shows."""

import os
import re
import subprocess
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM

import tests.hf_models  # noqa: F401 - no hub is asked from here on

GUIDE = Path(__file__).resolve().parent.parent / "docs/guide.md"


def test_the_guides_example_runs_as_it_stands(tmp_path: Path) -> None:
    section = GUIDE.read_text().split("## 12. Hugging Face models")[1]
    (tmp_path / "example.py").write_text(re.findall(r"```python\n(.*?)```", section, re.DOTALL)[0])
    command = [sys.executable, "-W", "ignore", "example.py"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "llama-tuned").config.vocab_size == 99
