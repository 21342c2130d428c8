"""Validation, test and prediction: any order, any lengths, and nothing left gathered."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, IterableDataset

from tests import lit
from tests.counting import collectives
from tests.ranks import RankError, ranks

NAMES = ("zero1", "zero2", "zero3")


def _predict_uneven(name: str, num_rows: int) -> int:
    data = lit.Tokens(num_rows)
    outputs = lit.trainer(name).predict(lit.Lit(), DataLoader(data, batch_size=2))
    return len(outputs)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_uneven_prediction_finishes(name: str, world_size: int) -> None:
    # 9 rows: Lightning's sampler does not pad predictions, so the ranks get 3, 2, 2, 2 rows.
    lengths = ranks(world_size).run(_predict_uneven, name, 9)
    assert sum(lengths) == {2: 3 + 2, 4: 2 + 1 + 1 + 1}[world_size]


class _Stream(IterableDataset):
    """A stream of rank-dependent length, without a known length."""

    def __init__(self, lengths: list[int]) -> None:
        self.length = lengths[dist.get_rank()]

    def __iter__(self) -> Any:
        return iter(lit.Tokens(self.length).rows)


class _AskingAtEnd(lit.Lit):
    """Runs a collective of its own at the end of the epoch, as many callbacks do."""

    def on_validation_epoch_end(self) -> None:
        self.seen = self.all_gather(torch.tensor(float(self.trainer.global_rank)))


def _validate_streams(name: str, lengths: list[int], limit: Any) -> tuple[float, list[float]]:
    module = _AskingAtEnd()
    run = lit.trainer(name, limit_val_batches=limit)
    data = DataLoader(_Stream(lengths), batch_size=2)
    result = run.validate(module, data, verbose=False)
    return result[0]["val_loss"], module.seen.tolist()


@pytest.mark.parametrize("limit", [1.0, 2])
@pytest.mark.parametrize("lengths", [[6, 2], [2, 7], [1, 1]])
def test_uneven_streams_finish_before_the_users_own_collectives(
    lengths: list[int], limit: Any
) -> None:
    for loss, seen in ranks(2).run(_validate_streams, "zero3", lengths, limit):
        assert loss > 0
        assert seen == [0.0, 1.0]


class _Generating(lit.Lit):
    """Generates more tokens on some ranks than on others."""

    def predict_step(self, batch: Tensor, index: int) -> Tensor:
        row = batch[:, :3]
        for _ in range(2 + 3 * self.trainer.global_rank + index):
            row = torch.cat([row, self(row)[:, -1:].argmax(-1)], dim=1)
        return row


def _generate(name: str) -> list[list[list[int]]]:
    data = DataLoader(lit.Tokens(6), batch_size=2)
    return [o.tolist() for o in lit.trainer(name).predict(_Generating(), data)]


def _generate_alone(num_ranks: int, rank: int) -> list[list[list[int]]]:
    """What the same generation gives on one unsharded module."""
    module = lit.Lit().eval()
    rows = lit.Tokens(6).rows[rank::num_ranks]
    outputs = []
    with torch.no_grad():
        for index, batch in enumerate(rows.split(2)):
            row = batch[:, :3]
            for _ in range(2 + 3 * rank + index):
                row = torch.cat([row, module(row)[:, -1:].argmax(-1)], dim=1)
            outputs.append(row.tolist())
    return outputs


@pytest.mark.parametrize("name", NAMES)
def test_unequal_generation_lengths_finish_with_the_unsharded_tokens(name: str) -> None:
    outputs = ranks(2).run(_generate, name)
    for rank, output in enumerate(outputs):
        assert output == _generate_alone(2, rank)


def _generate_between_steps(name: str) -> list[list[int]]:
    module = lit.Lit()
    run = lit.trainer(name, max_steps=2)
    run.fit(module, lit.loader())
    with run.strategy.inference():
        row = lit.Tokens().rows[:2, :4]
        for _ in range(3 + 2 * run.global_rank):
            row = torch.cat([row, module(row)[:, -1:].argmax(-1)], dim=1)
    run.fit(module, lit.loader())
    return row[:, :7].tolist()


@pytest.mark.parametrize("name", NAMES)
def test_module_can_be_called_between_runs(name: str) -> None:
    first, second = ranks(2).run(_generate_between_steps, name)
    assert first == second


def _orders(name: str, order: list[str], path: str) -> list[float]:
    """Run the named functions in order, twice fit included, on one trainer and module."""
    module = lit.Lit()
    run = lit.trainer(name, max_steps=2)
    data = lit.loader()
    for function in order:
        if function == "fit":
            run.fit_loop.epoch_loop.max_steps += 2
            run.fit(module, data, data if "val" in path else None)
        elif function == "save":
            run.save_checkpoint(path)
        elif function == "predict":
            run.predict(module, data)
        else:
            getattr(run, function)(module, data, verbose=False)
    return module.losses


@pytest.mark.parametrize(
    "order",
    [
        ["validate", "fit", "test", "save", "predict"],
        ["predict", "test", "fit", "validate", "fit"],
        ["test", "save", "fit", "save"],
        ["fit", "predict", "save", "validate", "fit", "test"],
    ],
    ids="-".join,
)
def test_any_order_of_runs_trains_alike(order: list[str], tmp_path: Any) -> None:
    expected = _orders("auto", [f for f in order if f == "fit"], str(tmp_path / "plain"))
    for name in NAMES:
        path = str(tmp_path / f"{name}.ckpt")
        for losses in ranks(2).run(_orders, name, order, path):
            assert losses == pytest.approx(expected, rel=2e-6)


class _Watching(lit.Lit):
    """Looks at its parameters where callbacks do."""

    def __init__(self) -> None:
        super().__init__()
        self.sharded: dict[str, bool] = {}

    def _look(self, where: str) -> None:
        here = all(isinstance(p, DTensor) for p in self.parameters())
        self.sharded[where] = self.sharded.get(where, True) and here

    def on_validation_batch_end(self, *_: Any) -> None:
        self._look("validation batch end")

    def on_validation_epoch_end(self) -> None:
        self._look("validation epoch end")

    def on_validation_end(self) -> None:
        self._look("validation end")

    def on_train_batch_end(self, *_: Any) -> None:
        self._look("train batch end")


def _watch(name: str) -> dict[str, bool]:
    module = _Watching()
    lit.trainer(name, max_steps=3, val_check_interval=1).fit(module, lit.loader(), lit.loader(24))
    return module.sharded


@pytest.mark.parametrize("name", NAMES)
def test_callbacks_find_sharded_parameters(name: str) -> None:
    for sharded in ranks(2).run(_watch, name):
        assert len(sharded) == 4
        assert all(sharded.values())


def _count_gathers(name: str) -> tuple[int, int]:
    run = lit.trainer(name)
    module = lit.Lit()
    run.validate(module, lit.loader(12), verbose=False)
    with collectives() as counts:
        run.validate(module, lit.loader(48), verbose=False)
    return counts["all_gather"], len(run.strategy.sharded.modules)


@pytest.mark.parametrize("name", NAMES)
def test_each_validation_batch_gathers_each_unit_once(name: str) -> None:
    gathers, units = ranks(2).run(_count_gathers, name)[0]
    assert gathers == 4 * units


class _NcclRules:
    """What Lightning's loops ask torch.distributed, answered as under NCCL."""

    def __getattr__(self, name: str) -> Any:
        return (lambda *_: "nccl") if name == "get_backend" else getattr(dist, name)


def _validate_with_nccl_rules(name: str) -> list[float]:
    from lightning.pytorch.loops import utilities

    utilities.dist = _NcclRules()
    try:
        module = lit.Lit()
        run = lit.trainer(name, max_steps=2)
        run.validate(module, lit.loader(), verbose=False)
        run.fit(module, lit.loader())
    finally:
        utilities.dist = dist
    return module.losses


@pytest.mark.parametrize("name", NAMES)
def test_training_after_validation_under_inference_mode_rules(name: str) -> None:
    expected = lit.fit("auto", steps=2).losses
    for losses in ranks(2).run(_validate_with_nccl_rules, name):
        assert losses == pytest.approx(expected, rel=2e-6)


class _TwoLoaders(lit.Lit):
    def validation_step(self, batch: Tensor, index: int, dataloader_idx: int = 0) -> None:
        self.log("val", self.loss(batch), sync_dist=True, add_dataloader_idx=True)


def _two_val_loaders(name: str) -> dict[str, float]:
    module = _TwoLoaders()
    run = lit.trainer(name, max_steps=2)
    run.fit(module, lit.loader(), [lit.loader(24), lit.loader(36)])
    run.validate(module, [lit.loader(24), lit.loader(36)], verbose=False)
    return {n: float(v) for n, v in run.callback_metrics.items()}


def test_several_validation_loaders_share_one_sharded_module() -> None:
    expected = _two_val_loaders("auto")
    for name in NAMES:
        for metrics in ranks(2).run(_two_val_loaders, name):
            assert metrics == pytest.approx(expected, rel=1e-5)
            assert {"val/dataloader_idx_0", "val/dataloader_idx_1"} <= set(metrics)


class _Echo(lit.Lit):
    def predict_step(self, batch: Tensor, index: int) -> Tensor:
        self(batch[:, :-1])
        return batch


def _predicted_rows(name: str) -> list[list[int]]:
    outputs = lit.trainer(name).predict(_Echo(), DataLoader(lit.Tokens(9), batch_size=2))
    return [row for output in outputs for row in output.tolist()]


def test_every_sample_is_predicted_once() -> None:
    rows = [row for per_rank in ranks(2).run(_predicted_rows, "zero3") for row in per_rank]
    assert sorted(rows) == sorted(lit.Tokens(9).rows.tolist())


class _Normalizing(lit.Lit):
    """Keeps running statistics, which each rank's own batches move."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(13)

    def loss(self, row_BT: Tensor) -> Tensor:
        return super().loss(row_BT) + self.norm(row_BT[:, :-1].float()).square().mean()


def _normalize(name: str, path: str) -> tuple[dict[str, float], list[float], list[float]]:
    module = _Normalizing()
    run = lit.trainer(name, max_steps=4, val_check_interval=2)
    run.fit(module, lit.loader(48), lit.loader(24))
    metrics = {k: float(v) for k, v in run.callback_metrics.items() if k.startswith("val")}
    run.save_checkpoint(path)
    kept = module.norm.running_mean.tolist()
    resumed = _Normalizing()
    again = lit.trainer(name)
    result = again.validate(resumed, lit.loader(24), ckpt_path=path, verbose=False)
    return metrics, kept, [result[0]["val_loss"], *resumed.norm.running_mean.tolist()]


@pytest.mark.parametrize("name", NAMES)
def test_all_ranks_evaluate_and_save_one_set_of_running_statistics(
    name: str, tmp_path: Any
) -> None:
    expected = ranks(2).run(_normalize, "ddp", str(tmp_path / "ddp.ckpt"))[0]
    for metrics, kept, resumed in ranks(2).run(_normalize, name, str(tmp_path / "a.ckpt")):
        assert metrics == pytest.approx(expected[0], rel=1e-5)
        assert resumed[0] == pytest.approx(metrics["val_loss"], rel=1e-6)
        assert resumed[1:] == kept == pytest.approx(expected[1], rel=1e-6)


def _other_buffer(name: str) -> None:
    module = lit.Lit()
    if dist.get_rank() == 1:
        module.register_buffer("extra", torch.ones(3))
    lit.trainer(name, max_steps=1).fit(module, lit.loader())


def test_a_buffer_on_one_rank_only_is_refused() -> None:
    with pytest.raises(RankError, match=r"ranks \[1\] built another module than rank 0"):
        ranks(2).run(_other_buffer, "zero3")


class _SamplingAlone(Callback):
    """Rank 0 alone calls the module after each validation, also before the first step."""

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        with trainer.strategy.inference():
            if trainer.global_rank == 0:
                pl_module(lit.Tokens(2).rows[:, :-1])


def _fit_and_sample(name: str, callbacks: list[Callback]) -> list[float]:
    module = lit.Lit()
    run = lit.trainer(name, max_steps=4, val_check_interval=2, callbacks=callbacks)
    run.fit(module, lit.loader(), lit.loader(24))
    return module.losses


@pytest.mark.parametrize("name", ["zero1", "zero3"])
def test_training_goes_on_after_one_rank_alone_has_called_the_module(name: str) -> None:
    undisturbed = ranks(2).run(_fit_and_sample, name, [])
    assert ranks(2).run(_fit_and_sample, name, [_SamplingAlone()], timeout_s=20) == undisturbed
