"""Checkpoints of other programs become ours: the same bits under canonical names, and resume.

DeepSpeed's files are written by `tests/zero_files.py`, which knows their layout alone.
"""

import os
import re
import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from omegaconf import OmegaConf
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import zero_strategy
from tests import lit
from tests.conversions import (
    assert_equal,
    assert_optimizer,
    expected,
    lightning_file,
    named_optimizer,
    stored,
    trained,
)
from tests.ranks import ranks
from tests.runs import Run, assert_same, fit
from tests.zero_files import Trained, write_zero_files
from zero_strategy.checkpoint import storage
from zero_strategy.checkpoint.convert import convert
from zero_strategy.checkpoint.diff import diff
from zero_strategy.checkpoint.export import export
from zero_strategy.experiments.cli import main

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*assuming the intent is to save in a single process"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]

# torch.distributed.checkpoint.


def counted_optimizer(run: Trained) -> dict[str, Any]:
    order = [n for group in run.groups for n in group["params"]]
    named = named_optimizer(run)
    groups = [{**g, "params": [order.index(n) for n in g["params"]]} for g in run.groups]
    state = {order.index(n): of for n, of in named["state"].items()}
    return {"state": state, "param_groups": groups}


def flat_optimizer(run: Trained) -> dict[str, Any]:
    named = named_optimizer(run)
    flat = {f"state.{n}.{s}": v for n, of in named["state"].items() for s, v in of.items()}
    for group in run.groups:
        for name in group["params"]:
            settings = {k: v for k, v in group.items() if k != "params"}
            flat |= {f"param_groups.{name}.{key}": value for key, value in settings.items()}
    return flat


FORMS: dict[str, Any] = {
    "named": lambda weights, run: {"model": weights, "optimizer": named_optimizer(run)},
    "counted": lambda weights, run: {"model": weights, "optimizer": counted_optimizer(run)},
    "flat": lambda weights, run: {"model": weights, "optim": flat_optimizer(run)},
    "application": lambda weights, run: {
        "app": {"model": weights, "optim": named_optimizer(run)},
    },
    "Lightning": lambda weights, run: {"state_dict": weights, "optimizer_0": named_optimizer(run)},
    "bare": lambda weights, run: weights,
}


def sharded(tree: Any, mesh: Any) -> Any:
    if isinstance(tree, dict):
        return {key: sharded(value, mesh) for key, value in tree.items()}
    if isinstance(tree, Tensor) and tree.ndim and tree.is_floating_point():
        return distribute_tensor(tree, mesh, [Shard(tree.ndim - 1)])
    return tree


def save_dcp(path: str, form: str, options: dict[str, Any]) -> None:
    """Every rank calls it; tensors are cut along their last dim."""
    run = trained()
    weights = {**run.weights, **run.buffers}
    weights |= {name: run.weights[source].clone() for name, source in run.shared.items()}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = sharded(FORMS[form](weights, run), mesh)
    if form == "Lightning":
        rest = {"pytorch-lightning_version": "2.6.0", "epoch": 1, "lr_schedulers": []}
        Path(path).mkdir(exist_ok=True)
        torch.save(rest, Path(path, "meta.pt"))
    dcp.save(state, storage_writer=FileSystemWriter(path, **options))


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("form", FORMS)
def test_a_directory_of_torch_distributed_becomes_the_same_bits(form, num_ranks, tmp_path):
    ranks(num_ranks).run(save_dcp, str(tmp_path / "dcp"), form, {})
    done = convert(tmp_path / "dcp", tmp_path / "out.ckpt")
    assert done.kind == "dcp"
    run = trained()
    wanted = {n: t for n, t in expected(run).items() if form != "bare" or n.startswith("model.")}
    assert_equal(stored(tmp_path / "out.ckpt"), wanted)
    if form != "bare":
        assert_optimizer(tmp_path / "out.ckpt", run)


def test_shards_in_safetensors_files_are_read(tmp_path):
    options = {"serialization_format": SerializationFormat.SAFETENSORS}
    ranks(2).run(save_dcp, str(tmp_path / "dcp"), "bare", options)
    convert(tmp_path / "dcp", tmp_path / "out.ckpt")
    wanted = {n: t for n, t in expected(trained()).items() if n.startswith("model.")}
    assert_equal(stored(tmp_path / "out.ckpt"), wanted)


def test_what_else_was_saved_is_kept_and_said(tmp_path):
    state = {"model": {"w": torch.ones(3)}, "loader": {"at": 5, "rng": torch.arange(4)}, "x": [1]}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    done = convert(tmp_path / "dcp", tmp_path / "out.ckpt")
    assert "kept beside the weights, as 'foreign': loader, x" in done.notes
    assert storage.load_meta(tmp_path / "out.ckpt")["foreign"]["loader"]["at"] == 5
    assert torch.equal(stored(tmp_path / "out.ckpt")["extra.foreign.loader.rng"], torch.arange(4))


# Lightning files.


def test_an_exported_file_comes_back_as_what_was_exported(tmp_path):
    one, file, other = (tmp_path / name for name in ("one.ckpt", "file.ckpt", "other.ckpt"))
    ranks(2).run(fit, "zero3", epochs=1, save=str(one))
    export(one, file)
    done = convert(file, other)
    assert any("counted" in note for note in done.notes)
    assert list(diff(one, other)) == []


def test_names_lose_what_wrappers_put_into_them(tmp_path):
    run = trained()
    weights = {f"_forward_module._orig_mod.{n}": w for n, w in run.weights.items()}
    file = lightning_file(tmp_path / "a.ckpt", weights, named_optimizer(run))
    convert(file, tmp_path / "out.ckpt")
    found = stored(tmp_path / "out.ckpt")
    assert {n for n in found if n.startswith("model.")} == {f"model.{n}" for n in run.weights}
    clash = {"_orig_mod.w": torch.ones(2), "w": torch.zeros(2)}
    with pytest.raises(ValueError, match="names of wrappers alone"):
        convert(lightning_file(tmp_path / "b.ckpt", clash, {}), tmp_path / "b")


def test_counted_parameters_that_may_be_several_are_refused_with_the_way_out(tmp_path, capsys):
    weights = {"a": torch.ones(3, 2), "b": torch.rand(3, 2), "c": torch.rand(4)}
    slots = {0: {"exp_avg": torch.rand(3, 2)}, 1: {"exp_avg": torch.rand(4)}}
    optimizer = {"state": slots, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
    file = lightning_file(tmp_path / "a.ckpt", weights, optimizer)
    words = ["checkpoint", "convert", str(file), str(tmp_path / "out.ckpt")]
    assert main(words) == 2
    assert "may be several of the 3 weights. Use --weights-only" in capsys.readouterr().err
    assert main([*words, "--weights-only"]) == 0
    assert_equal(stored(tmp_path / "out.ckpt"), {f"model.{n}": w for n, w in weights.items()})
    # The names that torch stores where an optimizer was given them leave no choice.
    optimizer["param_groups"][0]["param_names"] = ["b", "c"]
    file = lightning_file(tmp_path / "b.ckpt", weights, optimizer)
    convert(file, tmp_path / "named.ckpt")
    found = stored(tmp_path / "named.ckpt")
    assert torch.equal(found["optim.0.b.exp_avg"], slots[0]["exp_avg"])


def test_hyper_parameters_of_omegaconf_and_what_callbacks_keep_come_along(tmp_path):
    hyper = OmegaConf.create({"lr": 0.1, "layers": [1, {"wide": "${lr}"}], "none": None})
    kept = {"best": torch.tensor(0.5), "paths": {"a": Path("x/y"), "odd": (1, {2, 3})}}
    more = {"hyper_parameters": hyper, "hparams_type": type(hyper), "callbacks": {"C": kept}}
    file = lightning_file(
        tmp_path / "a.ckpt", {"w": torch.ones(3)}, {"state": {}, "param_groups": []}, **more
    )
    convert(file, tmp_path / "out.ckpt")
    meta = storage.load_meta(tmp_path / "out.ckpt")
    assert meta["hyper_parameters"] == OmegaConf.to_container(hyper)
    assert meta["omegaconf_at"] == [["hyper_parameters"]]
    kept["paths"] = {"a": "x/y", "odd": (1, {2, 3})}
    assert meta["callbacks"]["C"] == kept
    export(tmp_path / "out.ckpt", tmp_path / "back.ckpt")
    back = torch.load(tmp_path / "back.ckpt", weights_only=False)
    assert back["hyper_parameters"] == hyper


def test_tensors_of_every_dtype_and_layout_are_read_as_they_were(tmp_path):
    base = torch.randn(6, 8)
    weights = {
        **{str(d).partition(".")[2]: (base * 9).to(d) for d in (torch.float64, torch.float16)},
        **{str(d).partition(".")[2]: (base * 9).to(d) for d in (torch.int8, torch.uint8)},
        **{str(d).partition(".")[2]: (base * 9).to(d) for d in (torch.int16, torch.int32)},
        "float8": base.to(torch.float8_e4m3fn),
        "uint32": torch.arange(5).to(torch.uint32),
        "flag": base > 0,
        "turned": base.T,
        "part": base[1:4, 2:5],
        "row": base[2],
        "tied": base,
        "also": base,
        "empty": base[:0],
        "number": torch.tensor(3.5),
    }
    file = lightning_file(tmp_path / "a.ckpt", weights, {"state": {}, "param_groups": []})
    convert(file, tmp_path / "out.ckpt")
    assert_equal(stored(tmp_path / "out.ckpt"), {f"model.{n}": w for n, w in weights.items()})


# Resuming.


def run_of(checkpoint: Mapping[str, Any], module: lit.Lit) -> Trained:
    """What a Lightning file holds, by names that the module knows."""
    groups = module.configure_optimizers()["optimizer"].param_groups
    names = {id(p): n for n, p in module.named_parameters()}
    (optimizer,) = checkpoint["optimizer_states"]
    order = [names[id(p)] for group in groups for p in group["params"]]
    slots = {
        order[k]: {s: v for s, v in of.items() if v.ndim} for k, of in optimizer["state"].items()
    }
    return Trained(
        weights=checkpoint["state_dict"],
        slots=slots,
        groups=[
            {**g, "params": [order[k] for k in g["params"]]} for g in optimizer["param_groups"]
        ],
        step=int(optimizer["state"][0]["step"]),
    )


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> tuple[Path, Run]:
    """A plain run of two epochs, and the file that it saved after the first."""
    file = tmp_path_factory.mktemp("plain") / "file.ckpt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        return file, fit("auto", epochs=2, save=str(file))


def as_source(kind: str, file: Path, folder: Path) -> Path:
    """The same state as another program would have saved it."""
    if kind == "lightning":
        return file
    checkpoint = torch.load(file, weights_only=False)
    run = run_of(checkpoint, lit.Lit())
    rest = {k: v for k, v in checkpoint.items() if k not in ("state_dict", "optimizer_states")}
    if kind == "dcp":
        state = {"model": dict(run.weights), "optimizer_0": named_optimizer(run)}
        dcp.save(state, checkpoint_id=folder, no_dist=True)
        torch.save(rest, folder / "meta.pt")
        return folder
    options = {"num_ranks": 3, "dtype": torch.float32, "tag": "checkpoint", "client": rest}
    return write_zero_files(folder, run, zero_stage=int(kind[-1]), **options)


@pytest.mark.parametrize(
    ("kind", "strategy", "num_ranks"),
    [
        ("lightning", "zero3", 2),
        ("dcp", "zero2", 2),
        ("zero1", "zero3", 2),
        ("zero2", "zero1", 1),
        ("zero3", "zero3", 2),
    ],
)
def test_a_run_goes_on_from_another_programs_checkpoint_as_if_it_had_been_its_own(
    kind, strategy, num_ranks, uninterrupted, tmp_path
):
    file, whole = uninterrupted
    target = tmp_path / "out.ckpt"
    convert(as_source(kind, file, tmp_path / "source"), target)
    for run in ranks(num_ranks).run(fit, strategy, epochs=2, resume=str(target)):
        assert_same(run, whole, first=3)


def test_a_checkpoint_that_no_trainer_wrote_starts_a_run_with_its_weights_and_moments(tmp_path):
    module = lit.Lit()
    optimizer = module.configure_optimizers()["optimizer"]
    module.loss(lit.Tokens(4).rows).backward()
    optimizer.step()
    state = {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    convert(tmp_path / "dcp", tmp_path / "out.ckpt")
    run = ranks(1).run(fit, "zero3", epochs=1, resume=str(tmp_path / "out.ckpt"))[0]
    assert len(run.losses) == 3
    assert {int(v) for n, v in run.slots.items() if n.endswith("step")} == {4}


# Paths, memory.


def test_the_command_says_what_it_wrote_and_refuses_what_it_must_not_touch(tmp_path, capsys):
    source = write_zero_files(tmp_path / "ds", trained(), zero_stage=2, num_ranks=2)
    target = tmp_path / "new" / "out.ckpt"
    words = ["checkpoint", "convert", str(source)]
    assert main([*words, str(target)]) == 0
    out = capsys.readouterr().out
    assert re.match(rf"{target}: from deepspeed, \d+ tensors, .*iB\n  no Trainer wrote it", out)
    assert main(["checkpoint", "verify", str(target), "--deep"]) == 0
    capsys.readouterr()
    for refused in (target, source, source / "inside", source / "global_step3"):
        assert main([*words, str(refused)]) == 2
        assert "must not exist, nor lie in the source" in capsys.readouterr().err
    other = tmp_path / "other.ckpt"
    (tmp_path / "empty").mkdir()
    for wrong, words in (
        (target, "is a checkpoint directory already"),
        (tmp_path / "empty", "must be a file that a Trainer saved, a directory with .metadata"),
        (tmp_path / "gone", "does not exist"),
    ):
        assert main(["checkpoint", "convert", str(wrong), str(other)]) == 2
        assert words in capsys.readouterr().err
    assert not other.exists()


@pytest.mark.parametrize("kind", ["dcp", "lightning", "deepspeed"])
def test_a_source_of_another_kind_than_it_is_said_to_be_is_refused(kind, tmp_path, capsys):
    folder = write_zero_files(tmp_path / "ds", trained(), zero_stage=2, num_ranks=2)
    file = lightning_file(tmp_path / "a.ckpt", {"w": torch.ones(3)}, {})
    for source in (folder, file):
        fits = (source, kind) in ((folder, "deepspeed"), (file, "lightning"))
        words = ["checkpoint", "convert", str(source), str(tmp_path / "out"), "--from", kind]
        if not fits:
            assert main([*words, "--weights-only"]) == 2
            assert capsys.readouterr().err.startswith(f"{source}: ")


MEMORY = """
import os, resource, sys
import torch
from zero_strategy.checkpoint.convert import convert
torch.set_num_threads(1)
peak = lambda: 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
small, *sources = sys.argv[1:]
convert(small, small + "-out")  # whatever is imported late is there now
for source in sources:
    child = os.fork()
    if child == 0:
        convert(small, source + "-small")  # a fork has no pages of libraries yet
        before = peak()
        convert(source, source + "-out")
        print(peak() - before, flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


def test_a_checkpoint_is_converted_a_tensor_at_a_time(tmp_path):
    each = 8 << 20  # bytes
    weights = {f"w{i}": torch.full((each // 4,), float(i)) for i in range(10)}
    run = Trained(
        weights=weights,
        slots={n: {"exp_avg": w} for n, w in weights.items()},
        groups=[{"lr": 0.1, "params": list(weights)}],
    )
    state = {"model": weights, "optimizer": named_optimizer(run)}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    sources = [
        tmp_path / "dcp",
        lightning_file(tmp_path / "a.ckpt", weights, named_optimizer(run)),
        write_zero_files(tmp_path / "ds", run, zero_stage=2, num_ranks=2, dtype=torch.float32),
    ]
    small = lightning_file(
        tmp_path / "small.ckpt", {"w": torch.ones(3)}, named_optimizer(trained())
    )
    words = [sys.executable, "-W", "ignore", "-c", MEMORY, *map(str, (small, *sources))]
    done = subprocess.run(words, check=True, capture_output=True, text=True, env=os.environ)
    grown = [int(line) for line in done.stdout.split()]
    # A tensor and the file's pages that it is made of, and what the reader loads.
    assert len(grown) == 3
    assert max(grown) <= 8 * each, grown
    for source in sources:
        assert_equal(zero_strategy.load_state_dict(f"{source}-out"), weights)
