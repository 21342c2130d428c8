"""Under offload: what is saved and loaded never lies on the device, nor twice in host memory."""

import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import zero_strategy
from tests import lit
from tests.ranks import ranks
from tests.test_offload import Lit, _options, _state
from zero_strategy import OffloadConfig, ZeroStrategy
from zero_strategy.checkpoint import state
from zero_strategy.checkpoint.export import export
from zero_strategy.gradient import local
from zero_strategy.offload.tiers import TieredState

BUFFERED = 2
"""Tensors that are held at a time: the last one that was written, and the one that is made."""


class Counted:
    """Copies whose bytes are counted until their memory is let go."""

    def __init__(self) -> None:
        self.alive = self.peak = 0

    def of(self, read: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def counted(*args: Any) -> Tensor:
            # A tensor keeps the array as long as its memory is in use, by whatever view.
            array = read(*args).numpy().copy()
            self.alive += array.nbytes
            self.peak = max(self.peak, self.alive)
            weakref.finalize(array, self._let_go, array.nbytes)
            return torch.from_numpy(array)

        return counted

    def _let_go(self, num_bytes: int) -> None:
        self.alive -= num_bytes


@contextmanager
def watched(run: Any) -> Generator[Counted, None, None]:
    """Count the copies of state, with a device on which nothing that is sent there can be read."""
    offloading, counted = run.strategy.sharded.offloading, Counted()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offloading, "_device", torch.device("meta"))
        for name in ("master", "moment"):
            patch.setattr(TieredState, name, counted.of(getattr(TieredState, name)))
        patch.setattr(state, "_slot_like", lambda *_: pytest.fail("made beside the parameter"))
        yield counted


def _largest_bytes(module: Any) -> int:
    return max(4 * local(p).numel() for p in module.parameters())


def _trainer(placement: Any, max_steps: int, *callbacks: Any) -> Any:
    strategy = ZeroStrategy(offload=OffloadConfig(placement=placement, threads=1))
    options = _options(3, 1, 0.5) | {"max_steps": max_steps, "callbacks": list(callbacks)}
    return lit.trainer(strategy, **options)


def _save(path: str, placement: Any) -> tuple[float, bool]:
    module, run = Lit(), _trainer(placement, 3)
    run.fit(module, lit.loader())
    kept = _state(run, module)
    with watched(run) as counted:
        run.save_checkpoint(path)
    stored = zero_strategy.load_state_dict(path)
    offloading = run.strategy.sharded.offloading
    same = all(
        torch.equal(stored[name], late.read().full_tensor())
        for name, late in offloading.late_masters().items()
    )
    same = same and all(torch.equal(v, kept[n]) for n, v in _state(run, module).items())
    return counted.peak / _largest_bytes(module), same


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("placement", ["host", 0.5])
def test_a_save_holds_a_copy_of_one_parameter_at_a_time(
    placement: Any, world_size: int, tmp_path: Any
) -> None:
    for peak, same in ranks(world_size).run(_save, str(tmp_path / "a.ckpt"), placement):
        assert 0 < peak <= BUFFERED
        assert same


class WatchedLoad(lit.pl.Callback):
    """From where a checkpoint is restored until training starts."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._watch = watched(trainer)
        self.counted = self._watch.__enter__()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._watch.__exit__(None, None, None)
        self.state = _state(trainer, pl_module)


def _load(path: str, placement: Any) -> tuple[float, bool]:
    saved = Lit()
    run = _trainer(placement, 3)
    run.fit(saved, lit.loader())
    run.save_checkpoint(path)
    kept = _state(run, saved)
    module, watch = Lit(), WatchedLoad()
    _trainer(placement, 4, watch).fit(module, lit.loader(), ckpt_path=path)
    same = watch.state.keys() == kept.keys()
    same = same and all(torch.equal(v, kept[n]) for n, v in watch.state.items())
    return watch.counted.peak / _largest_bytes(module), same


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("placement", ["host", 0.5])
def test_a_load_holds_a_copy_of_one_parameter_at_a_time(
    placement: Any, world_size: int, tmp_path: Any
) -> None:
    for peak, same in ranks(world_size).run(_load, str(tmp_path / "a.ckpt"), placement):
        assert 0 < peak <= BUFFERED
        assert same


def _load_file(path: str, out: str) -> tuple[float, bool]:
    saved, run = Lit(), _trainer("host", 3)
    run.fit(saved, lit.loader())
    run.save_checkpoint(path)
    kept = _state(run, saved)
    if run.is_global_zero:
        export(path, out)
    run.strategy.barrier()
    module, watch = Lit(), WatchedLoad()
    _trainer("host", 4, watch).fit(module, lit.loader(), ckpt_path=out)
    same = all(torch.equal(v, kept[n]) for n, v in watch.state.items())
    return watch.counted.peak / _largest_bytes(module), same


def test_a_plain_file_goes_into_host_memory_one_parameter_at_a_time(tmp_path: Any) -> None:
    arguments = str(tmp_path / "a.ckpt"), str(tmp_path / "b.ckpt")
    for peak, same in ranks(2).run(_load_file, *arguments):
        assert 0 < peak <= BUFFERED
        assert same


def _keep_too_long() -> str:
    kept: list[Any] = []

    class Keep(lit.pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            kept.append(trainer.strategy.lightning_module_state_dict())
            kept[-1]["gpt.head.weight"].sum()

    _trainer("host", 2, Keep()).fit(Lit(), lit.loader())
    try:
        kept[0]["gpt.head.weight"].sum()
    except RuntimeError as error:
        return str(error)
    return "not refused"


def test_state_that_was_stepped_since_is_not_read_by_its_old_name() -> None:
    message = ranks(1).run(_keep_too_long)[0]
    assert "gpt.head.weight: its fp32 state was asked for before a step" in message


class Momentum(lit.Lit):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Adam(lit.Lit):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def _load_foreign(path: str) -> str:
    try:
        _trainer("host", 2).fit(Adam(), lit.loader(), ckpt_path=path)
    except ValueError as error:
        return str(error)
    return "not refused"


def test_moments_of_another_optimizer_are_refused_by_name(tmp_path: Any) -> None:
    # A plain file, which does not say whose they are.
    path = str(tmp_path / "a.ckpt")
    run = lit.trainer("auto", max_steps=1)
    run.fit(Momentum(), lit.loader())
    run.save_checkpoint(path)
    message = ranks(1).run(_load_foreign, path)[0]
    assert "the checkpoint holds momentum_buffer of gpt." in message
