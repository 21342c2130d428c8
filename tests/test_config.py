"""Every wrong configuration is refused before anything starts, with what to do about it."""

import re
import subprocess
import sys

import pytest
import torch

from zero_strategy.experiments.config import PACKAGED, load_config, save_config
from zero_strategy.experiments.models.gpt import GPT
from zero_strategy.experiments.rules import ConfigError

# Override -> the dotted path, the requirement and the fix that its error line must hold.
MUTATIONS = {
    # Misspelt or misplaced keys: the nearest one is named.
    "modle.num_layers=2": ("modle", "a known key", "Use model."),
    "model.num_layer=2": ("model.num_layer", "a known key", "Use model.num_layers."),
    "model.n_heads=2": ("model.n_heads", "a known key", "Use model.num_heads."),
    "model.hiden_size=128": ("model.hiden_size", "a known key", "Use model.hidden_size."),
    "data.corups=builtin": ("data.corups", "a known key", "Use data.corpus."),
    "data.batchsize=8": ("data.batchsize", "a known key", "Use data.batch_size."),
    "lr=1e-3": ("lr", "a known key", "Use optim.lr."),
    "optim.weight_decy=0.1": ("optim.weight_decy", "a known key", "Use optim.weight_decay."),
    "optim.max_steps=10": ("optim.max_steps", "a known key", "Use trainer.max_steps."),
    "trainer.precison=32-true": ("trainer.precison", "a known key", "Use trainer.precision."),
    "sede=3": ("sede", "a known key", "Use seed."),
    "zzzz=3": (
        "zzzz",
        "a known key",
        "Known sections: model, data, optim, trainer, guards, sample.",
    ),
    "model._target_=os.system": ("model._target_", "a known key", "Use model.tied."),
    "defaults=[gpt_1b.yaml]": ("defaults", "a known key", "Use data."),
    # Wrong types.
    "model.num_layers=2.5": ("model.num_layers", "a whole number", "Write it like 8."),
    "model.num_layers=two": ("model.num_layers", "a whole number", "Write it like 8."),
    "model.num_layers='2'": ("model.num_layers", "a whole number", "Write it like 8."),
    "model.num_layers=true": ("model.num_layers", "a whole number", "Write it like 8."),
    "model.num_layers=[2]": ("model.num_layers", "a whole number", "Write it like 8."),
    "model.num_layers=null": ("model.num_layers", "a whole number", "Write it like 8."),
    "model.tied=1": ("model.tied", "true or false", "Write true or false."),
    "model.tied=maybe": ("model.tied", "true or false", "Write true or false."),
    "model=3": ("model", "a section of keys", "Put them under `model:`, one a line."),
    "optim.lr={a: 1}": ("optim.lr", "a finite number", "Write it like 0.1."),
    "optim.lr=fast": ("optim.lr", "a finite number", "Write it like 0.1."),
    "out_dir=3": ("out_dir", "text", "Write it in quotes."),
    "trainer.devices=all": ("trainer.devices", "a whole number, or null", "Write it like 8."),
    "trainer.strategy=zero4": (
        "trainer.strategy",
        "one of auto, ddp, zero1, zero2, zero3",
        'Use "zero',
    ),
    "trainer.strategy=deepspeed": ("trainer.strategy", "one of auto, ddp", 'Use "zero3".'),
    "trainer.strategy=ddp_spawn": ("trainer.strategy", "one of auto, ddp", 'Use "ddp".'),
    "trainer.strategy=zero2_offload": ("trainer.precision", "bf16-mixed", 'Use "bf16-mixed".'),
    "trainer.strategy=zero3_nvme": ("trainer.strategy", "disk tier is not", 'Use "zero3_offload",'),
    "trainer.precision=bf16_mixed": ("trainer.precision", "one of 32-true", 'Use "bf16-mixed".'),
    "trainer.precision=bf16": ("trainer.precision", "one of 32-true", 'Use "bf16-mixed".'),
    "trainer.precision=16": ("trainer.precision", "one of 32-true", 'Use "16-mixed".'),
    "trainer.accelerator=gpu": ("trainer.accelerator", "one of auto, cpu, cuda", 'Use "cuda".'),
    # Numbers that are no use.
    "optim.lr=.nan": ("optim.lr", "a finite number", "Write it like 0.1."),
    "optim.lr=.inf": ("optim.lr", "a finite number", "Write it like 0.1."),
    "optim.lr=0": ("optim.lr", "above 0", "Use a positive number."),
    "optim.beta2=1.0": ("optim.beta2", "in [0, 1)", "Use 0.95."),
    "optim.min_lr_ratio=2": ("optim.min_lr_ratio", "in [0, 1]", "Use 0.1."),
    "optim.clip_norm=0": ("optim.clip_norm", "above 0 or null", "Use 1.0, or null"),
    "model.vocab_size=0": ("model.vocab_size", "at least 2", "Use 2 or more."),
    "data.batch_size=-1": ("data.batch_size", "at least 1", "Use 1 or more."),
    "data.val_fraction=1.0": ("data.val_fraction", "between 0 and 1", "Use 0.1."),
    "data.num_workers=-1": ("data.num_workers", "at least 0", "Use 0 or more."),
    "trainer.max_steps=0": ("trainer.max_steps", "at least 1", "Use 1 or more."),
    "trainer.accumulate=0": ("trainer.accumulate", "at least 1", "Use 1 or more."),
    "guards.non_finite=ignore": ("guards.non_finite", "one of stop, skip", 'Use "stop".'),
    "guards.max_skipped=0": ("guards.max_skipped", "at least 1", "Use 1 or more."),
    "guards.spike_sigmas=0": ("guards.spike_sigmas", "above 0", "Use a positive number."),
    "guards.spike=roll": ("guards.spike", "one of warn, stop, rollback", 'Use "rollback".'),
    "guards.hang_timeout_s=-1": ("guards.hang_timeout_s", "above 0", "Use a positive number."),
    "sample.temperature=0": ("sample.temperature", "above 0", "Use a positive number."),
    "seed=-1": ("seed", "at least 0", "Use 0 or more."),
    "out_dir=''": ("out_dir", "a folder name", 'Use "runs/first".'),
    "sample.prompt=''": ("sample.prompt", "at least one character", 'Use "The ".'),
    # Values that are fine alone and wrong together.
    "model.num_heads=3": ("model.hidden_size", "a multiple of 2 * num_heads = 6", "Use 126."),
    "model.hidden_size=132": ("model.hidden_size", "a multiple of 2 * num_heads = 8", "Use 128."),
    "model.num_kv_heads=3": ("model.num_kv_heads", "a divisor of num_heads = 4", "Use 4."),
    "data.seq_len=129": ("data.seq_len", "at most model.max_seq_len = 128", "Use shorter rows"),
    "model.vocab_size=256": ("model.vocab_size", "at least 257, the ids of", "Use 257."),
    "optim.warmup_steps=400": ("optim.warmup_steps", "below trainer.max_steps = 400", "Use 40"),
    "data.corpus=nowhere.tok": ("data.corpus", "builtin, stdlib or an existing", "Make one with"),
    "guards.non_finite=skip trainer.strategy=ddp": (
        "guards.non_finite",
        'left out with strategy "ddp"',
        'or use strategy "zero3".',
    ),
    "trainer.strategy=ddp trainer.compile=blocks": (
        "trainer.compile",
        '"none" with strategy "ddp"',
        'Use strategy "zero3".',
    ),
    "trainer.strategy=auto trainer.init=meta": (
        "trainer.init",
        '"cpu" with strategy "auto"',
        'Use strategy "zero3".',
    ),
    "trainer.strategy=auto trainer.devices=2": (
        "trainer.devices",
        '1 or null with strategy "auto"',
        'Use strategy "zero3" for several',
    ),
    "trainer.precision=16-mixed trainer.accelerator=cpu": (
        "trainer.precision",
        "32-true, bf16-mixed or bf16-true on the CPU",
        'Use "bf16-mixed".',
    ),
    # Text that is more than a value.
    "out_dir=${oc.env:HOME}": ("out_dir:1", "free of ${...}", "Write the value itself"),
    "seed=!!python/name:os.system x": ("seed:1", "free of YAML tags", "Write a plain value."),
    "seed=&a 3": ("seed:1", "free of anchors and aliases", "Write the value out"),
    "seed=[[[[[[[[[1]]]]]]]]]": ("seed:1", "at most 8 levels deep", "Remove what is not needed."),
    "seed={a: 1, a: 2}": ("seed", "well-formed YAML", "Correct the text there."),
    "seed='": ("seed", "well-formed YAML", "Correct the text there."),
    "seed": ("override", "dotted.key=value", "Write it like optim.lr=3e-4."),
    "a.b.c.d.e=1": ("override", "dotted.key=value", "Write it like optim.lr=3e-4."),
    "seed[0]=1": ("override", "dotted.key=value", "Write it like optim.lr=3e-4."),
}


def words_of(mutation):
    """The words of a case: those after the first start at a key of the trainer section."""
    return re.split(r" (?=trainer\.)", mutation)


def test_there_are_fifty_mutations_and_more():
    assert len(MUTATIONS) >= 50


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_mutated_config_is_refused_with_path_value_requirement_and_fix(mutation):
    path, requirement, fix = MUTATIONS[mutation]
    with pytest.raises(ConfigError) as caught:
        load_config("tiny.yaml", words_of(mutation))
    lines = str(caught.value).splitlines()
    assert all(re.match(r"[\w.:]+ = .+: must be .+\. \w.+\.?$", line) for line in lines), lines
    (line,) = [line for line in lines if line.startswith(f"{path} = ")]
    assert f"must be {requirement}" in line or requirement in line
    assert fix in line


def test_all_problems_are_told_at_once():
    words = ["modle.x=1", "optim.lr=.nan", "data.batch_size=0", "trainer.strategy=zero9"]
    with pytest.raises(ConfigError) as caught:
        load_config("tiny.yaml", words)
    paths = {line.split(" = ")[0] for line in str(caught.value).splitlines()}
    assert paths == {"modle", "optim.lr", "data.batch_size", "trainer.strategy"}


def test_missing_keys_are_listed(tmp_path):
    (tmp_path / "a.yaml").write_text("model: {num_layers: 1}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "a.yaml")
    text = str(caught.value)
    for path in ("out_dir", "model.vocab_size", "data.seq_len", "optim.lr", "trainer.max_steps"):
        assert f"{path} = 'missing': must be set to " in text


NUM_PARAMS = {
    "tiny": 0.00076,
    "gpt_0.13b": 0.134,
    "gpt_1b": 1.04,
    "gpt_3.4b": 3.37,
    "gpt_6.7b": 6.74,
    "gpt_8b": 8.03,
    "gpt_15b": 15.08,
    "gpt_20b": 20.33,
}


@pytest.mark.parametrize("name", NUM_PARAMS)
def test_a_packaged_config_has_the_size_in_its_name(name):
    config = load_config(f"{name}.yaml")
    with torch.device("meta"):
        model = GPT(config.model)
    billions = sum(p.numel() for p in model.parameters()) / 1e9
    assert billions == pytest.approx(NUM_PARAMS[name], rel=0.005)


def test_every_packaged_config_is_counted():
    assert {path.stem for path in PACKAGED.glob("*.yaml")} == {*NUM_PARAMS, "gpt_base"}


def test_later_values_win_over_defaults_and_words_over_files(tmp_path):
    base = (PACKAGED / "tiny.yaml").read_text()
    (tmp_path / "base.yaml").write_text(base)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "optim.yaml").write_text("optim: {lr: 0.5, eps: 1e-6, warmup_steps: 7}")
    (tmp_path / "a.yaml").write_text(
        "defaults: [base.yaml, sub/optim.yaml]\noptim: {lr: 0.25}\ndata: {batch_size: 3}\n"
    )
    config = load_config(tmp_path / "a.yaml", ["optim.eps=1e-7", "seed=9"])
    assert (config.optim.lr, config.optim.eps, config.optim.warmup_steps) == (0.25, 1e-7, 7)
    assert (config.data.batch_size, config.data.seq_len, config.seed) == (3, 128, 9)


def test_a_saved_config_loads_to_an_equal_one(tmp_path):
    config = load_config("tiny.yaml", ["sample.prompt='a: \"b\"'", "optim.clip_norm=null"])
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config


@pytest.mark.parametrize(
    "text",
    [
        "defaults: ../a.yaml",
        "defaults: [../a.yaml]",
        "defaults: [/etc/passwd]",
        "defaults: {a: b}",
        "defaults: [3]",
        "defaults: [a.yaml]",
        "defaults: [missing.yaml]",
        "a: &x 1\nb: *x",
        "a: !!python/object/apply:os.system [x]",
        "a: ${b}",
        "? [a, b]\n: 1",
        "- 1\n- 2",
        "just words",
        "3",
        "a: 1\na: 2",
        "a: [1",
        "a: \t@",
        "[" * 2000,
        "{a: " * 2000,
        "\n".join(f"k{i}: {i}" for i in range(2000)),
        "# " + "x" * 70_000,
        "\x00",
        "<<: {a: 1}\n",
        "",
    ],
)
def test_a_hostile_or_broken_file_is_refused(tmp_path, text):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigError, match="must be"):
        load_config(tmp_path / "a.yaml")


def test_files_are_counted_together_so_that_defaults_cannot_multiply(tmp_path):
    for level in range(7):
        (tmp_path / f"{level}.yaml").write_text(f"defaults: {[f'{level + 1}.yaml'] * 50}")
    (tmp_path / "7.yaml").write_text("seed: 1")
    with pytest.raises(ConfigError, match="must be one of at most 8 files"):
        load_config(tmp_path / "0.yaml")


def test_an_environment_variable_cannot_leak(tmp_path, monkeypatch):
    monkeypatch.setenv("CANARY", "secret-canary")
    (tmp_path / "a.yaml").write_text("out_dir: ${oc.env:CANARY}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "a.yaml")
    assert "secret-canary" not in str(caught.value)


def test_an_unknown_file_is_refused_with_the_packaged_names():
    with pytest.raises(ConfigError, match=r"an existing file\. .*gpt_3\.4b\.yaml.*tiny\.yaml"):
        load_config("tinny.yaml")


def test_a_wrong_config_ends_with_code_2_no_traceback_and_no_lightning():
    code = (
        "import sys; from zero_strategy.experiments.cli import main;"
        "code = main(['train', 'tiny.yaml', 'optim.lr=.nan']);"
        "assert 'lightning' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "optim.lr = nan: must be a finite number. Write it like 0.1.\n"
