"""`Monitor` on a tiny module: what it prints, writes and leaves alone."""

import csv
import re
from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader
from typing_extensions import override

from tests.ranks import ranks
from zero_strategy.monitor import Monitor
from zero_strategy.planning.estimate import MemoryPlan
from zero_strategy.protocols import CountsTokens, TellsPlan

pytestmark = [
    # One worker loads these toy tensors; Lightning would like more.
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]

PLAN = MemoryPlan(
    params_bytes=3 * 2**30,
    grads_bytes=3 * 2**30,
    optimizer_bytes=6 * 2**30,
    unsharded_bytes=2**29,
    num_params=3_370_000_000,
    num_trainable=3_370_000_000,
    num_units=28,
    unit_class="Block",
    world_size=1,
    strategy="zero3",
    precision="bf16-mixed",
)


class Quiet(pl.LightningModule):
    """Regression on noise; tells the monitor nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        loss = self.net(batch).square().mean()
        self.log_dict({"val_loss": loss, "val_bits_per_byte": loss / 2, "val_share": loss / 4})

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


class Talking(Quiet):
    """Counts its tokens."""

    def num_tokens(self, batch: Tensor) -> int:
        return batch.numel()

    def flops_per_token(self) -> float:
        return 6.0


class TwoOptimizers(Quiet):
    """Steps two optimizers by hand in every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.net(batch).square().mean()
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.net(batch).square().mean())
            optimizer.step()
        return loss.detach()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(self.parameters(), lr=0.01) for _ in range(2)]


class Telling(SingleDeviceStrategy):
    """A strategy that has a plan."""

    def __init__(self) -> None:
        super().__init__(device="cpu")
        self.plan = PLAN
        self.checks = {"dtype": "ok", "tied": "-"}
        self.grad_norm = torch.tensor(0.84)

    def take_exposed_comm_ms(self) -> float | None:
        return 0.001


def train(
    out: Path,
    module: pl.LightningModule,
    *,
    steps: int,
    every: int = 2,
    monitored: bool = True,
    resume_from: Path | None = None,
    **trainer_options: Any,
) -> pl.Trainer:
    options: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "limit_val_batches": 0,
        **trainer_options,
    }
    callbacks = [*options.pop("callbacks", []), *([Monitor(out, every=every)] if monitored else [])]
    trainer = pl.Trainer(
        max_steps=steps,
        callbacks=callbacks,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=out,
        **options,
    )
    loader = DataLoader(torch.randn(64, 4), batch_size=4)
    trainer.fit(module, loader, DataLoader(torch.randn(8, 4)), ckpt_path=resume_from)
    return trainer


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def lines(printed: str, label: str) -> list[str]:
    return [line for line in printed.splitlines() if line.startswith(label.ljust(7))]


def test_step_line_has_every_figure(tmp_path, capsys):
    train(tmp_path, Talking(), steps=4, strategy=Telling())
    last = lines(capsys.readouterr().out, "step")[-1]
    assert re.fullmatch(
        r"step   4/4 100%  loss +\d\.\d{4}  gn  0\.84  lr 1\.25e-03 "
        r"\| +[\d.]+k? tok/s/rank  MFU   - \| [\d.]+ [MG]iB \(plan 12\.5 GiB\) "
        r"\| exposed +[\d.]+% \| eta 0s",
        last,
    )


def test_a_strategy_that_tells_nothing_gets_dashes(tmp_path, capsys):
    train(tmp_path, Quiet(), steps=2)
    printed = capsys.readouterr().out
    assert re.search(r"gn     -  lr .* -? *- tok/s/rank  MFU   - .* exposed  - ", printed)
    assert not lines(printed, "plan")
    assert not lines(printed, "checks")


def test_plan_and_checks_stand_above_the_first_step(tmp_path, capsys):
    train(tmp_path, Quiet(), steps=2, strategy=Telling())
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed[:4]] == ["run", "plan", "checks", "step"]
    assert printed[0] == (
        "run    Quiet · 3.37B params (3.37B trainable) · 1 x cpu · zero3 · bf16-mixed · 2 steps"
    )
    assert printed[1] == (
        "plan   12.5 GiB per rank = params 3.0 GiB + grads 3.0 GiB + optimizer 6.0 GiB + "
        "unsharded 512 MiB · activations on top · 28 units of Block"
    )
    assert printed[2] == "checks dtype ok · tied -"


def test_without_a_terminal_lines_are_plain(tmp_path, capsys):
    train(tmp_path, Talking(), steps=4, limit_val_batches=1, val_check_interval=2)
    printed = capsys.readouterr().out
    assert "\r" not in printed
    assert "\033" not in printed


def test_csv_has_one_row_per_log_step(tmp_path):
    train(tmp_path, Talking(), steps=7, every=3)
    # The first step, the multiples of three, and the last.
    assert [row["step"] for row in rows(tmp_path / "metrics.csv")] == ["1", "3", "6", "7"]


def test_loss_is_the_mean_over_the_micro_batches_of_the_step(tmp_path):
    class Counting(Talking):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * 0 + batch_idx

    train(tmp_path, Counting(), steps=3, every=1, accumulate_grad_batches=4)
    table = rows(tmp_path / "metrics.csv")
    assert [float(row["loss"]) for row in table] == [1.5, 5.5, 9.5]
    assert [int(row["tokens"]) for row in table] == [64, 128, 192]


def test_learning_rate_is_that_of_the_step_not_of_the_next(tmp_path):
    train(tmp_path, Quiet(), steps=3, every=1)
    rates = [float(row["lr"]) for row in rows(tmp_path / "metrics.csv")]
    assert rates == [0.01, 0.005, 0.0025]


def test_two_optimizers_by_hand_are_counted_like_the_trainer_counts(tmp_path, capsys):
    train(tmp_path, TwoOptimizers(), steps=-1, every=3, limit_train_batches=4, max_epochs=1)
    assert [row["step"] for row in rows(tmp_path / "metrics.csv")] == ["2", "4", "6"]
    assert lines(capsys.readouterr().out, "done")


class Reads(TorchDispatchMode):
    """Counts reads of a tensor's value by the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


class ReadsPerStep(pl.Callback):
    """Notes how many reads each batch cost."""

    def __init__(self, reads: Reads) -> None:
        self.reads, self.per_step, self._before = reads, Counter[int](), 0

    @override
    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self._before = self.reads.count

    @override
    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.per_step[trainer.global_step + 1] += self.reads.count - self._before
        self._before = self.reads.count

    @override
    def on_train_batch_end(self, *args: Any) -> None:
        self.per_step[args[0].global_step] += self.reads.count - self._before


def test_no_tensor_is_read_outside_log_steps(tmp_path):
    per_step = {}
    for monitored in (False, True):
        reads = Reads()
        # The counter comes after the monitor, so what the monitor reads at the end of a batch
        # counts for that batch.
        monitor = [Monitor(tmp_path, every=4)] if monitored else []
        counter = ReadsPerStep(reads)
        with reads:
            train(
                tmp_path,
                Talking(),
                steps=8,
                monitored=False,
                callbacks=[*monitor, counter],
                strategy=Telling(),
            )
        per_step[monitored] = counter.per_step
    extra = {step: per_step[True][step] - per_step[False][step] for step in range(1, 9)}
    assert {step for step, count in extra.items() if count} == {1, 4, 8}


def test_resumed_run_does_not_repeat_rows(tmp_path, capsys):
    saved = ModelCheckpoint(tmp_path / "checkpoints", every_n_train_steps=4, save_top_k=-1)
    options: dict[str, Any] = {"callbacks": [saved], "enable_checkpointing": True, "every": 1}
    first = train(tmp_path, Talking(), steps=6, **options)
    assert first.global_step == 6
    before = rows(tmp_path / "metrics.csv")
    (at_four,) = (tmp_path / "checkpoints").iterdir()
    capsys.readouterr()

    train(tmp_path, Talking(), steps=8, resume_from=at_four, **options)
    after = rows(tmp_path / "metrics.csv")
    assert [row["step"] for row in after] == [str(step) for step in range(1, 9)]
    assert after[:4] == before[:4]
    assert [row["tokens"] for row in after] == [str(16 * step) for step in range(1, 9)]
    assert float(after[4]["elapsed_s"]) > float(after[3]["elapsed_s"])
    printed = capsys.readouterr().out
    assert "resumed after step 4" in printed
    assert lines(printed, "note") == [
        f"note   dropped 2 rows after step 4 from the CSV files in {tmp_path}"
    ]


def test_validation_line_and_row_show_what_was_logged(tmp_path, capsys):
    train(tmp_path, Talking(), steps=4, limit_val_batches=2, val_check_interval=2)
    printed = lines(capsys.readouterr().out, "val")
    assert len(printed) == 2
    assert re.fullmatch(r"val    2  loss \d\.\d{4}  \d\.\d{4} bits/byte  share [\d.]+", printed[0])
    table = rows(tmp_path / "validation.csv")
    assert [row["step"] for row in table] == ["2", "4"]
    assert float(table[0]["loss"]) == pytest.approx(2 * float(table[0]["bits_per_byte"]))


def test_save_line_names_the_checkpoint_and_the_time_it_took(tmp_path, capsys):
    saved = ModelCheckpoint(tmp_path / "checkpoints", filename="at-{step}", every_n_train_steps=2)
    train(tmp_path, Quiet(), steps=3, callbacks=[saved], enable_checkpointing=True)
    (printed,) = lines(capsys.readouterr().out, "save")
    assert re.fullmatch(r"save   2  at-step=2\.ckpt  \([\d.]+m?s blocking\)", printed)


def test_an_exception_still_leaves_the_report_and_says_so(tmp_path, capsys):
    class Failing(Quiet):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            if batch_idx == 3:
                raise RuntimeError("broken")
            return super().training_step(batch, batch_idx)

    with pytest.raises(RuntimeError, match="broken"):
        train(tmp_path, Failing(), steps=8)
    (printed,) = lines(capsys.readouterr().out, "stop")
    assert printed.startswith("stop   RuntimeError after step 3 · ")
    assert "RuntimeError" in (tmp_path / "report.html").read_text()


def test_figures_go_to_the_trainers_own_tensorboard_run(tmp_path):
    logger = TensorBoardLogger(tmp_path, name="board")
    train(tmp_path, Talking(), steps=4, logger=logger, strategy=Telling())
    board = EventAccumulator(logger.log_dir).Reload()
    scalars = set(board.Tags()["scalars"])
    for tag in ("Learning/loss", "Speed/stacked_ms/5_optimizer", "Memory/planned_gib"):
        assert tag in scalars
    assert "Health/rank_skew_ms" in scalars
    assert "custom_scalars__config__" in board.Tags()["tensors"]
    assert not (tmp_path / "tensorboard").exists()


def test_without_a_tensorboard_logger_figures_lie_beside_the_csv(tmp_path):
    train(tmp_path, Talking(), steps=2)
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert len(board.Scalars("Learning/loss")) == 2


def test_phases_share_out_the_step_time(tmp_path):
    train(tmp_path, Talking(), steps=6, every=2, strategy=Telling())
    for row in rows(tmp_path / "metrics.csv"):
        phases = ("data", "forward", "backward", "exposed_comm", "optimizer")
        total = sum(float(row[f"{phase}_ms"]) for phase in phases)
        # The file keeps seven digits of each.
        assert total == pytest.approx(float(row["step_ms"]), rel=1e-5)


@pytest.mark.parametrize("every", [0, -3, 2.5, "10"])
def test_every_that_counts_no_steps_is_refused(tmp_path, every):
    with pytest.raises(
        ValueError, match=r"^monitor\.every = .*: must be a whole number .*Use 10\.$"
    ):
        Monitor(tmp_path, every=every)


@pytest.mark.parametrize("out_dir", [3, None])
def test_a_folder_that_is_no_path_is_refused(out_dir):
    with pytest.raises(ValueError, match=r"^monitor\.out_dir = .*: must be the path of a folder"):
        Monitor(out_dir)


def test_protocols_are_recognised_by_shape():
    assert isinstance(Telling(), TellsPlan)
    assert not isinstance(SingleDeviceStrategy(device="cpu"), TellsPlan)
    assert isinstance(Talking(), CountsTokens)
    assert not isinstance(Quiet(), CountsTokens)


def train_on_a_rank(out: str, strategy: str) -> None:
    """Two ranks see losses 0 and 1, so only a reduced figure is one half."""

    class RankAsLoss(Talking):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.net(batch).mean() * 0 + self.global_rank

    train(Path(out), RankAsLoss(), steps=4, devices=2, strategy=strategy)


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_figures_of_two_ranks_are_brought_together_and_written_once(tmp_path, strategy):
    ranks(2).run(train_on_a_rank, str(tmp_path), strategy)
    table = rows(tmp_path / "metrics.csv")
    assert [row["step"] for row in table] == ["1", "2", "4"]
    assert [float(row["loss"]) for row in table] == [0.5] * 3
    assert [int(row["tokens"]) for row in table] == [32, 64, 128]
    told = strategy == "zero3"
    assert all(bool(row["grad_norm"] and row["planned_bytes"]) is told for row in table)
