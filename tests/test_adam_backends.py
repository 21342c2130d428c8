"""Implementations, threads, chunks and processes never change a bit of Adam's passes."""

import itertools
import math
import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from zero_strategy.kernels import build
from zero_strategy.kernels.adam import AdamState, AdamStep, Pending, backend, cpu, describe
from zero_strategy.kernels.adam.cpu import CpuAdam
from zero_strategy.kernels.adam.reference import ReferenceAdam

ISAS = ["avx512", "avx2", "baseline"]
ISAS = ISAS[ISAS.index(cpu.isa()) :]
VECTORS = cpu.isa() != "baseline"
FIRST = AdamStep(lr=1e-3, beta1=0.6, beta2=0.95, weight_decay=0.1, step=3)
SECOND = AdamStep(lr=2e-3, beta1=0.4, beta2=0.99, weight_decay=0.2, step=4, decoupled=False)


def inputs(num, *, moments=torch.float32, grads=torch.bfloat16, seed=0):
    """A state with weights and moments of many magnitudes, and two gradients."""
    generator = torch.Generator().manual_seed(seed)

    def values():
        magnitude = torch.randint(-30, 15, (num,), generator=generator).float()
        return torch.randn(num, generator=generator) * 2.0**magnitude

    master = values()
    state = AdamState(
        upper=torch.empty(num, dtype=torch.bfloat16),
        lower=torch.empty(num, dtype=torch.int16),
        m=values().to(moments),
        v=values().abs().to(moments),
    )
    ReferenceAdam().split(master, state.upper, state.lower)
    return state, values().to(grads), values().to(grads)


def outcome(passes, num, *, threads=None, cuts=(), **kinds):
    """Every byte that a commit with preview and a re-preview leave."""
    state, first, second = inputs(num, **kinds)
    wire, again = torch.empty_like(state.upper), torch.empty_like(state.upper)
    for start, end in itertools.pairwise((0, *cuts, num)):
        part, size = state.narrow(start, end - start), end - start
        next_step = Pending(second.narrow(0, start, size), SECOND, 0.3)
        last_step = Pending(first.narrow(0, start, size), FIRST, 0.7)
        views = (wire.narrow(0, start, size), again.narrow(0, start, size))
        passes.run(part, commit=last_step, preview=next_step, wire=views[0], threads=threads)
        passes.run(part, commit=None, preview=next_step, wire=views[1], threads=threads)
    assert same(wire, again)
    return [state.upper, state.lower, state.m, state.v, wire]


def same(a, b):
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def all_same(one, other):
    return all(same(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.skipif(not VECTORS, reason="torch fuses products with AVX2 and AVX-512 only")
@pytest.mark.parametrize("grads", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num", [1, 7, 8191, 70001])
@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set_equals_the_reference(isa, num, moments, grads):
    kinds = {"moments": moments, "grads": grads}
    assert all_same(outcome(CpuAdam(isa), num, **kinds), outcome(ReferenceAdam(), num, **kinds))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("grads", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num", [0, 1, 65537, (1 << 20) + 70001])
def test_the_sum_of_squares_has_the_same_bits_everywhere(isa, grads, num):
    _, grad, _ = inputs(num, grads=grads)
    expected = ReferenceAdam().sum_of_squares(grad, threads=None)
    for threads in (1, 2, 5):
        assert torch.equal(CpuAdam(isa).sum_of_squares(grad, threads=threads), expected)


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_threads_change_no_bit(threads):
    num = 300007
    expected = outcome(cpu.best(), num, threads=1)
    assert all_same(outcome(cpu.best(), num, threads=threads), expected)


@pytest.mark.parametrize("passes", [cpu.best, ReferenceAdam])
def test_cuts_at_odd_places_change_no_bit(passes):
    num = 140001
    expected = outcome(passes(), num)
    assert all_same(outcome(passes(), num, cuts=(1, 4, 4, 1001, 65537, 131999)), expected)


def test_flushing_denormals_in_the_calling_thread_changes_no_bit():
    expected = outcome(cpu.best(), 70001)
    torch.set_flush_denormal(True)
    try:
        for threads in (1, 3):
            # The inputs were made before, so flushing meets only the pass.
            assert all_same(outcome(cpu.best(), 70001, threads=threads), expected)
        assert torch.tensor(1e-40) * 0.5 == 0, "the caller's mode is given back"
    finally:
        torch.set_flush_denormal(False)


def test_four_python_threads_at_once_get_what_each_alone_gets():
    nums = [200003, 65536, 130001, 999]
    expected = [outcome(cpu.best(), num, seed=num) for num in nums]

    def work(index):
        num = nums[index]
        results = (outcome(cpu.best(), num, seed=num, threads=index + 1) for _ in range(10))
        return all(all_same(result, expected[index]) for result in results)

    with ThreadPoolExecutor(4) as executor:
        assert list(executor.map(work, range(4))) == [True] * 4


def run_python(code, **env):
    """Run code in a process of its own; what it printed."""
    code = "import sys; sys.path.insert(0, '.')\n" + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent.parent,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_a_forked_child_gets_a_pool_of_its_own_even_while_a_pass_runs():
    # In a process of its own, since forking beside threads is not for the test runner.
    cpu.best()
    out, _ = run_python("""
        import os, threading, warnings
        from tests.test_adam_backends import all_same, cpu, outcome
        warnings.simplefilter("ignore")
        expected, stop = outcome(cpu.best(), 200003, threads=3), threading.Event()

        def busy():
            while not stop.is_set():
                outcome(cpu.best(), 200003, threads=3)

        thread = threading.Thread(target=busy)
        thread.start()
        codes = []
        for _ in range(4):
            child = os.fork()
            if child == 0:
                same = all_same(outcome(cpu.best(), 200003, threads=3), expected)
                os._exit(0 if same else 3)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        stop.set()
        thread.join()
        print(codes, all_same(outcome(cpu.best(), 200003, threads=3), expected))
    """)
    assert out == "[0, 0, 0, 0] True\n"


@pytest.mark.skipif(not VECTORS, reason="torch fuses products with AVX2 and AVX-512 only")
def test_without_a_compiler_the_reference_gives_equal_results_and_warns_once(tmp_path):
    code = """
        import hashlib
        from tests.test_adam_backends import backend, describe, outcome
        for _ in range(3):
            tensors = outcome(backend(), 70001)
        data = b"".join(t.view(torch.uint8).numpy().tobytes() for t in tensors)
        print(backend().name, hashlib.sha256(data).hexdigest())
        print(describe())
    """
    code = "import torch\n" + textwrap.dedent(code)
    with_c, _ = run_python(code)
    without, said = run_python(code, PATH="", CC="", ZERO_STRATEGY_CACHE=str(tmp_path))
    (name, digest), (other_name, other_digest) = with_c.split()[:2], without.split()[:2]
    assert (name, other_name) == ("c", "reference")
    assert digest == other_digest
    assert said.count("UserWarning") == 1
    assert "about ten times the time" in said
    assert "Install gcc" in said
    assert "reference (no C kernel: PATH: must hold a C compiler" in without


def test_an_implementation_can_be_asked_for(monkeypatch):
    assert backend("reference").name == "reference"
    assert backend("c").name == "c"
    assert describe() == f"C for {cpu.isa()}"
    monkeypatch.setenv("ZERO_STRATEGY_ADAM", "reference")
    assert backend().name == "reference"
    assert describe() == "reference (asked for by ZERO_STRATEGY_ADAM)"
    monkeypatch.setenv("ZERO_STRATEGY_ADAM", "cuda")
    with pytest.raises(ValueError, match=r"ZERO_STRATEGY_ADAM = 'cuda': must be one of auto, c"):
        backend()


def test_c_that_was_asked_for_and_cannot_be_had_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "_outcomes", {})
    monkeypatch.setenv("ZERO_STRATEGY_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    cpu.best.cache_clear()
    with pytest.raises(build.BuildError, match="must hold a C compiler"):
        backend("c")
    cpu.best.cache_clear()


@pytest.mark.parametrize("threads", [0, -1, 1025])
def test_a_number_of_threads_that_cannot_be_is_refused(threads):
    with pytest.raises(ValueError, match=rf"threads = {threads}: must lie in \[1, 1024\]"):
        cpu.best().sum_of_squares(torch.ones(3), threads=threads)


def test_a_pass_that_overflows_shows_it_in_every_copy_of_the_weight():
    for passes in (cpu.best(), ReferenceAdam()):
        state, grad, _ = inputs(40)
        grad[3], grad[5] = math.nan, math.inf
        wire = torch.empty_like(state.upper)
        pending = Pending(grad, FIRST, 1.0)
        passes.run(state, commit=pending, preview=pending, wire=wire, threads=1)
        master = passes.join(state.upper, state.lower)
        assert master.isnan().nonzero().flatten().tolist() == [3, 5]
        assert torch.equal(master.isnan(), state.upper.isnan())
        assert torch.equal(master.isnan(), wire.isnan())


@pytest.mark.skipif(not VECTORS, reason="torch fuses products with AVX2 and AVX-512 only")
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_the_bias_correction_is_a_true_division_for_every_magnitude_and_step(isa, beta2):
    # The last three are 1 less a few units of the last place, and 1.
    lates = [round(math.log(x) / math.log(beta2)) for x in (1.2e-7, 2e-7, 1e-30)]
    num = 1 << 16
    bits = torch.randint(0, 0x7F800001, (num,), generator=torch.Generator().manual_seed(1))
    bits[:4] = torch.tensor([0, 1, 0x7F7FFFFF, 0x7F800000])
    for step in (1, 2, 3, 10, 77, 1000, *lates):
        # beta1 just below 1 keeps m, so that the weight shows the denominator.
        adam = AdamStep(lr=1.0, beta1=1 - 2**-20, beta2=beta2, eps=0.0, step=step)
        pending = Pending(torch.zeros(num), adam, 1.0)
        results = []
        for passes in (CpuAdam(isa), ReferenceAdam()):
            state = AdamState(
                upper=torch.zeros(num, dtype=torch.bfloat16),
                lower=torch.zeros(num, dtype=torch.int16),
                m=torch.ones(num),
                v=bits.int().view(torch.float32).clone(),
            )
            passes.run(state, commit=pending, preview=None, wire=None, threads=None)
            results.append([passes.join(state.upper, state.lower), state.v])
        assert all_same(*results), step
