"""Runs saved on some ranks at some stage, and taken up on others at another, bit by bit."""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast, final

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from typing_extensions import override

from zero_strategy.checkpoint import storage
from zero_strategy.checkpoint.diff import diff
from zero_strategy.config import OffloadConfig
from zero_strategy.experiments.benchmarks.forks import run_ranks
from zero_strategy.strategy import ZeroStrategy

STRATEGIES = ("zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
NUM_STEPS = 2
_LIMIT_S = 200.0
"""For all that a number of ranks saves or takes up."""
_VOCABULARY, _WIDTH, _INNER = 61, 11, 17


@final
class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(_WIDTH, _INNER)
        self.down = nn.Linear(_INNER, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


@final
class _Model(pl.LightningModule):
    """Tied, frozen and odd weights, one with fewer rows than ranks, a buffer, two groups."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(_VOCABULARY, _WIDTH)
        self.blocks = nn.ModuleList([_Block(), _Block(), _Block()])
        cast(_Block, self.blocks[1]).up.weight.requires_grad_(False)
        self.few = nn.Linear(_WIDTH, 2)
        self.head = nn.Linear(_WIDTH, _VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("offset", torch.randn(5))

    @override
    def training_step(self, batch: Tensor, index: int) -> Tensor:
        x = self.embed(batch[:, :-1])
        for block in self.blocks:
            x = block(x)
        loss = F.cross_entropy(self.head(x).flatten(0, 1).float(), batch[:, 1:].flatten())
        return loss + self.few(x).float().square().mean()

    @override
    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(
            [
                {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.05},
                {"params": [p for p in trained if p.ndim <= 1], "lr": 2e-3},
            ],
            lr=1e-2,
        )


@final
class _SaveAtStart(Callback):
    """Saves what a run has taken up, before it trains."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.save_checkpoint(self.path)


def _trainer(name: str, steps: int, callbacks: list[Callback]) -> pl.Trainer:
    offload = OffloadConfig(placement="host", chunk_elements=256) if "offload" in name else None
    return pl.Trainer(
        strategy=ZeroStrategy(stage=cast(Any, int(name[4])), offload=offload),
        accelerator="cpu",
        devices=dist.get_world_size(),
        precision="bf16-mixed",
        max_steps=steps,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def _rows() -> DataLoader[Tensor]:
    draw = torch.Generator().manual_seed(3)
    rows = torch.randint(0, _VOCABULARY, (24 * dist.get_world_size(), 6), generator=draw)
    return DataLoader(cast(Any, rows), batch_size=2)


def reshapes(*, most_ranks: int, num_strategies: int) -> dict[str, Any]:
    """Save on 1, 2, ... ranks, and take up every saved run on each number of ranks.

    Args:
        most_ranks: so many at most.
        num_strategies: of `STRATEGIES`, the last so many.

    Returns: "same" and "pairs", what `save_all` and `load_all` return; "strategies"; "ranks".

    Raises:
        RuntimeError: a rank failed; says why.
    """
    strategies: list[str] = list(STRATEGIES[-num_strategies:])
    found: dict[str, dict[str, Any]] = {"same": {}, "pairs": {}}
    with tempfile.TemporaryDirectory() as name:
        for what, function in (("same", save_all), ("pairs", load_all)):
            for size in range(1, most_ranks + 1):
                found[what] |= _on_ranks(size, function, Path(name), strategies)
    return {**found, "strategies": strategies, "ranks": most_ranks}


def _on_ranks(
    world_size: int,
    function: Callable[[Path, list[str]], dict[str, Any]],
    folder: Path,
    strategies: list[str],
) -> dict[str, Any]:
    """Call a function in forks that form a group; returns what it returns on rank 0."""
    report, reason = folder / "report.json", folder / "reason"

    def run(rank: int) -> None:
        try:
            if not dist.is_initialized():
                dist.init_process_group("gloo")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                value = function(folder, strategies)
        except Exception as error:
            reason.write_text(f"{type(error).__name__}: {error}")
            raise
        if rank == 0:
            report.write_text(json.dumps(value))

    codes = run_ranks(world_size, run, limit_s=_LIMIT_S)
    if any(codes):
        why = reason.read_text() if reason.exists() else f"ended with {codes}"
        raise RuntimeError(f"{function.__name__} on {world_size} ranks: {why}")
    return json.loads(report.read_text())


def save_all(folder: Path, strategies: list[str]) -> dict[str, bool]:
    """Train on these ranks with each strategy, from a seed of its own, and save. Collective.

    Returns: name of the checkpoint -> whether it holds every bit of the run's weights, buffers and
        moments, as the run itself shows them.
    """
    world_size, same = dist.get_world_size(), {}
    for number, name in enumerate(strategies):
        path = folder / f"{name}-{world_size}.ckpt"
        module = _Model(seed=100 * world_size + number)
        trainer = _trainer(name, NUM_STEPS, [])
        trainer.fit(module, _rows())
        trainer.save_checkpoint(path)
        live = _live(trainer, module)
        dist.barrier()
        there = storage.contents(path)
        same[path.name] = all(torch.equal(storage.read(path, there, n), t) for n, t in live.items())
    return same


def _live(trainer: pl.Trainer, module: _Model) -> dict[str, Tensor]:
    """Return the whole tensors of a run by canonical name; of offloaded ones the weights."""
    strategy = cast(ZeroStrategy, trainer.strategy)
    weights = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    weights |= strategy.masters()
    live = {f"model.{name}": value for name, value in weights.items()}
    names = {id(p): name for name, p in module.named_parameters()}
    for parameter, slots in trainer.optimizers[0].state.items():
        for slot, value in slots.items():
            if isinstance(value, Tensor) and value.ndim:
                live[f"optim.0.{names[id(parameter)]}.{slot}"] = value
    return {name: _whole(value) for name, value in live.items()}


def _whole(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach()


def load_all(folder: Path, strategies: list[str]) -> dict[str, list[str]]:
    """Take up every saved run on these ranks, and save what was taken up. Collective.

    Args:
        folder: of `save_all`.
        strategies: taken in turn.

    Returns: the pair -> where the second checkpoint differs from the first; nothing if nowhere.
    """
    world_size, pairs = dist.get_world_size(), {}
    saved = sorted(folder.glob("zero*.ckpt"))
    again = folder / f"again on {world_size}.ckpt"
    for number, path in enumerate(saved):
        name = strategies[(number + world_size) % len(strategies)]
        trainer = _trainer(name, NUM_STEPS + 1, [_SaveAtStart(again)])
        trainer.fit(_Model(seed=0), _rows(), ckpt_path=path)
        dist.barrier()
        pair = f"{path.stem} -> {name}-{world_size}"
        pairs[pair] = [line for line in diff(path, again) if _is_state(line)]
        dist.barrier()
    return pairs


def _is_state(line: str) -> bool:
    # What else is stored tells of the ranks, such as the state of their generators.
    return line.startswith(("model.", "optim.", "meta.optimizers"))
