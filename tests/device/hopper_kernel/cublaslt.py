"""The bare product: the fastest of cuBLASLt's first 16 heuristic algorithms, through ctypes."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

CUDA_R = {torch.float16: 2, torch.bfloat16: 14}
COMPUTE_32F, R_32F = 68, 0
TRANSA, TRANSB, WORKSPACE = 3, 4, 1
WORKSPACE_BYTES = 64 << 20


class Result(ctypes.Structure):
    _fields_ = [
        ("algo", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


def _library() -> ctypes.CDLL:
    torch.zeros(8, 8, device="cuda") @ torch.zeros(8, 8, device="cuda")
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "libcublasLt.so" in line:
            return ctypes.CDLL(line.split()[-1])
    return ctypes.CDLL("libcublasLt.so.13")


lt = _library()
handle = ctypes.c_void_p()
assert lt.cublasLtCreate(ctypes.byref(handle)) == 0
workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")


def _layout(tensor: torch.Tensor) -> tuple[ctypes.c_void_p, bool]:
    """The layout of a 2-D tensor as the column-major matrix that cuBLASLt sees, and whether that is its transpose."""
    rows, cols = tensor.shape
    row_major = tensor.stride(1) == 1
    layout = ctypes.c_void_p()
    size = (cols, rows, tensor.stride(0)) if row_major else (rows, cols, tensor.stride(1))
    status = lt.cublasLtMatrixLayoutCreate(
        ctypes.byref(layout), CUDA_R[tensor.dtype], *(ctypes.c_uint64(x) for x in size[:2]), ctypes.c_int64(size[2])
    )
    assert status == 0, status
    return layout, row_major


class Product:
    """d = a @ b, d row-major, as D^T = B^T A^T."""

    def __init__(self, a: torch.Tensor, b: torch.Tensor, d: torch.Tensor) -> None:
        self.tensors = (a, b, d)
        self.desc = ctypes.c_void_p()
        assert lt.cublasLtMatmulDescCreate(ctypes.byref(self.desc), COMPUTE_32F, R_32F) == 0
        (self.first, b_row), (self.second, a_row), (self.out, _) = _layout(b), _layout(a), _layout(d)
        for attribute, transposed in ((TRANSA, not b_row), (TRANSB, not a_row)):
            value = ctypes.c_int(int(transposed))
            assert lt.cublasLtMatmulDescSetAttribute(self.desc, attribute, ctypes.byref(value), ctypes.c_size_t(4)) == 0
        preference, limit = ctypes.c_void_p(), ctypes.c_uint64(WORKSPACE_BYTES)
        lt.cublasLtMatmulPreferenceCreate(ctypes.byref(preference))
        lt.cublasLtMatmulPreferenceSetAttribute(preference, WORKSPACE, ctypes.byref(limit), ctypes.c_size_t(8))
        results, found = (Result * 16)(), ctypes.c_int()
        status = lt.cublasLtMatmulAlgoGetHeuristic(
            handle, self.desc, self.first, self.second, self.out, self.out, preference, 16, results, ctypes.byref(found)
        )
        assert status == 0 and found.value > 0, (status, found.value)
        self.results, self.count = results, found.value
        self.one, self.zero = ctypes.c_float(1), ctypes.c_float(0)
        self.algorithm = 0

    def __call__(self, algorithm: int | None = None) -> None:
        a, b, d = (ctypes.c_void_p(t.data_ptr()) for t in self.tensors)
        algo = self.results[self.algorithm if algorithm is None else algorithm].algo
        status = lt.cublasLtMatmul(
            handle, self.desc, ctypes.byref(self.one), b, self.first, a, self.second, ctypes.byref(self.zero), d, self.out, d, self.out,
            ctypes.byref(algo), ctypes.c_void_p(workspace.data_ptr()), ctypes.c_size_t(WORKSPACE_BYTES),
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )  # fmt: skip
        assert status == 0, status

    def with_algorithm(self, algorithm: int) -> Product:
        self.algorithm = algorithm
        return self
