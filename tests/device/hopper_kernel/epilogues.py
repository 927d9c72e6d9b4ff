"""The probe's epilogues: text, signature, and the same in torch (float64), apart from each other."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import isolate  # noqa: F401  (before epigemm)

from epigemm.engines.hopper.configs import Signature

PRELUDE = """
DEVICE float relu(float y) { float z; asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(z) : "f"(y)); return z; }
DEVICE float exp2_fast(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float reciprocal(float x) { float y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float sigmoid(float x) { return reciprocal(1.0f + exp2_fast(-1.44269504f * x)); }
DEVICE float silu(float x) { return x * sigmoid(x); }
// tanh form: y * sigmoid(2 u), u = sqrt(2 / pi) (y + 0.044715 y^3)
DEVICE float gelu_sigmoid(float y) {
    return reciprocal(1.0f + exp2_fast(y * fmaf(y * y, -0.102943240f, -2.30220819f)));
}
DEVICE float gelu_tanh(float y) { return y * gelu_sigmoid(y); }
DEVICE float gelu_tanh_slope(float y) {
    const float t = y * y, s = reciprocal(1.0f + exp2_fast(y * fmaf(t, -0.102943240f, -2.30220819f)));
    return fmaf(fmaf(-s, s, s) * y, fmaf(t, 0.214064488f, 1.59576912f), s);
}
// y Phi(y) = max(y, 0) - |y| Phi(-|y|), Phi(-x) = erfc(x / sqrt(2)) / 2 by Abramowitz and Stegun 7.1.26, |error| < 7.5e-8
DEVICE float gelu_erf(float y) {
    const float x = fabsf(y), t = reciprocal(fmaf(0.231641888f, x, 1.0f)), z = 0.849321800f * y;
    const float poly = t * fmaf(t, fmaf(t, fmaf(t, fmaf(t, 0.5307027145f, -0.7265760135f), 0.7107068705f), -0.142248368f), 0.127414796f);
    return fmaf(-x, poly * exp2_fast(-z * z), relu(y));
}
"""


@dataclass(frozen=True)
class Epilogue:
    """A generated text and its meaning. `reference` gets acc (a tuple) and the inputs by name, float64, and returns outputs by name."""

    name: str
    body: str
    signature: Signature
    reference: Callable[..., dict[str, Any]]
    gain: float = 1.2  # bound of |d out / d acc|, for the tolerance

    @property
    def text(self) -> str:
        return f"{PRELUDE}\nDEVICE void epilogue(const Inputs& in, Outputs& out) {{ {self.body} }}\n"


def _gelu(y: Any, approximate: str) -> Any:
    import torch

    return torch.nn.functional.gelu(y, approximate=approximate)


def _gelu_slope(y: Any) -> Any:
    import torch

    u = math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)
    t = torch.tanh(u)
    return 0.5 * (1 + t) + 0.5 * y * (1 - t * t) * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * y * y)


def _d_swiglu(acc: Any, tiles: Any, **_: Any) -> dict[str, Any]:
    gate, up = tiles
    s = gate.sigmoid()
    return {"tiles": (acc[0] * up * s * (1 + gate * (1 - s)), acc[0] * gate * s)}


def _masked(acc: Any, bits: Any) -> Any:
    return acc[0] * bits[0]


BIAS = Signature(along_n=("bf16",))

EPILOGUES = [
    Epilogue("bare", "out.tile[0] = in.acc[0];", Signature(), lambda acc, **_: {"tiles": (acc[0],)}),
    Epilogue(
        "bias_relu",
        "out.tile[0] = relu(in.acc[0] + in.along_n[0]);",
        BIAS,
        lambda acc, along_n, **_: {"tiles": ((acc[0] + along_n[0]).relu(),)},
    ),
    Epilogue(
        "bias_gelu_tanh",
        "out.tile[0] = gelu_tanh(in.acc[0] + in.along_n[0]);",
        BIAS,
        lambda acc, along_n, **_: {"tiles": (_gelu(acc[0] + along_n[0], "tanh"),)},
    ),
    Epilogue(
        "bias_gelu_erf",
        "out.tile[0] = gelu_erf(in.acc[0] + in.along_n[0]);",
        BIAS,
        lambda acc, along_n, **_: {"tiles": (_gelu(acc[0] + along_n[0], "none"),)},
    ),
    Epilogue(
        "bias_relu_aux",
        "const float y = in.acc[0] + in.along_n[0]; out.tile[0] = relu(y); out.bit[0] = y >= 0.0f;",
        replace(BIAS, bits_out=1),
        lambda acc, along_n, **_: {"tiles": ((acc[0] + along_n[0]).relu(),), "bits": (acc[0] + along_n[0],)},
    ),
    Epilogue(
        "bias_gelu_aux",
        "const float y = in.acc[0] + in.along_n[0]; out.tile[0] = gelu_tanh(y); out.tile[1] = y;",
        replace(BIAS, tiles_out=("bf16", "bf16")),
        lambda acc, along_n, **_: {"tiles": (_gelu(acc[0] + along_n[0], "tanh"), acc[0] + along_n[0])},
    ),
    Epilogue(
        "bias_residual",
        "out.tile[0] = in.acc[0] + in.along_n[0] + in.tile[0];",
        replace(BIAS, tiles_in=("bf16",)),
        lambda acc, along_n, tiles, **_: {"tiles": (acc[0] + along_n[0] + tiles[0],)},
    ),
    Epilogue(
        "row_col_stats",
        "const float y = in.acc[0] * in.along_m[0] + in.along_n[0]; out.tile[0] = y; out.sum_n[0] = y * y; out.sum_m[0] = y;",
        replace(BIAS, along_m=("f32",), sums_m=1, sums_n=1),
        lambda acc, along_n, along_m, **_: {
            "tiles": (acc[0] * along_m[0] + along_n[0],),
            "sums_m": ((acc[0] * along_m[0] + along_n[0]).sum(0),),
            "sums_n": ((acc[0] * along_m[0] + along_n[0]).square().sum(1),),
        },
        gain=5,
    ),
    Epilogue(
        "drelu_bgrad",
        "const float d = in.bit[0] ? in.acc[0] : 0.0f; out.tile[0] = d; out.sum_m[0] = d;",
        Signature(bits_in=1, sums_m=1),
        lambda acc, bits, **_: {"tiles": (_masked(acc, bits),), "sums_m": (_masked(acc, bits).sum(0),)},
    ),
    Epilogue(
        "dgelu_bgrad",
        "const float d = in.acc[0] * gelu_tanh_slope(in.tile[0]); out.tile[0] = d; out.sum_m[0] = d;",
        Signature(tiles_in=("bf16",), sums_m=1),
        lambda acc, tiles, **_: {"tiles": (acc[0] * _gelu_slope(tiles[0]),), "sums_m": ((acc[0] * _gelu_slope(tiles[0])).sum(0),)},
    ),
    Epilogue(
        "swiglu",
        "out.tile[0] = silu(in.acc[0]) * in.acc[1];",
        Signature(weights=2),
        lambda acc, **_: {"tiles": (acc[0] * acc[0].sigmoid() * acc[1],)},
        gain=12,
    ),
    Epilogue(
        "d_swiglu",
        "const float s = sigmoid(in.tile[0]); out.tile[0] = in.acc[0] * in.tile[1] * s * (1.0f + in.tile[0] * (1.0f - s));"
        " out.tile[1] = in.acc[0] * in.tile[0] * s;",
        Signature(tiles_in=("bf16", "bf16"), tiles_out=("bf16", "bf16")),
        _d_swiglu,
        gain=12,
    ),
]
EPILOGUES += [  # what an epilogue costs: chains of so many FMAs, of so many special functions, an element
    Epilogue(
        f"fma{n}",
        "float y = in.acc[0]; " + "y = fmaf(y, 0.999f, 0.001f);" * n + " out.tile[0] = y;",
        Signature(),
        lambda acc, **_: {"tiles": (acc[0],)},
        gain=1e9,
    )
    for n in (4, 8, 16, 32)
]
EPILOGUES += [
    Epilogue(
        f"mufu{n}",
        "float y = in.acc[0]; " + "y = exp2_fast(y);" * n + " out.tile[0] = y;",
        Signature(),
        lambda acc, **_: {"tiles": (acc[0],)},
        gain=1e9,
    )
    for n in (1, 2, 4)
]
EPILOGUES += [
    Epilogue(
        "vfma32",
        "float y = in.acc[0]; "
        + 'asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+f"(y) : "f"(0.999f), "f"(0.001f));' * 32
        + " out.tile[0] = y;",
        Signature(),
        lambda acc, **_: {"tiles": (acc[0],)},
        gain=1e9,
    )
]
BY_NAME = {e.name: e for e in EPILOGUES}


def as_element(signature: Signature, element: str) -> Signature:
    """The same signature with every 16-bit type this one."""

    def swap(types: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(t if t == "f32" else element for t in types)

    return replace(
        signature,
        element=element,
        along_n=swap(signature.along_n),
        along_m=swap(signature.along_m),
        tiles_in=swap(signature.tiles_in),
        tiles_out=swap(signature.tiles_out),
    )
