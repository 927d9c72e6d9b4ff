"""The compiled core on a machine without CUDA: it imports, and says clearly what is missing."""

from __future__ import annotations

import ast
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from epigemm import errors
from epigemm.engines.cuda import libraries

ROOT = Path(__file__).parents[2]

core = pytest.importorskip("epigemm._native", reason="the compiled core is not built")


def test_the_stub_names_what_the_core_has():
    tree = ast.parse((ROOT / "src/epigemm/_native.pyi").read_text())
    stubs = {node.name: node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    assert set(stubs) == {name for name in dir(core) if not name.startswith("_")}
    for name, stub in stubs.items():
        if isinstance(stub, ast.ClassDef):
            methods = {m.name for m in stub.body if isinstance(m, ast.FunctionDef)} - {"__init__"}
            assert methods == {m for m in dir(getattr(core, name)) if not m.startswith("_")}, name


@pytest.mark.parametrize(
    "value", [0.0, -0.0, 1.0, 0.5, 65504.0, 65520.0, 1e9, -2.5, 6e-8, 2.9e-8, 3.0e-8, 6.1e-5, 1 / 3, 2047.5, np.inf, np.nan]
)
def test_half_precision_alpha_is_numpys(value):
    alpha, _ = core.Scalars(2, value, 0.0).raw()
    with np.errstate(over="ignore"):
        expected = np.float64(value).astype(np.float16)
    found = np.frombuffer(alpha[:2], np.float16)[0]
    assert (np.isnan(found) and np.isnan(expected)) or found.tobytes() == expected.tobytes()


def test_scalars_lie_in_memory_as_their_type():
    assert core.Scalars(0, 1.5, 2.0).raw()[0][:4] == struct.pack("f", 1.5)
    assert core.Scalars(1, 1.5, 2.0).raw()[1][:8] == struct.pack("d", 2.0)
    assert core.Scalars(4, 1 + 2j, 0).raw()[0][:8] == struct.pack("2f", 1, 2)
    assert core.Scalars(5, 1, 3 - 1j).raw()[1] == struct.pack("2d", 3, -1)
    with pytest.raises(ValueError, match="alpha and beta cannot be of cudaDataType 3"):
        core.Scalars(3, 1, 0)


def test_a_wrong_tensor_map_is_refused_when_it_is_described():
    with pytest.raises(ValueError, match="1 to 5 extents, as many box extents, and one stride less"):
        core.Slot.tensor_map(0, 9, [64, 64], [128, 128], [64, 64])
    core.Slot.tensor_map(0, 9, [64, 64], [128], [64, 64])


@pytest.mark.skipif(bool(core.driver_path()) or libraries.find("cuda") is not None, reason="there is a driver here")
def test_without_a_driver_every_call_says_so():
    words = "engine 'cuda' is not available: NVIDIA's driver is missing: the driver is not opened"
    for call in (core.device_count, lambda: core.Event(0), lambda: core.allocate(0, 16), lambda: core.KernelLibrary(b"x")):
        with pytest.raises(errors.EngineUnavailable, match=words):
            call()
    with pytest.raises(errors.EngineUnavailable, match=r"there is no libcuda.so.1[\s\S]*Install NVIDIA's driver"):
        libraries.open_driver()
    assert libraries.device_count() == 0


def test_a_file_that_is_no_library(tmp_path):
    if core.cublaslt_path():
        pytest.skip("cuBLASLt is open in this process already")
    wrong = tmp_path / "libcublasLt.so.13"
    wrong.write_bytes(b"nothing")
    with pytest.raises(errors.EngineUnavailable, match=r"cuBLASLt is missing: .*libcublasLt.so.13[\s\S]*nvidia-cublas"):
        core.open_cublaslt(str(wrong))


def test_status_errors_are_worded():
    error = libraries.status_error("cublasLt", "cublasLtMatmul", 13, "CUBLAS_STATUS_EXECUTION_FAILED", "Problem(m=1)")
    assert isinstance(error, errors.LibraryError)
    assert str(error).splitlines()[0] == "CUBLAS_STATUS_EXECUTION_FAILED (13)"
    assert "cublasLtMatmul for Problem(m=1)" in str(error)
    missing = libraries.status_error("cuda", "cuInit", 100, "CUDA_ERROR_NO_DEVICE", "")
    assert isinstance(missing, errors.EngineUnavailable)
    assert "engine='cpu' computes without one" in str(missing)


# ---------------------------------------------------------------- finding libraries


def test_libraries_are_found_in_wheels_and_by_environment(tmp_path, monkeypatch):
    folder = tmp_path / "nvidia" / "cu13" / "lib"
    folder.mkdir(parents=True)
    (folder / "libcublasLt.so.13").touch()
    (folder / "libcublas.so.13").touch()
    monkeypatch.setattr(libraries, "_SOURCES", (("wheel", libraries._from_wheel),))
    monkeypatch.syspath_prepend(str(tmp_path))
    found = libraries.find("cublasLt")
    assert found == libraries.Library("cublasLt", str(folder / "libcublasLt.so.13"), "wheel")
    monkeypatch.setattr(libraries, "_SOURCES", (("system", libraries._from_system),))
    home = tmp_path / "cuda"
    (home / "lib64").mkdir(parents=True)
    (home / "lib64" / "libcublasLt.so.12.8.4.1").touch()
    (home / "lib64" / "libcublasLt.so").touch()
    monkeypatch.setenv("CUDA_HOME", str(home))
    assert libraries.find("cublasLt").path.endswith("libcublasLt.so.12.8.4.1")


def test_what_is_in_the_process_comes_first(tmp_path):
    gcc = shutil.which("cc") or shutil.which("gcc")
    if gcc is None:
        pytest.skip("no C compiler")
    source, library = tmp_path / "x.c", tmp_path / "libnvrtc.so.99"
    source.write_text("int epigemm_test(void) { return 1; }\n")
    subprocess.run([gcc, "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    code = f"import ctypes; ctypes.CDLL({str(library)!r}); from epigemm.engines.cuda import libraries; print(libraries.find('nvrtc'))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(ROOT / "src")}, check=True)
    assert run.stdout.strip() == f"nvrtc {library} (in the process)"


# ---------------------------------------------------------------- the binary interface

_PROBE = """
#include <cstddef>
#include <cstdio>
#include <cuda.h>
#include <cublasLt.h>
#include "abi.h"
namespace abi = epigemm::abi;
static_assert(sizeof(abi::LaunchConfig) == sizeof(CUlaunchConfig));
static_assert(offsetof(abi::LaunchConfig, stream) == offsetof(CUlaunchConfig, hStream));
static_assert(offsetof(abi::LaunchConfig, attributes) == offsetof(CUlaunchConfig, attrs));
static_assert(offsetof(abi::LaunchConfig, attribute_count) == offsetof(CUlaunchConfig, numAttrs));
static_assert(sizeof(abi::LaunchAttribute) == sizeof(CUlaunchAttribute));
static_assert(offsetof(abi::LaunchAttribute, value) == offsetof(CUlaunchAttribute, value));
static_assert(offsetof(CUlaunchAttributeValue, clusterDim) == 0 && offsetof(CUlaunchAttributeValue, cooperative) == 0);
static_assert(sizeof(abi::TensorMap) == sizeof(CUtensorMap));
static_assert(abi::kLaunchClusterDimension == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
static_assert(abi::kLaunchCooperative == CU_LAUNCH_ATTRIBUTE_COOPERATIVE);
static_assert(abi::kLaunchProgrammaticStream == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);
static_assert(abi::kMaxDynamicSharedBytes == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
static_assert(abi::kStreamIsCapturing == CU_STREAM_CAPTURE_STATUS_ACTIVE);
static_assert(sizeof(abi::LtHeuristicResult) == sizeof(cublasLtMatmulHeuristicResult_t));
static_assert(offsetof(abi::LtHeuristicResult, workspace_bytes) == offsetof(cublasLtMatmulHeuristicResult_t, workspaceSize));
static_assert(offsetof(abi::LtHeuristicResult, state) == offsetof(cublasLtMatmulHeuristicResult_t, state));
static_assert(offsetof(abi::LtHeuristicResult, waves) == offsetof(cublasLtMatmulHeuristicResult_t, wavesCount));
static_assert(abi::kLayoutBatchCount == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT);
static_assert(abi::kLayoutBatchStride == CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET);
static_assert(abi::kDescriptorBias == CUBLASLT_MATMUL_DESC_BIAS_POINTER);
static_assert(abi::kDescriptorAux == CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER);
%s
"""


def _headers() -> Path | None:
    from_wheel = libraries.find("cublasLt")
    places = [Path("/usr/local/cuda/include"), *([Path(from_wheel.path).parents[1] / "include"] if from_wheel else [])]
    return next((p for p in places if all((p / name).exists() for name in ("cuda.h", "cublasLt.h"))), None)


def test_the_declarations_are_those_of_cudas_headers(tmp_path):
    from epigemm.engines.cublaslt.descriptors import ATTRIBUTES

    headers, compiler = _headers(), shutil.which("c++") or shutil.which("g++")
    if headers is None or compiler is None:
        pytest.skip("CUDA's headers are not here")
    names = {
        "aux_ld": "EPILOGUE_AUX_LD",
        "aux_pointer": "EPILOGUE_AUX_POINTER",
        "aux_batch_stride": "EPILOGUE_AUX_BATCH_STRIDE",
        "aux_data_type": "EPILOGUE_AUX_DATA_TYPE",
        "aux_scale_pointer": "EPILOGUE_AUX_SCALE_POINTER",
        "aux_amax_pointer": "EPILOGUE_AUX_AMAX_POINTER",
        "fast_accumulation": "FAST_ACCUM",
    }
    lines = [
        f"static_assert({number} == CUBLASLT_MATMUL_DESC_{names.get(name, name.upper())});" for name, (number, _) in ATTRIBUTES.items()
    ]
    source = tmp_path / "probe.cpp"
    source.write_text(_PROBE % "\n".join(lines))
    command = [compiler, "-std=c++17", "-fsyntax-only", f"-I{headers}", f"-I{headers / 'cccl'}", f"-I{ROOT / 'src/native'}", str(source)]
    run = subprocess.run(command, capture_output=True, text=True)
    if "fatal error" in run.stderr:
        pytest.skip(f"CUDA's headers are not whole: {run.stderr.partition('fatal error:')[2].strip().splitlines()[0]}")
    assert run.returncode == 0, run.stderr
