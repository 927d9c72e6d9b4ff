"""The kernel through the CUDA driver API, by ctypes: modules, tensor maps, `Params`, launches. Buffers are torch's."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import isolate  # noqa: F401  (before epigemm)
import torch

from epigemm.engines.hopper.configs import TILE_K, Config, Signature

TORCH_TYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
EVICT_NORMAL, EVICT_FIRST, EVICT_LAST = (
    0x1000000000000000,
    0x12F0000000000000,
    0x14F0000000000000,
)  # words that createpolicy.fractional makes, fraction 1
MAP_TYPES = {"f16": 6, "bf16": 9}  # CUtensorMapDataType
SWIZZLES = {64: 2, 128: 3}  # bytes of a box's row -> CUtensorMapSwizzle
L2_PROMOTION = {128: 2, 256: 3}  # bytes -> CUtensorMapL2promotion
SHARED_SIZE_ATTRIBUTE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES

cuda = ctypes.CDLL("libcuda.so.1")
torch.zeros(1, device="cuda")  # makes the primary context current


def check(status: int) -> None:
    if status != 0:
        text = ctypes.c_char_p()
        cuda.cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"CUDA driver error {status}: {text.value.decode() if text.value else '?'}")


class Map(ctypes.Structure):
    _fields_ = [("opaque", ctypes.c_uint64 * 16)]


class Params(ctypes.Structure):
    """Mirrors `Params` of kernels/kernel_types.cuh, field by field."""

    _fields_ = [
        ("a", Map), ("b", Map * 2), ("tiles_in", Map * 4), ("tiles_out", Map * 4),
        ("along_n", ctypes.c_void_p * 8), ("along_m", ctypes.c_void_p * 8),
        ("bits_in", ctypes.c_void_p * 2), ("bits_out", ctypes.c_void_p * 2),
        ("sums_m", ctypes.c_void_p * 4), ("sums_n", ctypes.c_void_p * 4),
        ("bits_in_stride", ctypes.c_uint64 * 2), ("bits_out_stride", ctypes.c_uint64 * 2),
        ("policy_a", ctypes.c_uint64), ("policy_b", ctypes.c_uint64), ("policy_in", ctypes.c_uint64), ("policy_out", ctypes.c_uint64),
        ("scalars", ctypes.c_float * 8),
        ("m", ctypes.c_int), ("n", ctypes.c_int), ("k", ctypes.c_int),
        ("tiles_m", ctypes.c_int), ("tiles_n", ctypes.c_int), ("steps", ctypes.c_int), ("group", ctypes.c_int),
        ("padding", ctypes.c_int * 9),
    ]  # fmt: skip


assert ctypes.sizeof(Params) == 1792, ctypes.sizeof(Params)


def aligned_params() -> Params:
    """A zeroed Params on a multiple of 64, as cuTensorMapEncodeTiled asks."""
    raw = ctypes.create_string_buffer(ctypes.sizeof(Params) + 64)
    params = Params.from_address(-(-ctypes.addressof(raw) // 64) * 64)
    params._raw = raw  # keeps the memory alive
    return params


def encode(target: Map, tensor: torch.Tensor, element: str, box: tuple[int, int], fetch_bytes: int = 256) -> None:
    """The map of a 2-D tensor whose last dimension is contiguous; `box` is (inner, outer).

    `fetch_bytes`: what L2 fetches at least. 256 for operands, whose next 128 bytes are the next stage's; 128 for epilogue inputs: their
    other half was dropped before its turn (65 MB too much read for each 134 MB input, m=16384 n=4096, by ncu)."""
    outer, inner = tensor.shape
    assert tensor.stride(1) == 1 and tensor.stride(0) * 2 % 16 == 0 and tensor.data_ptr() % 16 == 0, (tensor.shape, tensor.stride())
    check(
        cuda.cuTensorMapEncodeTiled(
            ctypes.byref(target), MAP_TYPES[element], 2, ctypes.c_void_p(tensor.data_ptr()),
            (ctypes.c_uint64 * 2)(inner, outer), (ctypes.c_uint64 * 1)(tensor.stride(0) * 2),
            (ctypes.c_uint32 * 2)(*box), (ctypes.c_uint32 * 2)(1, 1), 0, SWIZZLES[box[0] * 2], L2_PROMOTION[fetch_bytes], 0,
        )
    )  # fmt: skip


class Attribute(ctypes.Structure):
    """CUlaunchAttribute with an int value."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_int * 15)]


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint), ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)), ("count", ctypes.c_uint),
    ]  # fmt: skip


PROGRAMMATIC_STREAM_SERIALIZATION = 6
OVERLAP = (Attribute * 1)(Attribute(PROGRAMMATIC_STREAM_SERIALIZATION, 0, 1))


def launch(function: ctypes.c_void_p, grid: int, block: tuple[int, int], shared: int, arguments: Any) -> None:
    """Launches so that the kernel may start while the one before it drains; it waits for that one's end by itself."""
    stream = torch.cuda.current_stream().cuda_stream
    config = LaunchConfig((grid, 1, 1), (*block, 1), shared, stream, OVERLAP, 1)
    check(cuda.cuLaunchKernelEx(ctypes.byref(config), function, arguments, None))


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass
class Operands:
    """What one call reads and writes. A is [m, k] or, not k-major, the transpose of a [k, m] tensor; B is given as [n, k] likewise."""

    a: torch.Tensor
    b: tuple[torch.Tensor, ...]
    along_n: tuple[torch.Tensor, ...] = ()
    along_m: tuple[torch.Tensor, ...] = ()
    tiles_in: tuple[torch.Tensor, ...] = ()
    tiles_out: tuple[torch.Tensor, ...] = ()
    bits_in: tuple[torch.Tensor, ...] = ()
    bits_out: tuple[torch.Tensor, ...] = ()
    sums_m: tuple[torch.Tensor, ...] = ()
    sums_n: tuple[torch.Tensor, ...] = ()


class Kernel:
    """A loaded cubin."""

    def __init__(self, cubin: bytes, config: Config, signature: Signature) -> None:
        self.config, self.signature = config, signature
        self.module, self.main, self.finish = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        check(cuda.cuModuleLoadData(ctypes.byref(self.module), cubin))
        check(cuda.cuModuleGetFunction(ctypes.byref(self.main), self.module, b"epigemm_hopper"))
        check(cuda.cuModuleGetFunction(ctypes.byref(self.finish), self.module, b"epigemm_finish"))
        self.shared = config.shared_bytes(signature)
        check(cuda.cuFuncSetAttribute(self.main, SHARED_SIZE_ATTRIBUTE, self.shared))

    def bind(self, o: Operands, group: int = 8, hints: str = "s") -> Bound:
        """A launch with its maps encoded and its partial sums allocated."""
        return Bound(self, o, group, hints)


class Bound:
    def __init__(self, kernel: Kernel, o: Operands, group: int, hints: str) -> None:
        c, s = kernel.config, kernel.signature
        self.kernel, self.operands, self.params = kernel, o, aligned_params()
        p = self.params
        out_n, group_m = c.tile_n // s.weights, c.tile_m if c.pingpong else c.tile_m // 2
        m, k = o.a.shape
        n = o.b[0].shape[0]
        p.m, p.n, p.k, p.group = m, n, k, max(1, group // c.cluster)
        p.policy_a = EVICT_LAST if "a" in hints else EVICT_NORMAL
        p.policy_b = EVICT_LAST if "b" in hints else EVICT_NORMAL
        p.policy_in = p.policy_out = EVICT_FIRST if "s" in hints else EVICT_NORMAL
        p.tiles_m, p.tiles_n, p.steps = ceil_div(m, c.tile_m * c.cluster), ceil_div(n, out_n), ceil_div(k, TILE_K)
        encode(p.a, o.a if s.a_k_major else o.a.T, s.element, (64, c.tile_m) if s.a_k_major else (64, TILE_K))
        for i, b in enumerate(o.b):
            box = (64, out_n // c.cluster) if s.b_k_major else (64, TILE_K // c.cluster)
            encode(p.b[i], b if s.b_k_major else b.T, s.element, box)
        for i, (t, kind) in enumerate(zip(o.tiles_in, s.tiles_in)):
            encode(p.tiles_in[i], t, kind, (c.box_n, 64), fetch_bytes=128)
        for i, (t, kind) in enumerate(zip(o.tiles_out, s.tiles_out)):
            encode(p.tiles_out[i], t, kind, (c.box_n, 16))
        self.partials = [torch.empty(4 * ceil_div(m, group_m), n, device="cuda") for _ in o.sums_m]
        self.partials += [torch.empty(p.tiles_n, m, device="cuda") for _ in o.sums_n]
        for name in ("along_n", "along_m", "bits_in", "bits_out"):
            for i, t in enumerate(getattr(o, name)):
                getattr(p, name)[i] = t.data_ptr()
        for i in range(s.sums_m):
            p.sums_m[i] = self.partials[i].data_ptr()
        for i in range(s.sums_n):
            p.sums_n[i] = self.partials[s.sums_m + i].data_ptr()
        for i, t in enumerate(o.bits_in):
            p.bits_in_stride[i] = t.stride(0)
        for i, t in enumerate(o.bits_out):
            p.bits_out_stride[i] = t.stride(0)
        blocks = torch.cuda.get_device_properties(0).multi_processor_count // c.cluster
        self.grid = min(blocks, p.tiles_m * p.tiles_n) * c.cluster
        self.arguments = (ctypes.c_void_p * 1)(ctypes.addressof(p))
        self.finishers = [self._finisher(x, y) for x, y in zip(self.partials, (*o.sums_m, *o.sums_n))]

    @staticmethod
    def _finisher(partial: torch.Tensor, out: torch.Tensor) -> tuple[int, Any, Any]:
        count, length = partial.shape
        kind = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}[out.dtype]
        values = (
            ctypes.c_void_p(partial.data_ptr()),
            ctypes.c_void_p(out.data_ptr()),
            ctypes.c_int(count),
            ctypes.c_int(length),
            ctypes.c_int(kind),
        )
        return ceil_div(length, 32), (ctypes.c_void_p * 5)(*(ctypes.addressof(v) for v in values)), values

    def __call__(self) -> None:
        launch(self.kernel.main, self.grid, (384, 1), self.kernel.shared, self.arguments)
        for blocks, arguments, _ in self.finishers:
            launch(self.kernel.finish, blocks, (32, 32), 0, arguments)
