"""Machines: the one that was measured by us, and this one, measured once and kept."""

import json
import math

import pytest
import torch

from zero_strategy.experiments.cli import main
from zero_strategy.planning import measure
from zero_strategy.planning.machines import H200, MACHINES

TINY = {"num_params": 1 << 12, "copy_bytes": 1 << 16}


def counted(monkeypatch) -> list[float]:
    """Replace the measuring: each call gives another rate, which is noted."""
    given: list[float] = []

    def rates(*_: int) -> dict[str, float]:
        given.append(float(len(given) + 1))
        return dict.fromkeys(measure._RATES, given[-1])

    monkeypatch.setattr(measure, "_rates", rates)
    return given


def test_the_named_machine_says_where_its_figures_come_from():
    assert MACHINES == {"h200": H200}
    assert "measured on one H200" in H200.source


def test_every_machine_can_be_named_on_the_command_line(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "tiny.yaml", "--machine", "abacus"])
    problem = capsys.readouterr().err
    assert all(name in problem for name in (*MACHINES, "this"))


def test_this_machine_has_finite_rates(tmp_path):
    machine = measure.measured(folder=tmp_path, **TINY)
    rates = [getattr(machine, name) for name in measure._RATES]
    assert all(math.isfinite(rate) and rate > 0 for rate in rates)
    assert machine.host_bytes > 0 < machine.cores
    assert (machine.num_gpus > 0) == (machine.gpu_bytes > 0) == torch.cuda.is_available()


def test_a_machine_is_measured_once(tmp_path, monkeypatch):
    given = counted(monkeypatch)
    machines = [measure.measured(folder=tmp_path, **TINY) for _ in range(3)]
    assert given == [1.0]
    assert {m.step_params_per_s for m in machines} == {1.0}


def test_another_version_cpu_or_gpu_is_measured_again(tmp_path, monkeypatch):
    given = counted(monkeypatch)
    measure.measured(folder=tmp_path, **TINY)
    monkeypatch.setattr(measure, "__version__", "9.9")
    measure.measured(folder=tmp_path, **TINY)
    monkeypatch.setattr(measure, "_cpu_model", lambda: "another")
    measure.measured(folder=tmp_path, **TINY)
    monkeypatch.setattr(measure, "_num_cores", lambda: 999)
    measure.measured(folder=tmp_path, **TINY)
    assert given == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize(
    "damage",
    [
        lambda tree: "",
        lambda tree: "{",
        lambda tree: "[1]",
        lambda tree: json.dumps({**tree, "rates": [1.0]}),
        lambda tree: json.dumps({**tree, "key": {**tree["key"], "version": "0.0"}}),
        lambda tree: json.dumps({**tree, "rates": {"step_params_per_s": 1.0}}),
        lambda tree: json.dumps({**tree, "rates": {**tree["rates"], "up_bytes_per_s": -1.0}}),
        lambda tree: json.dumps({**tree, "rates": {**tree["rates"], "up_bytes_per_s": "1"}}),
        lambda tree: json.dumps(tree).replace("1.0", "NaN"),
        lambda tree: json.dumps(tree).replace("1.0", "0.0"),
    ],
)
def test_a_corrupt_or_old_cache_is_measured_again(tmp_path, monkeypatch, damage):
    given = counted(monkeypatch)
    measure.measured(folder=tmp_path, **TINY)
    (file,) = tmp_path.iterdir()
    file.write_text(damage(json.loads(file.read_text())))
    assert measure.measured(folder=tmp_path, **TINY).step_params_per_s == 2.0
    assert measure.measured(folder=tmp_path, **TINY).step_params_per_s == 2.0
    assert given == [1.0, 2.0]


def test_the_measurement_is_kept_beside_the_built_kernels(tmp_path, monkeypatch):
    counted(monkeypatch)
    monkeypatch.setenv("ZERO_STRATEGY_CACHE", str(tmp_path))
    measure.measured(**TINY)
    assert [f.name.startswith("machine-") for f in (tmp_path / "kernels").iterdir()] == [True]


def test_nothing_half_written_is_left_beside_the_measurement(tmp_path, monkeypatch):
    counted(monkeypatch)
    measure.measured(folder=tmp_path, **TINY)
    assert len(list(tmp_path.iterdir())) == 1
