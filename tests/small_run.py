"""A run of `zs train` that takes a second: settings, and a call in this process."""

from pathlib import Path
from typing import Any

from zero_strategy.experiments.cli import main

SHORT = [
    *("model.num_layers=2", "model.hidden_size=16", "model.num_heads=2", "model.num_kv_heads=1"),
    *("model.intermediate_size=24", "model.max_seq_len=32", "data.seq_len=32"),
    *("optim.warmup_steps=1", "trainer.accelerator=cpu", "trainer.log_every=1"),
    *("trainer.val_every=2", "trainer.val_batches=2", "trainer.save_every=3"),
    *("sample.num_tokens=5", "sample.prompt=Hello"),
]


def zs_train(capsys: Any, out_dir: str | Path, *words: str) -> tuple[int, str, str]:
    """Train in this process; the exit code and what was printed."""
    code = main(
        ["train", "tiny.yaml", *SHORT, "trainer.strategy=auto", f"out_dir={out_dir}", *words]
    )
    return code, *capsys.readouterr()
