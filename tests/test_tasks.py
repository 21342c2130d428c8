"""The training task: schedule, parameter groups, measures and sampling."""

import math
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

from tests.lit import trainer
from zero_strategy.experiments.config import load_config
from zero_strategy.experiments.tasks import TokenTask, generate, lr_factor
from zero_strategy.protocols import CountsTokens

SMALL = [
    *("model.num_layers=2", "model.hidden_size=16", "model.num_heads=2", "model.num_kv_heads=1"),
    *("model.intermediate_size=24", "optim.warmup_steps=2", "trainer.max_steps=10"),
]


def task(*words, **options):
    module = TokenTask(load_config("tiny.yaml", [*SMALL, *words]), **options)
    module.configure_model()
    return module


def test_learning_rate_rises_then_falls_to_its_last_ratio():
    factor = lr_factor(4, 20, 0.1)
    values = [factor(step) for step in range(20)]
    assert values[:4] == [0.25, 0.5, 0.75, 1.0]
    assert all(a >= b for a, b in pairwise(values[4:]))
    assert values[-1] == pytest.approx(0.1)
    assert factor(30) == pytest.approx(0.1)


@pytest.mark.parametrize(("warmup", "steps"), [(0, 1), (0, 5), (1, 2), (4, 5)])
def test_learning_rate_is_defined_for_the_shortest_runs(warmup, steps):
    values = [lr_factor(warmup, steps, 0.0)(step) for step in range(steps)]
    assert all(0 <= value <= 1 for value in values)
    assert max(values) == 1.0


def test_only_matrices_decay_and_every_parameter_is_in_one_group():
    module = task()
    optimizer = module.configure_optimizers()["optimizer"]
    groups = {group["weight_decay"]: group["params"] for group in optimizer.param_groups}
    assert {p.ndim for p in groups[0.1]} == {2}
    assert {p.ndim for p in groups[0.0]} == {1}
    grouped = [id(p) for params in groups.values() for p in params]
    assert sorted(grouped) == sorted(id(p) for p in module.parameters())


def test_a_task_counts_tokens_and_work():
    module = task()
    assert isinstance(module, CountsTokens)
    assert module.num_tokens(torch.zeros(3, 129)) == 384
    assert module.flops_per_token() == module.gpt.flops_per_token(128)


def test_model_is_built_once_however_often_it_is_configured():
    module = task()
    first = module.gpt
    module.configure_model()
    assert module.gpt is first


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_validation_logs_nats_and_bits_per_byte_over_uneven_batches():
    module = task("model.vocab_size=300", tokens_per_byte=0.5)
    rows = torch.randint(300, (5, 20))
    run = trainer()
    (figures,) = run.validate(module, DataLoader(rows, batch_size=2), verbose=False)
    with torch.no_grad():
        logits = module(rows[:, :-1]).flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, rows[:, 1:].flatten()).item()
    assert figures["val_loss"] == pytest.approx(expected, rel=1e-5)
    assert figures["val_bits_per_byte"] == pytest.approx(expected / math.log(2) / 2, rel=1e-5)


def counting_up(token_BT):
    """A model that is sure of the next number, and remembers the context it got."""
    counting_up.seen.append(token_BT.shape[1])
    return 50.0 * torch.nn.functional.one_hot((token_BT + 1) % 10, 10)


def test_generation_follows_the_model_within_its_longest_context():
    counting_up.seen = []
    options = SimpleNamespace(num_tokens=5, max_seq_len=4, temperature=1.0, seed=0)
    added = generate(counting_up, torch.tensor([7, 8]), **vars(options))
    assert added.tolist() == [9, 0, 1, 2, 3]
    assert counting_up.seen == [2, 3, 4, 4, 4]


def test_generation_repeats_at_the_same_seed_only():
    module = task()

    def text(seed):
        with torch.no_grad():
            prompt = torch.tensor([1, 2, 3])
            options = {"num_tokens": 12, "max_seq_len": 128, "temperature": 1.0}
            return generate(module, prompt, seed=seed, **options).tolist()

    assert text(1) == text(1)
    assert text(1) != text(2)
