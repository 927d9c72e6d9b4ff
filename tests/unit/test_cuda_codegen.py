"""Generated C++, compiled as host code: every op of the vocabulary, in float and double, against float64; and how values are stored."""

from __future__ import annotations

import ctypes
import math
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from epigemm import errors
from epigemm.engines.cuda import codegen
from epigemm.engines.cuda.codegen import Binding
from epigemm.expression.nodes import Expression, Node, Output, acc, constant
from epigemm.expression.ops import OPS

# What a device compiler knows by itself, for a host compiler. The one instruction that the prelude spells in PTX without an
# alternative, 2**x, becomes the library's.
SHIM = """
#include <math.h>
#define __device__
#define __forceinline__ inline
#define EPI_DEVICE static inline
struct float2 { float x, y; };
struct double2 { double x, y; };
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline double rsqrt(double x) { return 1.0 / sqrt(x); }
static inline float __fdividef(float x, float y) { return x / y; }
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)(((unsigned long long)a * b) >> 32); }
"""
_EXP2 = re.compile(r'asm\("ex2\.approx\.ftz\.f32[^;]*;"[^;]*;')

TYPES = {"float32": ("float", np.float32), "float64": ("double", np.float64)}
COMPLEX = {"complex64": ("float2", np.complex64), "complex128": ("double2", np.complex128)}

X, Y, Z = (Node("input", name=name, extent="matrix", dtype="float32") for name in "xyz")


def host_text(*, definitions: str) -> str:
    prelude, replaced = _EXP2.subn("y = exp2f(x);", codegen.library_text("prelude.cuh").replace("#pragma once", ""))
    assert replaced == 1
    return "\n".join([SHIM, prelude, codegen.library_text("storage.cuh"), definitions])


def build(folder: Path, text: str) -> ctypes.CDLL:
    compiler = next((c for c in ("c++", "g++", "clang++") if shutil.which(c)), None)
    assert compiler is not None, "a C++ compiler is needed"
    source, library = folder / "host.cpp", folder / "host.so"
    source.write_text(text)
    done = subprocess.run(
        [compiler, "-std=c++17", "-O1", "-ffp-contract=off", "-fno-fast-math", "-w", "-shared", "-fPIC", "-o", library, source],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[:4000]
    return ctypes.CDLL(str(library))


# ---------------------------------------------------------------- every op


@dataclass(frozen=True)
class Case:
    """One op, its independent meaning in float64, and what its rounding error is proportional to.

    Args:
        node: over inputs x, y, z.
        reference: the meaning.
        scale: a size besides the result's own that the error may be a few units of: of terms that cancel, of exponents.
        low, high: where random arguments lie.
    """

    node: Node
    reference: Callable[..., Any]
    scale: Callable[..., Any] = lambda x, y, z: 0.0
    low: float = -8.0
    high: float = 8.0


def _vector(f: Callable[[float], float]) -> Callable[[Any], Any]:
    return np.vectorize(f, otypes=[np.float64])


erf = _vector(math.erf)
phi = _vector(lambda x: 0.5 * math.erfc(-x / math.sqrt(2)))


def sigmoid(x: Any) -> Any:
    return np.where(x >= 0, 1 / (1 + np.exp(-np.abs(x))), np.exp(-np.abs(x)) / (1 + np.exp(-np.abs(x))))


def gelu_tanh(x: Any) -> Any:
    return x * sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


def softplus(x: Any) -> Any:
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def size(x: Any, y: Any, z: Any) -> Any:
    return np.abs(x)


def op(name: str, /, *args: Node, **params: Any) -> Node:
    return Node(name, *args, **params)


def test_of(comparison: str) -> Node:
    """A comparison as a number."""
    return op("where", op(comparison, X, Y), Z, op("neg", Z))


test_of.__test__ = False  # type: ignore[attr-defined]

BOTH = op("logical_and", op("lt", X, Y), op("lt", Y, Z))
EITHER = op("logical_or", op("lt", X, Y), op("lt", Y, Z))
NOT = op("logical_not", op("lt", X, Y))

CASES: dict[str, Case] = {
    "add": Case(op("add", X, Y), lambda x, y, z: x + y),
    "sub": Case(op("sub", X, Y), lambda x, y, z: x - y),
    "mul": Case(op("mul", X, Y), lambda x, y, z: x * y),
    "div": Case(op("div", X, Y), lambda x, y, z: x / y),
    "neg": Case(op("neg", X), lambda x, y, z: -x),
    "square": Case(op("square", X), lambda x, y, z: x * x),
    "power": Case(op("power", X, exponent=1.7), lambda x, y, z: x**1.7, lambda x, y, z: 4 * x**1.7 * np.abs(np.log(x)), 0.01, 9.0),
    "power_2": Case(op("power", X, exponent=2), lambda x, y, z: x**2),
    "abs": Case(op("abs", X), lambda x, y, z: np.abs(x)),
    "exp": Case(op("exp", X), lambda x, y, z: np.exp(x)),
    "log": Case(op("log", X), lambda x, y, z: np.log(x), lambda x, y, z: 0.25, 0.01, 9.0),
    "sqrt": Case(op("sqrt", X), lambda x, y, z: np.sqrt(x), low=0.0),
    "rsqrt": Case(op("rsqrt", X), lambda x, y, z: x**-0.5, low=0.01),
    "tanh": Case(op("tanh", X), lambda x, y, z: np.tanh(x)),
    "erf": Case(op("erf", X), lambda x, y, z: erf(x)),
    "sigmoid": Case(op("sigmoid", X), lambda x, y, z: sigmoid(x), lambda x, y, z: np.abs(x) * sigmoid(x)),
    **{
        name: Case(test_of(name), lambda x, y, z, f=f: np.where(f(x, y), z, -z))
        for name, f in {
            "eq": np.equal,
            "ne": np.not_equal,
            "lt": np.less,
            "le": np.less_equal,
            "gt": np.greater,
            "ge": np.greater_equal,
        }.items()
    },
    "logical_and": Case(op("where", BOTH, X, Z), lambda x, y, z: np.where((x < y) & (y < z), x, z)),
    "logical_or": Case(op("where", EITHER, X, Z), lambda x, y, z: np.where((x < y) | (y < z), x, z)),
    "logical_not": Case(op("where", NOT, X, Z), lambda x, y, z: np.where(~(x < y), x, z)),
    "where": Case(op("where", op("ge", X, constant(0.25)), Y, constant(0.0)), lambda x, y, z: np.where(x >= 0.25, y, 0.0)),
    "minimum": Case(op("minimum", X, Y), lambda x, y, z: np.minimum(x, y)),
    "maximum": Case(op("maximum", X, Y), lambda x, y, z: np.maximum(x, y)),
    "relu": Case(op("relu", X), lambda x, y, z: np.maximum(x, 0)),
    "leaky_relu": Case(op("leaky_relu", X, slope=0.05), lambda x, y, z: np.where(x > 0, x, 0.05 * x)),
    "gelu": Case(op("gelu", X, approximate="none"), lambda x, y, z: x * phi(x), size),
    "gelu_tanh": Case(op("gelu", X, approximate="tanh"), lambda x, y, z: gelu_tanh(x), size),
    "silu": Case(op("silu", X), lambda x, y, z: x * sigmoid(x), size),
    "softplus": Case(op("softplus", X), lambda x, y, z: softplus(x)),
    "mish": Case(op("mish", X), lambda x, y, z: x * np.tanh(softplus(x)), size),
    "hardswish": Case(op("hardswish", X), lambda x, y, z: x * np.clip(x + 3, 0, 6) / 6, size),
    "constant": Case(op("add", op("mul", X, constant(-0.1)), constant(3)), lambda x, y, z: x * -0.1 + 3.0, size),
    "shared": Case(op("mul", op("add", X, Y), op("add", X, Y)), lambda x, y, z: (x + y) ** 2, lambda x, y, z: np.abs(x * y)),
    "cast": Case(op("cast", X, dtype="float32"), lambda x, y, z: x.astype(np.float32).astype(np.float64)),
    "cast_bf16": Case(op("cast", X, dtype="bfloat16"), lambda x, y, z: x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)),
    "cast_e4m3": Case(
        op("cast", op("mul", X, constant(128.0)), dtype="float8_e4m3fn"),
        lambda x, y, z: np.clip(x * 128, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64),
    ),
    "acc": Case(op("add", acc(), acc(1)), lambda x, y, z: x + y),
    "unbitmask": Case(op("where", op("unbitmask", Node("input", name="mask", extent="bits", dtype="uint8")), X, Y), lambda x, y, z: x),
}

# Written in their own way: leaves, storage, and what never reaches a kernel.
ELSEWHERE = {"input", "operand_sum", "bitmask", "sum", "amax", "uniform", "sum_like"}


def test_every_op_of_the_vocabulary_is_here() -> None:
    covered = {node.op for case in CASES.values() for node in Expression((Output("d", case.node),)).nodes()}
    assert set(OPS) - ELSEWHERE == covered - ELSEWHERE


def binding() -> Binding:
    return Binding(
        accumulators=("in[0]", "in[1]"),
        inputs={"x": "in[0]", "y": "in[1]", "z": "in[2]", "mask": "true"},
        outputs={"d": "out"},
        integers={"seed": "seed"},
    )


def definition(name: str, node: Node, accumulator: str) -> str:
    kind = codegen.VALUE_TYPES[accumulator]
    expression = Expression((Output("d", node),), accumulators=2)
    signature = f"static void f_{name}_{accumulator}(const {kind} (&in)[3], {kind}& out)"
    loop = f"""
extern "C" void {name}_{accumulator}(int count, const {kind}* x, const {kind}* y, const {kind}* z, {kind}* d) {{
    for (int i = 0; i < count; ++i) {{
        const {kind} in[3] = {{x[i], y[i], z[i]}};
        f_{name}_{accumulator}(in, d[i]);
    }}
}}"""
    return codegen.function(expression, accumulator, binding(), signature) + loop


COMPLEX_CASES: dict[str, tuple[Node, Callable[..., Any]]] = {
    "c_add": (op("add", X, Y), lambda x, y, z: x + y),
    "c_sub": (op("sub", X, Y), lambda x, y, z: x - y),
    "c_mul": (op("mul", X, Y), lambda x, y, z: x * y),
    "c_div": (op("div", X, Y), lambda x, y, z: x / y),
    "c_neg": (op("neg", op("mul", X, constant(2.5))), lambda x, y, z: -x * 2.5),
}

STORAGE = """
extern "C" void encode_float(int type, int count, const float* x, unsigned* words) {
    for (int i = 0; i < count; ++i) { words[i] = 0; epi_encode((EpiType)type, words + i, 0, x[i]); }
}
extern "C" void encode_double(int type, int count, const double* x, unsigned* words) {
    for (int i = 0; i < count; ++i) { words[i] = 0; epi_encode((EpiType)type, words + i, 0, x[i]); }
}
extern "C" void decode(int type, int count, const unsigned* words, float* x) {
    for (int i = 0; i < count; ++i) x[i] = epi_decode<float>((EpiType)type, words + i, 0);
}
extern "C" void repack(int type, int count, const unsigned char* from, unsigned char* to) {
    unsigned words[32], packed[32];
    const int bytes = epi_bytes((EpiType)type);
    __builtin_memcpy(words, from, bytes * count);
    for (int i = 0; i < count; ++i) epi_encode((EpiType)type, packed, i, epi_decode<double>((EpiType)type, words, i));
    __builtin_memcpy(to, packed, bytes * count);
}
extern "C" void uniforms(long long seed, int batch, int rows, int columns, float* x) {
    for (int i = 0; i < rows; ++i) for (int j = 0; j < columns; ++j) x[i * columns + j] = epi_uniform(seed, i, j, batch);
}
"""


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    parts = [definition(name, case.node, accumulator) for name, case in CASES.items() for accumulator in TYPES]
    parts += [definition(name, node, accumulator) for name, (node, _) in COMPLEX_CASES.items() for accumulator in COMPLEX]
    return build(tmp_path_factory.mktemp("host"), host_text(definitions="\n".join([*parts, STORAGE])))


def run(host: ctypes.CDLL, name: str, *arrays: Any) -> Any:
    out = np.full_like(arrays[0], np.nan)
    pointers = [ctypes.c_void_p(a.ctypes.data) for a in (*arrays, out)]
    getattr(host, name)(ctypes.c_int(len(out)), *pointers)
    return out


def worst(got: Any, want: Any, allowed: Any) -> str:
    """The first element that is further off than allowed, "" where there is none."""
    bad = ~(np.abs(got - want) <= allowed) & ~(np.isnan(got) & np.isnan(want)) & (got != want)
    if not bad.any():
        return ""
    i = int(np.argmax(bad))
    return f"element {i} of {len(got)}: {got[i]!r}, not {want[i]!r} within {np.broadcast_to(allowed, got.shape)[i]:.3g}; {bad.sum()} such"


UNITS = 4  # of the accumulator's rounding: what few roundings and a library function within one unit make


@pytest.mark.parametrize("accumulator", TYPES)
@pytest.mark.parametrize("name", CASES)
def test_ops_agree_with_float64(host: ctypes.CDLL, name: str, accumulator: str) -> None:
    case, kind = CASES[name], TYPES[accumulator][1]
    rng = np.random.default_rng(7)
    arrays = [rng.uniform(case.low, case.high, 4001).astype(kind) for _ in range(3)]
    arrays[1][::5] = arrays[0][::5]  # equal pairs, for comparisons
    wide = [a.astype(np.float64) for a in arrays]
    want = case.reference(*wide)
    allowed = UNITS * np.finfo(kind).eps * (np.abs(want) + case.scale(*wide))
    got = run(host, f"{name}_{accumulator}", *arrays)
    assert not (message := worst(got.astype(np.float64), want, allowed)), message


def test_a_wrong_op_is_caught(host: ctypes.CDLL) -> None:
    """The tanh form of GELU is up to 4.7e-4 from the erf form: the comparison must tell them apart."""
    x = np.linspace(-6, 6, 1001).astype(np.float32)
    wide = x.astype(np.float64)
    allowed = UNITS * np.finfo(np.float32).eps * (np.abs(wide * phi(wide)) + np.abs(wide))
    assert worst(run(host, "gelu_tanh_float32", x, x, x).astype(np.float64), wide * phi(wide), allowed)
    assert not worst(run(host, "gelu_float32", x, x, x).astype(np.float64), wide * phi(wide), allowed)


INF, NAN = math.inf, math.nan
# op: its values at -inf, inf, NaN (None: not fixed by the contract)
SPECIAL: dict[str, tuple[float, float, float]] = {
    "relu": (0.0, INF, NAN),
    "leaky_relu": (-INF, INF, NAN),
    "gelu": (0.0, INF, NAN),
    "gelu_tanh": (0.0, INF, NAN),
    "silu": (0.0, INF, NAN),
    "mish": (0.0, INF, NAN),
    "hardswish": (0.0, INF, NAN),
    "softplus": (0.0, INF, NAN),
    "sigmoid": (0.0, 1.0, NAN),
    "tanh": (-1.0, 1.0, NAN),
    "erf": (-1.0, 1.0, NAN),
    "exp": (0.0, INF, NAN),
    "abs": (INF, INF, NAN),
    "square": (INF, INF, NAN),
}


@pytest.mark.parametrize("accumulator", TYPES)
@pytest.mark.parametrize("name", SPECIAL)
def test_special_values(host: ctypes.CDLL, name: str, accumulator: str) -> None:
    x = np.array([-INF, INF, NAN], TYPES[accumulator][1])
    got = run(host, f"{name}_{accumulator}", x, x, x)
    np.testing.assert_array_equal(got.astype(np.float64), SPECIAL[name])


@pytest.mark.parametrize("accumulator", TYPES)
@pytest.mark.parametrize("name", ["minimum", "maximum"])
def test_nan_goes_through_minimum_and_maximum(host: ctypes.CDLL, name: str, accumulator: str) -> None:
    kind = TYPES[accumulator][1]
    x, y = np.array([NAN, 1.0, NAN, INF], kind), np.array([1.0, NAN, NAN, -INF], kind)
    got = run(host, f"{name}_{accumulator}", x, y, x)
    assert np.isnan(got[:3]).all()
    assert got[3] == (INF if name == "maximum" else -INF)


@pytest.mark.parametrize("accumulator", COMPLEX)
@pytest.mark.parametrize("name", COMPLEX_CASES)
def test_complex_arithmetic(host: ctypes.CDLL, name: str, accumulator: str) -> None:
    kind = COMPLEX[accumulator][1]
    rng = np.random.default_rng(3)
    arrays = [(rng.normal(size=999) + 1j * rng.normal(size=999)).astype(kind) for _ in range(3)]
    wide = [a.astype(np.complex128) for a in arrays]
    want = COMPLEX_CASES[name][1](*wide)
    got = run(host, f"{name}_{accumulator}", *arrays).astype(np.complex128)
    allowed = 8 * np.finfo(kind).eps * (np.abs(want) + np.abs(wide[0]) + np.abs(wide[1]))
    assert not (message := worst(got, want, allowed)), message


# ---------------------------------------------------------------- storage

STORED = {
    "float16": (0, np.float16),
    "bfloat16": (1, ml_dtypes.bfloat16),
    "float8_e4m3fn": (6, ml_dtypes.float8_e4m3fn),
    "float8_e5m2": (7, ml_dtypes.float8_e5m2),
}
SATURATES = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


def codes(dtype: Any) -> Any:
    """Every value of a type of one or two bytes."""
    bits = np.arange(256 ** np.dtype(dtype).itemsize)
    return bits.astype(f"u{np.dtype(dtype).itemsize}").view(dtype)


def pointer(array: Any) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


@pytest.mark.parametrize("name", STORED)
def test_every_code_is_read_as_ml_dtypes_reads_it(host: ctypes.CDLL, name: str) -> None:
    number, dtype = STORED[name]
    every = codes(dtype)
    words, got = np.arange(len(every), dtype=np.uint32), np.empty(len(every), np.float32)
    host.decode(number, len(every), pointer(words), pointer(got))
    np.testing.assert_array_equal(got, every.astype(np.float32))


def nearest_even(x: Any, dtype: Any, largest: float | None) -> Any:
    """x in float64 rounded once to the type: the nearest of all its values, the one with an even code of two."""
    every = codes(dtype)
    wide = every.astype(np.float64)
    finite = np.isfinite(wide) & ~np.signbit(wide)
    order = np.argsort(wide[finite])
    values = wide[finite][order]
    step = values[-1] - values[-2]
    beyond = values[-1] + step
    values = np.append(values, beyond)  # the code after the largest: infinity, or what saturates
    size = np.minimum(np.abs(x), beyond)
    above = np.clip(np.searchsorted(values, size), 1, len(values) - 1)
    low, high = values[above - 1], values[above]
    up = (size - low > high - size) | ((size - low == high - size) & (above % 2 == 0))
    result = np.where(up, high, low)
    result = np.where(result == beyond, INF, result) if largest is None else np.minimum(result, largest)
    return np.copysign(np.where(np.isnan(x), NAN, result), x)


@pytest.mark.parametrize("wide", ["float", "double"])
@pytest.mark.parametrize("name", STORED)
def test_stores_round_once_to_nearest_even(host: ctypes.CDLL, name: str, wide: str) -> None:
    number, dtype = STORED[name]
    kind = np.float32 if wide == "float" else np.float64
    with np.errstate(all="ignore"):
        every = codes(dtype).astype(np.float64)
        values = np.unique(every[np.isfinite(every)])
        ties = (values[1:] + values[:-1]) / 2
        rng = np.random.default_rng(1)
        near = [np.nextafter(ties.astype(kind), kind(s * INF)) for s in (-1, 1)]
        random = rng.normal(size=5000) * 2.0 ** rng.integers(-30, 20, 5000)
        special = [INF, -INF, NAN, 0.0, -0.0, 1e30, -1e30, 65519.999, 65520.0, 448.0, 464.0, 465.0, 57344.0, 61440.0, 70000.0]
        x = np.concatenate([values.astype(kind), ties.astype(kind), *near, random.astype(kind), np.array(special, kind)])
        words = np.empty(len(x), np.uint32)
        getattr(host, f"encode_{wide}")(number, len(x), pointer(x), pointer(words))
        got = words.astype(f"u{np.dtype(dtype).itemsize}").view(dtype).astype(np.float64)
        want = nearest_even(x.astype(np.float64), dtype, SATURATES.get(name))
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got[~np.isnan(want)]), np.signbit(want[~np.isnan(want)]))


@pytest.mark.parametrize(("number", "dtype"), [*STORED.values(), (2, np.float32), (3, np.float64)])
def test_elements_keep_their_places_in_words(host: ctypes.CDLL, number: int, dtype: Any) -> None:
    """Eight neighbours read from words and written back are the same bytes."""
    x = np.array([1.5, -2.0, 0.25, 3.0, -0.5, 4.0, 8.0, -1.0]).astype(dtype)
    back = np.zeros_like(x)
    host.repack(number, len(x), pointer(x), pointer(back))
    assert x.tobytes() == back.tobytes()


# ---------------------------------------------------------------- random numbers


def test_uniform_is_philox(host: ctypes.CDLL) -> None:
    from epigemm.expression.philox import uniform

    got = np.empty((7, 13), np.float32)
    seed = 0x123456789ABCDEF
    host.uniforms(ctypes.c_longlong(seed), 3, 7, 13, pointer(got))
    np.testing.assert_array_equal(got, uniform(seed, np.arange(7)[:, None], np.arange(13)[None, :], 3))
    # The published vector of Philox4x32-10 for counter 0 and key 0: its first word is 6627e8d5.
    host.uniforms(ctypes.c_longlong(0), 0, 1, 1, pointer(got))
    assert got[0, 0] == np.float32((0x6627E8D5 >> 8) * 2.0**-24)


# ---------------------------------------------------------------- the text


def body(node: Node, accumulator: str = "float32", **outputs: str) -> list[str]:
    return codegen.statements(Expression((Output("d", node),), accumulators=2), accumulator, binding())


def test_a_shared_node_is_computed_once() -> None:
    both = op("add", X, Y)
    assert body(op("mul", both, both)) == [
        "const float x = in[0];",
        "const float y = in[1];",
        "const float t2 = (x + y);",
        "const float t3 = (t2 * t2);",
        "out = t3;",
    ]


def test_a_dropout_reads_its_seed_as_an_integer() -> None:
    seed = Node("input", name="seed", extent="scalar", dtype="int64")
    lines = body(op("where", op("ge", op("uniform", seed), constant(0.5)), X, constant(0.0)))
    assert lines[0] == "const float t0 = epi_uniform(seed, row, column, batch);"
    assert "const float seed = in[0];" not in lines
    assert body(op("uniform", constant(-1)), "float64")[0] == (
        "const double t0 = static_cast<double>(epi_uniform(static_cast<long long>(0xffffffffffffffffull), row, column, batch));"
    )


def test_reductions_and_masks_leave_their_term() -> None:
    total = op("cast", op("sum", op("square", X), axis="m"), dtype="bfloat16")
    assert codegen.term(total) is op("square", X)
    assert codegen.reduction(total) is op("sum", op("square", X), axis="m")
    assert codegen.term(op("bitmask", op("gt", X, Y))) is op("gt", X, Y)
    assert codegen.term(op("cast", X, dtype="bfloat16")) is op("cast", X, dtype="bfloat16")
    assert codegen.reduction(X) is None


@pytest.mark.parametrize(
    ("name", "want"), [("bias", "bias"), ("float", "float_"), ("t1", "t1_"), ("β", "u3b2"), ("epi_exp", "epi_exp_"), ("_x", "_x_")]
)
def test_input_names_become_cpp_names(name: str, want: str) -> None:
    assert codegen.identifier(name) == want


def test_names_that_collide_are_told_apart() -> None:
    first, second = (Node("input", name=name, extent="matrix", dtype="float32") for name in ("new", "new_"))
    at = Binding(accumulators=(), inputs={"new": "in[0]", "new_": "in[1]"}, outputs={"d": "out"})
    lines = codegen.statements(Expression((Output("d", op("sub", first, second)),)), "float32", at)
    assert lines == ["const float new_ = in[0];", "const float new__ = in[1];", "const float t2 = (new_ - new__);", "out = t2;"]


@pytest.mark.parametrize(
    ("value", "single", "double"),
    [
        (0.1, "0.1f", "0.1"),
        (3, "3.0f", "3.0"),
        (-0.0, "(-0.0f)", "(-0.0)"),
        (1e-7, "1e-07f", "1e-07"),
        (math.inf, "epi_bits_float(0x7f800000u)", "epi_bits_double(0x7ff0000000000000ull)"),
        (-math.inf, "epi_bits_float(0xff800000u)", "epi_bits_double(0xfff0000000000000ull)"),
        (math.nan, "epi_bits_float(0x7fc00000u)", "epi_bits_double(0x7ff8000000000000ull)"),
        (1e300, "epi_bits_float(0x7f800000u)", "1e+300"),
        (True, "true", "true"),
    ],
)
def test_literals(value: float, single: str, double: str) -> None:
    with np.errstate(over="ignore"):
        assert codegen.literal(value, "float32") == single
    assert codegen.literal(value, "float64") == double


@pytest.mark.parametrize(
    ("node", "accumulator", "why"),
    [
        (op("tanh", X), "complex64", "Its value is complex."),
        (op("cast", X, dtype="float16"), "complex64", "A complex64 value cannot be rounded to float16."),
        (op("cast", X, dtype="int32"), "float32", "A float32 value cannot be rounded to int32."),
        (op("sum_like", X, name="bias"), "float32", "It has no spelling in CUDA C\\+\\+."),
    ],
)
def test_what_has_no_cpp_is_refused_with_the_node_named(node: Node, accumulator: str, why: str) -> None:
    with pytest.raises(errors.UnsupportedEpilogue, match=why):
        body(node, accumulator)
