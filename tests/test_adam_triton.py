"""Adam's Triton kernel: compiled for each GPU without spills, and equal to the CPU's passes."""

import math
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.test_adam_backends import inputs
from zero_strategy.kernels.adam import (
    AdamState,
    AdamStep,
    Pending,
    backend,
    commit_and_preview,
    join,
    preview,
    split,
    step,
    sum_of_squares,
)
from zero_strategy.kernels.adam.triton import BLOCK, OPTIONS, _arguments, adam_pass

ROOT = Path(__file__).parent.parent
GPU = torch.cuda.is_available()
FIRST = AdamStep(lr=1e-3, beta1=0.9, beta2=0.95, weight_decay=0.1, step=3)
SECOND = AdamStep(lr=2e-3, beta1=0.4, beta2=0.99, weight_decay=0.2, step=4, decoupled=False)
ELEMENTS_PER_THREAD = BLOCK // (32 * OPTIONS["num_warps"])


def compiled(capability, *, commits, previews, is_l2=False, dtype="*fp32"):
    """Compile for a GPU that need not be there."""
    pointers = {"upper": "*i16", "lower": "*i16", "wire": "*i16", "m": dtype, "v": dtype}
    pointers |= {"commit_grad": dtype, "preview_grad": dtype}
    scalars = ("fp32",) * 9
    types = pointers | {"n": "i32", "commit_k": scalars, "preview_k": scalars}
    flags = {"COMMITS": commits, "PREVIEWS": previews, "BLOCK": BLOCK}
    flags |= {"COMMIT_IS_L2": is_l2, "COMMIT_WEIGHT_IS_SMALL": not is_l2}
    flags |= {"PREVIEW_IS_L2": is_l2, "PREVIEW_WEIGHT_IS_SMALL": not is_l2}
    names = adam_pass.arg_names
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in {*pointers, "n"}
    }
    signature = {name: types.get(name, "constexpr") for name in names}
    source = ASTSource(adam_pass, signature, flags, aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=OPTIONS)


def stack_bytes(kernel, tmp_path):
    """What a thread keeps outside its registers, as the assembler wrote it down."""
    (tmp_path / "kernel.cubin").write_bytes(kernel.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    command = [tool, "--dump-resource-usage", tmp_path / "kernel.cubin"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", said)[1])


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("dtype", ["*fp32", "*i16"])
@pytest.mark.parametrize("is_l2", [False, True])
@pytest.mark.parametrize(
    ("commits", "previews"), [(True, False), (False, True), (True, True)], ids=["c", "p", "cp"]
)
def test_each_pass_compiles_without_spills_and_with_the_written_operations_alone(
    capability, dtype, is_l2, commits, previews, tmp_path
):
    kernel = compiled(capability, commits=commits, previews=previews, is_l2=is_l2, dtype=dtype)
    assert stack_bytes(kernel, tmp_path) == 0
    operations, ptx = Counter(), kernel.asm["ptx"]
    for name, packed in re.findall(r"\t([a-z]+\S*\.f32)(x2)?\s", ptx):
        operations[name] += 2 if packed else 1
    num_steps = ELEMENTS_PER_THREAD * (commits + previews)
    expected = {
        "fma.rn.f32": (3 if is_l2 else 2) * num_steps,
        "div.rn.f32": 2 * num_steps,
        "sqrt.rn.f32": num_steps,
        # AdamW's weight decay is a product, Adam's is part of a fused one.
        "mul.rn.f32": (4 if is_l2 else 5) * num_steps,
    }
    assert {name: operations[name] for name in expected} == expected
    # Clearing the sign bit is seen as abs, which changes no other bit.
    assert set(operations) <= {*expected, "add.rn.f32", "sub.rn.f32", "abs.f32"}
    assert re.search(r"ld\.global\S*\.v4\.b32", ptx), "16 bytes a load"


def test_whole_numbers_become_floats_and_are_not_compiled_in():
    adam = AdamStep(lr=1, beta1=0, beta2=0, eps=1, weight_decay=1, step=1)
    _, scalars, flags = _arguments(Pending(torch.zeros(1), adam, 1), torch.zeros(1))
    assert [type(value) for value in scalars] == [float] * 9
    assert flags == (True, False, False)


def in_interpreter():
    """Compare the interpreted kernel with torch; run in a process where it is interpreted."""
    from zero_strategy.kernels.adam.triton import TritonAdam

    for moments, grads in (("float32", "bfloat16"), ("bfloat16", "float32")):
        left, right = [], []
        for passes, tensors in ((TritonAdam(), left), (backend("reference"), right)):
            kinds = {"moments": getattr(torch, moments), "grads": getattr(torch, grads)}
            state, first, second = inputs(2049, **kinds)
            wire = torch.full_like(state.upper, math.nan)
            last, following = Pending(first, FIRST, 0.7), Pending(second, SECOND, 0.3)
            passes.run(state, commit=None, preview=last, wire=wire, threads=None)
            tensors += [wire.clone()]
            passes.run(state, commit=last, preview=following, wire=wire, threads=None)
            tensors += [wire, join(state.upper, state.lower), state.m, state.v]
            passes.run(state, commit=following, preview=None, wire=None, threads=None)
            tensors += [join(state.upper, state.lower), state.m.clone(), state.v.clone()]
        for one, other in zip(left, right, strict=True):
            # The interpreter rounds products before it adds; a bf16 value may then fall beside.
            rtol = 1e-5 if one.dtype == torch.float32 and moments == "float32" else 2.0**-7
            torch.testing.assert_close(one, other, rtol=rtol, atol=1e-6 * float(other.abs().max()))


def test_interpreted_the_passes_agree_with_torch_to_fp32():
    code = (
        "import sys; sys.path.insert(0, '.')\n"
        "from tests.test_adam_triton import in_interpreter; in_interpreter(); print('done')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout == "done\n", done.stderr


def hostile(num):
    """Weights, moments and gradients at the edges of fp32."""
    small = [0.0, -0.0, 1e-45, -1e-40, 1.17549435e-38, 1e-20]
    large = [1.0, 1.00390625, 65504.0, 3e38, -3e38, math.inf, math.nan]
    values = torch.tensor(small + large, dtype=torch.float32)
    generator = torch.Generator().manual_seed(num)

    def draw():
        return values[torch.randint(len(values), (num,), generator=generator)]

    state = AdamState(
        upper=torch.empty(num, dtype=torch.bfloat16),
        lower=torch.empty(num, dtype=torch.int16),
        m=draw(),
        v=draw().abs(),
    )
    split(draw(), state.upper, state.lower)
    return state, draw().bfloat16(), draw().bfloat16()


def bits(tensor):
    values = tensor.cpu().clone()
    if values.is_floating_point():
        values[values.isnan()] = math.nan
    return values.view(torch.uint8)


def all_passes(state, first, second):
    """Everything the passes leave, commits in every combination of flags."""
    wire, left = torch.empty_like(state.upper), []
    for last, following in ((FIRST, SECOND), (SECOND, FIRST)):
        preview(state, first, last, 1.0, wire)
        left.append(wire.clone())
        preview(state, first, last, 0.37, wire)
        left.append(wire.clone())
        commit_and_preview(state, Pending(first, last, 0.37), second, following, 1.0, wire)
        left.append(wire.clone())
        step(state, second, following, 1 / 3)
        left += [t.clone() for t in (state.upper, state.lower, state.m, state.v)]
    return left


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("make", [inputs, hostile])
@pytest.mark.parametrize("num", [1, 1023, 4096, 1000003])
def test_a_gpu_gives_the_bits_of_the_cpu(make, num):
    on_cpu = make(num)
    state, *grads = make(num)
    moved = {name: getattr(state, name).cuda() for name in ("upper", "lower", "m", "v")}
    on_gpu = (AdamState(**moved), *(grad.cuda() for grad in grads))
    for one, other in zip(all_passes(*on_cpu), all_passes(*on_gpu), strict=True):
        assert torch.equal(bits(one), bits(other))


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grads", [torch.float32, torch.bfloat16])
def test_a_gpu_gives_the_bits_of_the_cpu_for_every_dtype_and_unaligned_views(moments, grads):
    state, first, second = inputs(70001, moments=moments, grads=grads)
    moved = {name: getattr(state, name).cuda() for name in ("upper", "lower", "m", "v")}
    gpu_state, gpu_first, gpu_second = AdamState(**moved), first.cuda(), second.cuda()
    on_cpu = (state.narrow(3, 69000), first.narrow(0, 5, 69000), second.narrow(0, 1, 69000))
    on_gpu = (gpu_state.narrow(3, 69000), gpu_first.narrow(0, 5, 69000), gpu_second[1:69001])
    for one, other in zip(all_passes(*on_cpu), all_passes(*on_gpu), strict=True):
        assert torch.equal(bits(one), bits(other))


@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_a_gpu_splits_joins_and_sums_as_the_cpu_does():
    master = torch.cat([torch.randn(100003), torch.tensor([math.inf, -math.inf, math.nan, 0.0])])
    halves = []
    for weights in (master, master.cuda()):
        upper = torch.empty_like(weights, dtype=torch.bfloat16)
        lower = torch.empty_like(weights, dtype=torch.int16)
        split(weights, upper, lower)
        halves.append((upper, lower, join(upper, lower)))
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(*halves, strict=True))
    grad = torch.randn(100003).bfloat16()
    total = sum_of_squares(grad.cuda())
    assert total.dtype == torch.float64
    # Both sum in fp64, in orders of their own.
    assert total.item() == pytest.approx(sum_of_squares(grad).item(), rel=1e-12)
