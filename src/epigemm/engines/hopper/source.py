"""The text of a kernel: constants and the wgmma instruction generated for it, the kernel itself, and its epilogue."""

from __future__ import annotations

from pathlib import Path

from epigemm.engines.hopper.configs import Config, Signature

KERNELS = Path(__file__).parent / "kernels"
TYPES = {"bf16": 0, "f16": 1, "f32": 2}
"""Spelling to the value of `Type` in ptx.cuh."""


def kernel_source(config: Config, signature: Signature, epilogue: str) -> str:
    """The whole CUDA C++ text, ready for NVRTC with `-arch=sm_90a`; it includes no header.

    Args:
        config: a fitted configuration (`Config.fitted`).
        signature: what the epilogue reads and writes.
        epilogue: the definition of `DEVICE void epilogue(const Inputs& in, Outputs& out)`, and of what it calls.
    """
    parts = [
        _constants(config, signature),
        _text("ptx.cuh"),
        _text("kernel_types.cuh"),
        _wgmma(config, signature),
        _text("mainloop.cuh"),
        _text("producer.cuh"),
        epilogue,
        _text("epilogue.cuh"),
        _text("gemm.cuh"),
        _text("finish.cuh"),
    ]
    return "\n".join(parts)


def _text(name: str) -> str:
    return f"// ======== {name} ========\n{(KERNELS / name).read_text()}"


def _types(types: tuple[str, ...]) -> str:
    """Types as one number, four bits each, first lowest."""
    return hex(sum(TYPES[t] << 4 * i for i, t in enumerate(types))) + "u"


def _constants(config: Config, signature: Signature) -> str:
    """The header `config::`, which the device text reads."""
    ints = {
        "tile_m": config.tile_m,
        "tile_n": config.tile_n,
        "stages": config.stages,
        "cluster": config.cluster,
        "box_n": config.box_n,
        "store_sets": config.store_sets,
        "ring_slots": config.ring_slots,
        "shared_bytes": config.shared_bytes(signature),
        "weights": signature.weights,
        "along_n": len(signature.along_n),
        "along_m": len(signature.along_m),
        "tiles_in": len(signature.tiles_in),
        "tiles_out": len(signature.tiles_out),
        "bits_in": signature.bits_in,
        "bits_out": signature.bits_out,
        "sums_m": signature.sums_m,
        "sums_n": signature.sums_n,
    }
    bools = {"pingpong": config.pingpong, "a_k_major": signature.a_k_major, "b_k_major": signature.b_k_major}
    types = {name: getattr(signature, name) for name in ("along_n", "along_m", "tiles_in", "tiles_out")}
    lines = [f"// Generated for {config}", f"// and {signature}", "namespace config {"]
    lines += [f"constexpr int {name} = {value};" for name, value in ints.items()]
    lines += [f"constexpr bool {name} = {str(value).lower()};" for name, value in bools.items()]
    lines += [f"constexpr unsigned int {name}_types = {_types(value)};" for name, value in types.items()]
    return "\n".join([*lines, "}  // namespace config", ""])


def _wgmma(config: Config, signature: Signature) -> str:
    """A function around the one wgmma instruction of this kernel: 64 rows, `tile_n` columns, 16 of k."""
    count = config.tile_n // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    element = signature.element
    transposed = f"{int(not signature.a_k_major)}, {int(not signature.b_k_major)}"
    return f"""/// d = a * b, plus d where `accumulate`; asynchronous: ends with `wgmma_wait`. `a` and `b` are the low words of descriptors;
/// the high word says: groups of 8 rows 1024 bytes apart, swizzled by 128 bytes.
DEVICE void wgmma(float (&d)[{count}], u32 a, u32 b, bool accumulate) {{
    asm volatile(
        "{{\\n\\t.reg .pred p;\\n\\t.reg .b64 a, b;\\n\\tsetp.ne.b32 p, %{count + 2}, 0;\\n\\t"
        "mov.b64 a, {{%{count}, 0x40000040}};\\n\\tmov.b64 b, {{%{count + 1}, 0x40000040}};\\n\\t"
        "wgmma.mma_async.sync.aligned.m64n{config.tile_n}k16.f32.{element}.{element}\\n\\t{{{registers}}},\\n\\t"
        "a, b, p, 1, 1, {transposed};\\n\\t}}"
        : {outputs}
        : "r"(a), "r"(b), "r"(static_cast<int>(accumulate)));
}}
"""
