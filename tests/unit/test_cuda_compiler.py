"""NVRTC and the store of cubins; every op and a covering set of pointwise kernels compiled for two architectures. No GPU is needed."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import epigemm as eg
from epigemm import errors
from epigemm.engines.base import Call
from epigemm.engines.cuda import codegen, compiler, pointwise
from epigemm.engines.cuda.codegen import Binding
from epigemm.expression.check import check
from epigemm.expression.nodes import Expression, Node, Output, acc, constant
from epigemm.expression.ops import COMPLEX_OPS, OPS
from epigemm.expression.trace import as_epilogue
from epigemm.problem import Operand, Problem

ARCHS = ("sm_80", "sm_90a")

KERNEL = 'extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2.0f; }\n'


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty store, and nothing held in memory."""
    monkeypatch.setenv("EPIGEMM_CACHE_DIR", str(tmp_path / "cache"))
    compiler.forget()
    return tmp_path / "cache" / "kernels"


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what NVRTC compiled."""
    names: list[str] = []
    original = compiler.Nvrtc.compile

    def counted(self: Any, source: str, name: str, options: Any) -> Any:
        names.append(name)
        return original(self, source, name, options)

    monkeypatch.setattr(compiler.Nvrtc, "compile", counted)
    return names


def compiled(source: str = KERNEL, arch: str = "sm_80", **more: Any) -> compiler.Cubin:
    return compiler.compile_source(source, name="twice", arch=arch, **more)


# ---------------------------------------------------------------- the store


def test_a_cubin_its_source_and_its_facts_lie_in_the_store(store: Path) -> None:
    cubin = compiled()
    assert cubin.code[:4] == b"\x7fELF"
    assert [u.entry for u in cubin.usage] == ["twice"]
    assert cubin.usage[0].registers > 0
    assert not cubin.spills
    stems = {path.stem for path in store.iterdir()}
    assert len(stems) == 1
    assert {path.suffix for path in store.iterdir()} == {".cu", ".cubin", ".jsonl"}
    assert cubin.source is not None
    assert cubin.source.read_text().startswith(KERNEL)


def test_the_second_time_nothing_is_compiled(store: Path, compilations: list[str]) -> None:
    first = compiled()
    assert compiled() is first
    compiler.forget()
    again = compiled()
    assert again.code == first.code
    assert again.usage == first.usage
    assert again.source == first.source
    assert compilations == ["twice.cu"]


def test_whatever_decides_the_cubin_is_in_the_key(store: Path, compilations: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    first = compiled()
    assert compiled(KERNEL + " ").code
    assert compiled(arch="sm_90a").code != first.code
    assert compiled(options=("--fmad=false",)).code
    nvrtc = compiler._nvrtc()
    monkeypatch.setattr(nvrtc, "identity", [*nvrtc.identity, 1])
    assert compiled().code
    assert len(compilations) == 5
    assert len(list(store.glob("*.cubin"))) == 5


def test_a_damaged_entry_is_made_anew(store: Path, compilations: list[str]) -> None:
    good = compiled().code
    entry = next(store.glob("*.cubin"))
    entry.write_bytes(entry.read_bytes()[:-40])
    compiler.forget()
    with pytest.warns(errors.EpigemmWarning, match="damaged"):
        assert compiled().code == good
    assert len(compilations) == 2


def test_without_a_folder_it_compiles_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("EPIGEMM_CACHE_DIR", str(blocked / "cache"))
    compiler.forget()
    with pytest.warns(errors.EpigemmWarning, match="cannot store"):
        cubin = compiled()
    assert cubin.code
    assert cubin.source is None


def test_threads_that_want_the_same_kernel_wait_for_one(store: Path, compilations: list[str]) -> None:
    found: list[compiler.Cubin] = []
    threads = [threading.Thread(target=lambda: found.append(compiled())) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    assert len({id(cubin) for cubin in found}) == 1
    assert compilations == ["twice.cu"]


# ---------------------------------------------------------------- errors


def test_an_error_shows_the_line(store: Path) -> None:
    wrong = KERNEL + "\n__device__ float half_of(float x) { return x * missing; }\n__device__ int other = nothing;\n"
    with pytest.raises(compiler.CompilationError) as caught:
        compiled(wrong)
    text = str(caught.value)
    assert re.search(r'twice\.cu\(3\): error: identifier "missing" is undefined', text)
    assert "3: __device__ float half_of(float x) { return x * missing; }" in text
    assert "1 more" in text
    assert "--gpu-architecture=sm_80" in text
    assert not store.exists() or not list(store.iterdir())


def test_an_error_of_the_assembler_is_shown_too(store: Path) -> None:
    with pytest.raises(compiler.CompilationError, match="bogus"):
        compiled('extern "C" __global__ void f() { asm volatile("bogus;"); }')


def test_without_nvrtc_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler._nvrtc.cache_clear()
    monkeypatch.setattr(compiler.libraries, "find", lambda name: None)
    try:
        with pytest.raises(errors.EngineUnavailable, match=r"NVRTC is missing(.|\n)*nvidia-cuda-nvrtc"):
            compiled()
    finally:
        compiler._nvrtc.cache_clear()


def test_what_each_entry_takes_is_read_from_the_log() -> None:
    log = """ptxas info    : Compiling entry function 'first' for 'sm_90a'
ptxas info    : Function properties for first
ptxas         .     256 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers
ptxas info    : Compiling entry function 'second' for 'sm_90a'
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers"""
    assert compiler.usages(log) == (compiler.Usage("first", 168, 256, 28), compiler.Usage("second", 10, 0, 0))


# ---------------------------------------------------------------- every op

X, Y, Z = (Node("input", name=name, extent="matrix", dtype="float32") for name in "xyz")
PARAMS: dict[str, list[dict[str, Any]]] = {
    "gelu": [{"approximate": "none"}, {"approximate": "tanh"}],
    "leaky_relu": [{"slope": 0.05}],
    "power": [{"exponent": 1.5}],
    "cast": [{"dtype": d} for d in ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float32", "float64")],
}
NO_VALUE = {"acc", "input", "constant", "operand_sum", "bitmask", "unbitmask", "sum", "amax", "sum_like", "uniform"}


def values_of_ops() -> list[Node]:
    """Every op that makes a value or a condition, as a value."""
    nodes: list[Node] = []
    for op in OPS.values():
        if op.name in NO_VALUE:
            continue
        conditions = (Node("lt", X, Y), Node("lt", Y, Z))
        arguments = conditions if op.domain == "bool" else (conditions[0], X, Y) if op.domain == "where" else (X, Y, Z)
        for params in PARAMS.get(op.name, [{}]):
            node = Node(op.name, *arguments[: op.arity], **params)
            nodes.append(Node("where", node, X, Y) if op.result == "bool" else node)
    nodes.append(Node("uniform", constant(7)))
    return nodes


def kernel_of(nodes: list[Node], accumulator: str) -> str:
    kind = codegen.VALUE_TYPES[accumulator]
    expression = Expression(tuple(Output(f"o{i}", node) for i, node in enumerate(nodes)))
    at = Binding(
        accumulators=("in[0]",),
        inputs={"x": "in[0]", "y": "in[1]", "z": "in[2]"},
        outputs={f"o{i}": f"out[{i}]" for i in range(len(nodes))},
        row="threadIdx.x",
        column="threadIdx.y",
        batch="0",
    )
    text = [codegen.library_text("prelude.cuh"), codegen.library_text("storage.cuh")]
    text.append(codegen.function(expression, accumulator, at, f'extern "C" __global__ void ops(const {kind}* in, {kind}* out)'))
    return "\n".join(text)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("accumulator", ["float32", "float64"])
def test_every_op_compiles(store: Path, accumulator: str, arch: str) -> None:
    cubin = compiler.compile_source(kernel_of(values_of_ops(), accumulator), name="ops", arch=arch)
    assert [u.spill_bytes for u in cubin.usage] == [0]


@pytest.mark.parametrize("accumulator", ["complex64", "complex128"])
def test_complex_arithmetic_compiles(store: Path, accumulator: str) -> None:
    names = [op for op in OPS if op in COMPLEX_OPS and OPS[op].domain == "any" and op not in (*NO_VALUE, "cast")]
    assert {"add", "sub", "mul", "div", "neg"} <= set(names)
    nodes = [Node(op, *(X, Y)[: OPS[op].arity]) for op in names]
    assert compiler.compile_source(kernel_of(nodes, accumulator), name="ops", arch="sm_90a").code


# ---------------------------------------------------------------- pointwise kernels


def plain(acc: Any) -> Any:
    return acc


def gelu_residual(acc: Any, bias: Any, residual: Any) -> Any:
    return eg.gelu(acc + bias) + residual


def masked(acc: Any, bias: Any) -> Any:
    y = acc + bias
    return eg.outputs(eg.relu(y), mask=eg.bitmask(y >= 0))


def backward(acc: Any, mask: Any) -> Any:
    dx = eg.where(eg.unbitmask(mask), acc, 0.0)
    return eg.outputs(dx, bgrad=eg.cast(eg.sum(dx, axis="n"), "bfloat16"))


def gated(gate: Any, up: Any) -> Any:
    return eg.silu(gate) * up


def statistics(acc: Any, bias: Any, seed: Any) -> Any:
    y = eg.dropout(acc + bias, 0.1, seed)
    return eg.outputs(y, squares=eg.sum(y * y, axis="m"), largest=eg.amax(eg.abs(y)), row=bias * 2.0)


M, N = 96, 200
BIAS = Operand.dense("bf16", (1, N))
# name: epilogue, dtype, order, accumulators, inputs, batch
COVERING: dict[str, tuple[Callable[..., Any], str, str, dict[str, Operand], tuple[int, ...]]] = {
    "plain f32": (plain, "f32", "row", {}, ()),
    "plain c64": (plain, "c64", "row", {}, ()),
    "plain c128": (plain, "c128", "col", {}, ()),
    "gelu residual": (gelu_residual, "bf16", "row", {"bias": BIAS, "residual": Operand.dense("bf16", (M, N))}, ()),
    "gelu residual transposed": (gelu_residual, "f16", "row", {"bias": BIAS, "residual": Operand.dense("f32", (M, N), "col")}, (3, 2)),
    "gelu residual f64": (gelu_residual, "f64", "col", {"bias": BIAS, "residual": Operand.dense("f64", (M, N))}, ()),
    "mask": (masked, "bf16", "col", {"bias": BIAS}, ()),
    "mask f32": (masked, "f32", "row", {"bias": BIAS}, (2,)),
    "backward": (backward, "bf16", "row", {"mask": Operand.dense("u8", (M, 32))}, ()),
    "backward col": (backward, "f16", "col", {"mask": Operand.dense("u8", (16, N), "col")}, ()),
    "gated": (gated, "bf16", "row", {}, ()),
    "gated fp8": (gated, "e4m3", "row", {}, ()),
    "statistics": (statistics, "bf16", "row", {"bias": BIAS, "seed": Operand.dense("i64", (1, 1))}, (2,)),
}


def kernel(name: str) -> pointwise.Pointwise:
    function, dtype, order, inputs, batch = COVERING[name]
    count = 2 if function is gated else 1
    problem = Problem.of(dtype, m=M, n=N, k=8, batch=batch, accumulators=count, inputs=inputs, order=order)
    expression = check(as_epilogue(function).expression(accumulators=count), problem)
    return pointwise.pointwise(problem, expression, (problem.d,) * count)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", COVERING)
def test_pointwise_kernels_compile_without_spills(store: Path, name: str, arch: str) -> None:
    cubin = kernel(name).compile(arch)
    assert [(u.stack_bytes, u.spill_bytes) for u in cubin.usage] == [(0, 0)]


def test_sum_of_an_operand_compiles(store: Path) -> None:
    problem = Problem.of("bf16", m=M, n=N, k=40)
    for operand in ("a", "b"):
        made = pointwise.operand_sum(problem, operand)
        assert [(t.role, t.along) for t in made.tensors] == [("acc", "both"), ("output", "slow" if operand == "a" else "fast")]
        assert made.compile("sm_80").code


def test_lines_one_element_apart_are_not_read_as_vectors() -> None:
    """Strides (1, 1): every line is contiguous, and only one in eight is aligned."""
    problem = Problem.of("bf16", m=64, n=64, k=8, inputs={"bias": BIAS, "residual": Operand(BIAS.dtype, (64, 64), (1, 1))})
    problem = replace(problem, inputs=(("bias", Operand.dense("bf16", (1, 64))), problem.inputs[1]))
    expression = check(as_epilogue(gelu_residual).expression(), problem)
    made = pointwise.pointwise(problem, expression, (problem.d,))
    assert "{EpiType::bf16, Along::both, false},  // input residual" in made.text
    assert "{EpiType::bf16, Along::fast, true},  // input bias" in made.text


def test_equal_kernels_have_equal_texts() -> None:
    """Sizes are arguments: one cubin serves all that only differ in them."""
    small, large = (
        pointwise.pointwise(problem, Expression((Output("d", Node("relu", acc()), "bfloat16", "matrix"),)), (problem.d,))
        for problem in (Problem.of("bf16", m=640, n=512, k=8), Problem.of("bf16", m=8192, n=4096, k=8))
    )
    assert small.text == large.text
    assert small.extents != large.extents
    assert small.workspace_bytes == large.workspace_bytes == 0
    assert large.moved_bytes == 2 * 8192 * 4096 * 2


def test_a_call_gives_the_addresses() -> None:
    made = kernel("backward")
    call = Call(a=0, b=(0,), c=None, d=11, inputs={"mask": 12, "unused": 13}, outputs={"bgrad": 14})
    assert [(t.role, t.name) for t in made.tensors] == [("acc", "0"), ("input", "mask"), ("output", "d"), ("output", "bgrad")]
    assert made.addresses(call, (11,)) == [11, 12, 11, 14]


def test_batches_that_every_tensor_walks_as_one_are_one_axis() -> None:
    dense = Problem.of("bf16", m=8, n=16, k=8, batch=(3, 1, 2))
    expression = Expression((Output("d", acc(), "bfloat16", "matrix"),))
    assert "batch_axes = 1;" in pointwise.pointwise(dense, expression, (dense.d,)).text
    shared = Operand(dense.d.dtype, (3, 1, 2, 8, 16), (128, 0, 0, 16, 1))
    assert "batch_axes = 2;" in pointwise.pointwise(dense, expression, (shared,)).text


def test_what_does_not_fit_31_bits_is_refused() -> None:
    problem = Problem.of("bf16", m=2**31, n=1, k=8)
    with pytest.raises(errors.UnsupportedProblem, match="m=2147483648 n=1"):
        pointwise.pointwise(problem, Expression((Output("d", acc(), "bfloat16", "matrix"),)), (problem.d,))


def test_what_lies_badly_is_read_element_by_element() -> None:
    problem = Problem.of("bf16", m=64, n=63, k=8)
    text = pointwise.pointwise(problem, Expression((Output("d", acc(), "bfloat16", "matrix"),)), (problem.d,)).text
    assert "constexpr int vector = 1;" in text
    wide = Problem.of("bf16", m=64, n=64, k=8)
    text = pointwise.pointwise(wide, Expression((Output("d", acc(), "bfloat16", "matrix"),)), (wide.d,)).text
    assert "constexpr int vector = 8;" in text
    assert "{EpiType::bf16, Along::both, true},  // acc 0" in text
