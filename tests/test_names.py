"""Strategy names: known without an import, honest about what they cannot do."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from torch import nn

from tests import lit
from tests.ranks import RankError, ranks
from zero_strategy import ZeroStrategy, autoload
from zero_strategy.presets import PRESETS

ROOT = Path(__file__).parents[1]

SCRIPT = """
import os
import lightning as L, torch
from torch.utils.data import DataLoader, TensorDataset

class Net(L.LightningModule):
    def __init__(self, width: int = 7):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Linear(width, 1))
    def training_step(self, batch, index):
        return self.net(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=2)

QUIET = dict(accelerator="cpu", max_steps=2, logger=False, enable_checkpointing=False,
             enable_progress_bar=False, enable_model_summary=False)
"""
TRAIN = """
if __name__ == "__main__":
    trainer = L.Trainer(strategy="zero3", devices=2, **QUIET)
    trainer.fit(Net())
    kind = type(trainer.strategy).__name__
    told = f"rank {trainer.global_rank} of {trainer.world_size} {kind}\\n"
    os.write(1, told.encode())  # one write, which ranks cannot tear apart
"""


def run(
    code: str, tmp_path: Path, *arguments: str, launcher: tuple[str, ...] = (), **environ: str
) -> str:
    """Run a script in a fresh interpreter far from the repository."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(code))
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "PL_"))}
    command = [sys.executable, *launcher, str(script), *arguments]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=clean | {"OMP_NUM_THREADS": "1"} | environ,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    return done.stdout + done.stderr


def test_name_works_bare_when_the_script_relaunches_itself(tmp_path: Path) -> None:
    output = run(SCRIPT + TRAIN, tmp_path)
    assert "rank 0 of 2 ZeroStrategy" in output
    assert "rank 1 of 2 ZeroStrategy" in output


def test_name_works_bare_under_torchrun(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    output = run(SCRIPT + TRAIN, tmp_path, launcher=torchrun)
    assert "rank 0 of 2 ZeroStrategy" in output
    assert "rank 1 of 2 ZeroStrategy" in output


@pytest.mark.parametrize(
    "given",
    [
        ["--trainer.strategy=zero3"],
        ["--trainer.strategy=zero_strategy.ZeroStrategy", "--trainer.strategy.stage=2"],
    ],
    ids=["name", "class path"],
)
def test_lightning_cli_takes_name_and_class_path(given: list[str], tmp_path: Path) -> None:
    code = """
    if __name__ == "__main__":
        from lightning.pytorch.cli import LightningCLI
        cli = LightningCLI(Net, save_config_callback=None, trainer_defaults=QUIET)
        print("ran", type(cli.trainer.strategy).__name__, cli.trainer.global_step)
    """
    arguments = ("fit", *given, "--trainer.devices=1")
    output = run(SCRIPT + textwrap.dedent(code), tmp_path, *arguments)
    assert "ran ZeroStrategy 2" in output


@pytest.mark.parametrize(
    "imports",
    ["import lightning, torch", "import torch, lightning", "import zero_strategy, lightning"],
)
def test_names_are_registered_in_any_import_order(imports: str, tmp_path: Path) -> None:
    code = f"""
    {imports}
    from lightning.pytorch.strategies import StrategyRegistry
    print(sorted(n for n in StrategyRegistry if n.startswith("zero")))
    """
    assert str(sorted(PRESETS)) in run(code, tmp_path)


def test_switched_off_autoload_leaves_the_explicit_import(tmp_path: Path) -> None:
    off = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    check = "from lightning.pytorch.strategies import StrategyRegistry as R; print('zero3' in R)"
    assert "False" in run(f"import torch; {check}", tmp_path, **off)
    assert "True" in run(f"import zero_strategy; {check}", tmp_path, **off)


def test_importing_torch_loads_nothing_heavy_of_ours(tmp_path: Path) -> None:
    code = """
    import sys, torch
    ours = sorted(m for m in sys.modules if m.startswith("zero_strategy"))
    print(ours, "lightning" in sys.modules, "omegaconf" in sys.modules)
    """
    names = "['zero_strategy', 'zero_strategy.autoload', 'zero_strategy.presets'] False False"
    assert names in run(code, tmp_path)


def test_the_other_lightning_package_is_told_which_one_to_use(tmp_path: Path) -> None:
    code = 'import pytorch_lightning as pl; pl.Trainer(strategy="zero3", accelerator="cpu")'
    output = run(code, tmp_path)
    assert "must be lightning.pytorch.Trainer" in output
    assert "import lightning.pytorch as pl" in output


def test_explain_tells_the_state_of_every_name() -> None:
    states = autoload.explain()
    assert states["zero3"] == "registered"
    assert states["zero3_offload"] == "registered"
    assert "not part of this release" in states["zero3_nvme"]


def test_a_name_whose_tier_is_not_there_yet_says_what_to_use() -> None:
    with pytest.raises(ValueError, match="Use strategy='zero3_offload'"):
        lit.trainer("zero3_nvme")


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_launchers_that_pickle_the_result_are_refused(method: str) -> None:
    with pytest.raises(ValueError, match=rf"zero.start_method = '{method}': must be popen"):
        ZeroStrategy(start_method=method)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": 4}, r"zero.stage = 4: must be 1 or 2 or 3"),
        ({"stage": "3"}, r"zero.stage = '3': must be 1 or 2 or 3"),
        ({"stage": True}, r"zero.stage = True"),
        ({"compile": "block"}, r"zero.compile = 'block': must be blocks or None. Use blocks."),
        ({"init": "metal"}, r"zero.init = 'metal': must be cpu or meta. Use meta."),
        ({"blocks": ["Block"]}, r"zero.blocks\[0\] = 'Block': must be a class"),
        ({"blocks": []}, r"zero.blocks = \(\): must be a list of module classes"),
        (
            {"blocks": [nn.ModuleList]},
            r"zero.blocks\[0\] = ModuleList: must be a class with a forw",
        ),
        ({"comple": "blocks"}, r"zero.comple = 'blocks'.*Use 'compile'"),
        ({"reduce_bucket_size": 5}, r"zero.reduce_bucket_size = 5: must be an option.*Known"),
        ({"pipeline": 2}, r"zero.pipeline = 2: must be left out"),
    ],
)
def test_wrong_option_names_path_value_requirement_and_fix(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ZeroStrategy(**options)


def test_every_wrong_option_is_listed_at_once() -> None:
    with pytest.raises(ValueError, match=r"zero\.stage") as caught:
        ZeroStrategy(stage=7, init="gpu", compil="blocks", start_method="fork")
    assert len(str(caught.value).splitlines()) == 4


def _misnamed_block(_: str) -> None:
    lit.trainer(ZeroStrategy(blocks=[nn.Conv2d])).fit(lit.Lit(), lit.loader())


def test_block_class_that_does_not_occur_is_refused_with_those_that_do() -> None:
    with pytest.raises(RankError, match=r"zero.blocks = \['Conv2d'\]: must be classes that occur"):
        ranks(2).run(_misnamed_block, "zero3")


def test_world_size_one_trains(tmp_path: Path) -> None:
    output = run(SCRIPT + TRAIN.replace("devices=2", "devices=1"), tmp_path)
    assert "rank 0 of 1 ZeroStrategy" in output
