"""The Hopper engine without a GPU: tensor maps of each layout, the argument block, refusals, candidates, and what a run asks of CUDA."""

from __future__ import annotations

import ast
import ctypes
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import epigemm as eg
from epigemm import errors
from epigemm.engines.hopper import bindings, configs, launch
from epigemm.engines.hopper import engine as hopper
from epigemm.engines.hopper.configs import Config
from epigemm.engines.hopper.engine import ENGINE, Machine
from epigemm.enums import MatmulEpilog
from epigemm.expression.check import check
from epigemm.expression.named import named
from epigemm.expression.nodes import Expression, Output, acc
from epigemm.expression.trace import as_epilogue
from epigemm.problem import Operand, Problem

ROOT = Path(__file__).parents[2]
TYPES = ROOT / "src/epigemm/engines/hopper/kernels/kernel_types.cuh"
PLAIN = Expression((Output("d", acc()),))


@pytest.fixture(autouse=True)
def h200(monkeypatch):
    monkeypatch.setattr(hopper, "machine", lambda device: Machine((9, 0), 132))
    monkeypatch.setattr(ENGINE, "_asked", type(ENGINE._asked)(8))


def problem(m=264, n=392, k=200, a="row", b="row", order="row", dtype="bf16", **more):
    made = Problem.of(dtype, m=m, n=n, k=k, order=order, device="cuda:0", **more)
    return replace(made, a=Operand.dense(dtype, (m, k), a), b=(Operand.dense(dtype, (k, n), b),) * len(made.b))


def refusal(given, expression=PLAIN):
    found = ENGINE.supports(given, check(expression, given))
    return "" if found is None else str(found)


def fields(given, expression=PLAIN, config=None, scaled=False):
    expression = check(expression, given)
    layout = bindings.layout(given, expression, scaled)
    return launch.fields(given, expression, layout, (config or Config()).fitted(layout.signature), scaled=scaled)


def test_offsets_are_those_of_the_struct():
    """Each field's offset, counted through the device code's own declaration."""
    text = TYPES.read_text()
    body = text[text.index("struct Params {") : text.index("};", text.index("struct Params {"))]
    sizes = {"TensorMap": 128, "const void*": 8, "const u8*": 8, "u8*": 8, "float*": 8, "u64": 8, "float": 4, "int": 4}
    offset, found = 0, {}
    for kind, names in re.findall(r"^ {4}(TensorMap|const void\*|const u8\*|u8\*|float\*|u64|float|int) ([^;]+);", body, re.MULTILINE):
        for name, count in re.findall(r"(\w+)(?:\[(\d+)\])?", names):
            assert offset % min(sizes[kind], 64) == 0
            found[name] = offset
            offset += sizes[kind] * int(count or 1)
    assert found == launch.OFFSETS
    assert -(-offset // 64) * 64 == launch.PARAMS_BYTES


def test_the_probe_has_the_same_block():
    """The ctypes structure of the probe that measured the kernel; its module opens libcuda, so the classes alone are run."""
    tree = ast.parse((ROOT / "tests/device/hopper_kernel/driver.py").read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in ("Map", "Params")]
    found: dict = {"ctypes": ctypes}
    exec(compile(tree, "driver.py", "exec"), found)
    params = found["Params"]
    assert ctypes.sizeof(params) == launch.PARAMS_BYTES
    assert {name: getattr(params, name).offset for name, _ in params._fields_ if name != "padding"} == launch.OFFSETS


# (a, b, D's order) -> A's map and B's map of m=264 n=392 k=200: extents, stride, box; a column-major D exchanges them.
MAPS = {
    ("row", "row", "row"): (("a", (200, 264), 400, (64, 128)), ("b0", (392, 200), 784, (64, 32))),
    ("row", "col", "row"): (("a", (200, 264), 400, (64, 128)), ("b0", (200, 392), 400, (64, 96))),
    ("col", "row", "row"): (("a", (264, 200), 528, (64, 64)), ("b0", (392, 200), 784, (64, 32))),
    ("col", "col", "row"): (("a", (264, 200), 528, (64, 64)), ("b0", (200, 392), 400, (64, 96))),
    ("row", "row", "col"): (("b0", (392, 200), 784, (64, 64)), ("a", (200, 264), 400, (64, 96))),
    ("row", "col", "col"): (("b0", (200, 392), 400, (64, 128)), ("a", (200, 264), 400, (64, 96))),
    ("col", "row", "col"): (("b0", (392, 200), 784, (64, 64)), ("a", (264, 200), 528, (64, 32))),
    ("col", "col", "col"): (("b0", (200, 392), 400, (64, 128)), ("a", (264, 200), 528, (64, 32))),
}


@pytest.mark.parametrize("orders", MAPS, ids="-".join)
def test_tensor_maps(orders):
    a, b, order = orders
    made = fields(problem(a=a, b=b, order=order))
    first, second, d = made.maps
    assert tuple((name, m.extents, m.stride_bytes, m.box) for _, m, name in (first, second)) == MAPS[orders]
    assert [offset for offset, _, _ in made.maps] == [0, 128, 896]
    assert (d[2], d[1].extents, d[1].box) == ("d", (392, 264) if order == "row" else (264, 392), (64, 16))


def test_tails_and_padding_count_in_the_strides_alone():
    given = problem(m=2051, n=1096, k=72)
    padded = Operand(given.d.dtype, (2051, 1096), (1104, 1))
    made = fields(replace(given, d=padded))
    assert made.maps[2][1] == launch.Map("bf16", (1096, 2051), 2208, (64, 16))
    constants = dict(made.constants)
    integers = [int.from_bytes(constants[launch.OFFSETS[n]], "little") for n in ("m", "n", "k", "tiles_m", "tiles_n", "steps", "group")]
    assert integers == [2051, 1096, 72, 9, 6, 2, 8]


def test_two_weights_lie_below_each_other_in_a_stage():
    given = problem(accumulators=2, b="col")
    made = fields(given, as_epilogue(lambda g, u: eg.silu(g) * u).expression(2))
    assert [(name, m.box) for _, m, name in made.maps[:3]] == [("a", (64, 128)), ("b0", (64, 48)), ("b1", (64, 48))]


def test_sums_lie_behind_each_other_in_the_workspace():
    given = problem()
    made = fields(given, as_epilogue(lambda acc: eg.outputs(acc, r=eg.sum(acc, axis="n"), c=eg.sum(acc, axis="m"))).expression(1))
    assert [(s.name, s.offset, s.rows, s.length, s.type) for _, s in made.sums] == [("c", 0, 12, 392, 2), ("r", 18944, 3, 264, 2)]


REFUSED = {
    "float32": lambda: problem(dtype="f32"),
    "a stride that is no multiple of 16 bytes": lambda: problem(k=201),
    "a batch": lambda: problem(batch=(2,)),
    "no k": lambda: problem(k=0),
    "an address that is no multiple of 16": lambda: replace(problem(), a=replace(problem().a, alignment_bytes=8)),
    "a C along n": lambda: replace(problem(c=True), c=Operand.dense("bf16", (1, 392))),
    "the CPU": lambda: replace(problem(), device="cpu"),
}
SENTENCES = ("not float32", "multiple of 16 bytes", "no batch", "no empty product", "aligned to 8 bytes", "C of D's shape", "on cpu")


@pytest.mark.parametrize(("name", "sentence"), list(zip(REFUSED, SENTENCES, strict=True)), ids=REFUSED)
def test_what_is_refused(name, sentence):
    assert sentence in refusal(REFUSED[name]())


def test_another_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(hopper, "machine", lambda device: Machine((8, 0), 108))
    assert "compute capability 9.0" in refusal(problem())


def test_workspace_beyond_the_limit_is_refused():
    given = problem()
    expression = as_epilogue(lambda acc: eg.outputs(acc, c=eg.sum(acc, axis="m"))).expression(1)
    limited = replace(given, compute=replace(given.compute, memory_limit=1000))
    assert "Raise memory_limit" in refusal(limited, expression)
    assert refusal(given, expression) == ""


@pytest.mark.parametrize("order", ["row", "col"])
def test_candidates_are_predicted_and_sorted(order):
    given = problem(4096, 4096, 4096, order=order)
    found = ENGINE.candidates(given, check(PLAIN, given), 8)
    assert len(found) == 7
    predicted = [c.predicted_us for c in found]
    assert predicted == sorted(predicted)
    assert 150 < predicted[0] < 300  # 137 GFLOP
    assert ENGINE.candidates(given, check(PLAIN, given), 2) == found[:2]


def test_settings_that_make_no_kernel_are_refused():
    given = problem()
    candidate = ENGINE.candidates(given, check(PLAIN, given), 1)[0]
    for name, value in (("tile_m", 100), ("store_sets", 0), ("box_n", 48), ("cluster", 4), ("stages", 1)):
        changed = replace(candidate, config=tuple((k, value if k == name else v) for k, v in candidate.config))
        with pytest.raises(errors.AlgorithmError, match="makes no kernel"):
            ENGINE.prepare(given, check(PLAIN, given), changed)


def test_every_configuration_fits_what_it_says():
    for config in configs.TABLE:
        assert configs.misfit(config, configs.Signature()) == ""


def test_padding_is_cleared_where_the_kernel_does_not_write_it():
    for n, names in ((384, []), (392, ["relu_aux"])):
        given = problem(264, n, order="row")
        given = replace(given, inputs=())
        expression = check(named(MatmulEpilog.RELU_AUX), given)
        layout = bindings.layout(given, expression)
        assert [name for name, _ in launch.cleared(given, expression, layout)] == names


# ---------------------------------------------------------------- with libraries that write down what they are asked

PREAMBLE = """
import ctypes, struct, sys
from dataclasses import replace
from epigemm import _native as core
from epigemm.engines.base import Call
from epigemm.engines.cuda import libraries
from epigemm.engines.hopper import launch
from epigemm.engines.hopper.engine import ENGINE
from epigemm.enums import MatmulEpilog
from epigemm.expression.check import check
from epigemm.expression.named import named
from epigemm.expression.nodes import Expression, Output, acc
from epigemm.problem import Operand, Problem
fake = ctypes.CDLL(sys.argv[1])
fake.fake_log.restype = ctypes.c_char_p
fake.fake_keep.restype, fake.fake_keep.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
core.open_driver(sys.argv[1])
libraries._opened["cuda"] = libraries.Library("cuda", sys.argv[1], "in the process")
plain = Expression((Output("d", acc()),))
def prepared(problem, expression):
    expression = check(expression, problem)
    assert ENGINE.supports(problem, expression) is None, ENGINE.supports(problem, expression)
    made = ENGINE.prepare(problem, expression, ENGINE.candidates(problem, expression, 1)[0])
    fake.fake_clear()
    return made
def show(*kinds):
    for line in fake.fake_log().decode().splitlines():
        if line.split()[0] in kinds: print(line)
    fake.fake_clear()
def kept(run):
    address = fake.fake_keep(launch.PARAMS_BYTES); run()
    return ctypes.string_at(address, launch.PARAMS_BYTES)
def words(block, name, count=1, kind="Q"):
    return struct.unpack_from(f"<{count}{kind}", block, launch.OFFSETS[name])
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    pytest.importorskip("epigemm._native", reason="the compiled core is not built")
    folder = tmp_path_factory.mktemp("fake")
    source = ROOT / "tests/unit/fake_cuda.cpp"
    subprocess.run([compiler, "-std=c++17", "-O1", "-shared", "-fPIC", "-o", str(folder / "libfake.so"), str(source)], check=True)

    def go(script: str) -> list[str]:
        command = [sys.executable, "-c", PREAMBLE + script, str(folder / "libfake.so")]
        environment = {"PYTHONPATH": str(ROOT / "src"), "EPIGEMM_CACHE_DIR": str(folder / "cache"), "HOME": str(folder)}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return go


def test_one_launch_with_its_argument_block(run):
    lines = run("""
problem = Problem.of("bf16", m=264, n=392, k=200, device="cuda:0")
problem = replace(problem, inputs=(("bias", Operand.dense("f32", (264, 1))),))
made = prepared(problem, check(named(MatmulEpilog.RELU_BIAS), problem))
block = kept(lambda: made.run(Call(0xa0, (0xb0,), None, 0xd0, {"bias": 0xb1}, stream=0x30)))
show("launch", "alloc", "with")
print(*map(hex, words(block, "a", 9)[:1]), words(block, "a", 9)[1:])
print(hex(words(block, "b")[0]), hex(words(block, "tiles_out")[0]), hex(words(block, "along_m")[0]))
print(words(block, "m", 7, "i"), [hex(w) for w in words(block, "policy_a", 4)])
direct = made.direct()
print(direct.names)
again = kept(lambda: direct.run(*[{"a": 0xa0, "b": 0xb0, "d": 0xd0, "bias": 0xb1}[n] for n in direct.names], 0x40))
print(again == block)
""")
    assert lines[0].startswith("launch grid ")
    assert lines[0].endswith(" on 30")
    assert lines[1] == "  with 6: 1 0 0"
    assert lines[2:4] == ["0xa0 (9, 3, 3, 200, 264, 400, 64, 128)", "0xb0 0xd0 0xb1"]
    assert lines[4].endswith("['0x1000000000000000', '0x1000000000000000', '0x12f0000000000000', '0x12f0000000000000']")
    assert lines[4].startswith("(264, 392, 200, ")
    assert lines[5:] == ["('a', 'b0', 'd', 'bias')".replace("b0", "b"), "True"]


def test_alpha_beta_and_c(run):
    lines = run("""
problem = Problem.of("f16", m=264, n=392, k=200, device="cuda:0", c=True)
made = prepared(problem, plain)
for alpha, beta in ((1.0, 0.5), (2.0, 0.0), (1.0, 0.0), (0.0, 3.0)):
    block = kept(lambda: made.run(Call(0xa0, (0xb0,), 0xc0, 0xd0, alpha=alpha, beta=beta, stream=0x30)))
    print(hex(words(block, "a")[0]), hex(words(block, "tiles_in")[0]), words(block, "scalars", 2, "f"))
    show("alloc", "fill", "free")
print(made.direct())
""")
    assert lines[0] == "0xa0 0xc0 (1.0, 0.5)"
    assert lines[1] == "0xa0 0x0 (2.0, 0.0)"
    assert lines[2] == "0xa0 0x0 (0.0, 0.0)"
    assert re.fullmatch(r"0x[0-9a-f]+0000 0xc0 \(0.0, 3.0\)", lines[3])
    assert [line.split()[0] for line in lines[4:7]] == ["alloc", "fill", "free"]
    assert lines[7] == "None"


def test_sums_share_an_allocation_and_are_finished(run):
    lines = run("""
problem = Problem.of("bf16", m=264, n=392, k=200, device="cuda:0", order="col")
problem = replace(problem, inputs=(("relu_aux", Operand.dense("uint8", (48, 392), "col")),))
made = prepared(problem, named(MatmulEpilog.DRELU_BGRAD))
block = kept(lambda: made.run(Call(0xa0, (0xb0,), None, 0xd0, {"relu_aux": 0xe0}, {"drelu_bgrad": 0xf0}, stream=0x30)))
show("alloc", "launch", "free", "first")
print(hex(words(block, "bits_in")[0]), words(block, "bits_in_stride")[0], hex(words(block, "sums_m")[0]), made.direct())
""")
    kinds = [line.split()[0] for line in lines[:-1]]
    assert kinds == ["alloc", "launch", "first", "launch", "first", "free"]
    partial = lines[4].split()[-1]
    assert lines[3].startswith("launch grid 9 block 32")
    assert lines[-1] == f"0xe0 48 0x{partial} None"
