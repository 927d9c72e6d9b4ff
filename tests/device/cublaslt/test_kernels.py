"""Kernels of our own through the compiled core: arguments, workspace, tensor maps, attributes."""

from __future__ import annotations

import struct
import threading

import pytest

from epigemm import errors
from epigemm.engines.cuda import libraries

torch = pytest.importorskip("torch")

PTX = b"""
.version 8.0
.target sm_80
.address_size 64
// out[i] = x[i] * scale + offset; counter[0] += 1 by each thread
.visible .entry scale_add(.param .u64 out, .param .u64 x, .param .f32 scale, .param .f32 offset, .param .u64 counter)
{
  .reg .u64 %o, %p, %c, %i64;
  .reg .u32 %t, %b, %n, %i, %old;
  .reg .f32 %s, %f, %v;
  ld.param.u64 %o, [out];
  ld.param.u64 %p, [x];
  ld.param.u64 %c, [counter];
  ld.param.f32 %s, [scale];
  ld.param.f32 %f, [offset];
  mov.u32 %t, %tid.x;
  mov.u32 %b, %ctaid.x;
  mov.u32 %n, %ntid.x;
  mad.lo.u32 %i, %b, %n, %t;
  mul.wide.u32 %i64, %i, 4;
  add.u64 %p, %p, %i64;
  add.u64 %o, %o, %i64;
  ld.global.f32 %v, [%p];
  fma.rn.f32 %v, %v, %s, %f;
  st.global.f32 [%o], %v;
  atom.global.add.u32 %old, [%c], 1;
  ret;
}
.visible .entry count_out(.param .u64 out, .param .u64 counter)
{
  .reg .u64 %o, %c;
  .reg .u32 %v;
  ld.param.u64 %o, [out];
  ld.param.u64 %c, [counter];
  ld.global.u32 %v, [%c];
  add.u32 %v, %v, 1;
  st.global.u32 [%o], %v;
  st.global.u32 [%c], %v;
  ret;
}
.visible .entry takes_map(.param .align 64 .b8 map[128])
{
  ret;
}
"""


@pytest.fixture(scope="module")
def core():
    return libraries.open_driver()


def _bits(value: float) -> int:
    return struct.unpack("I", struct.pack("f", value))[0]


def test_values_constants_and_streams(core):
    slot = core.Slot
    library = core.KernelLibrary(PTX + b"\0")
    slots = [slot.value(0), slot.value(1), slot.value(2, 4), slot.fixed(struct.pack("f", 0.5)), slot.workspace()]
    launch = core.KernelLaunch(library, "scale_add", 0, (4, 1, 1), (64, 1, 1), slots, workspace_bytes=1024, zeroed_bytes=4)
    assert launch.value_count == 3
    x, out = torch.randn(256, device="cuda"), torch.empty(256, device="cuda")
    torch.cuda.synchronize()
    for factor in (2.0, -3.0):
        launch.run(torch.cuda.current_stream().cuda_stream, out.data_ptr(), x.data_ptr(), _bits(factor))
        torch.cuda.synchronize()
        torch.testing.assert_close(out, x * factor + 0.5)
    with pytest.raises(ValueError, match="scale_add takes 3 values, not 1"):
        launch.run(0, 1)
    assert library.attribute("scale_add", 4) > 0  # registers
    assert library.blocks_per_multiprocessor("scale_add", 0, 64) > 0


def test_the_workspace_is_zeroed_before_each_launch_also_in_a_graph(core):
    slot = core.Slot
    library = core.KernelLibrary(PTX + b"\0")
    launch = core.KernelLaunch(
        library, "count_out", 0, (1, 1, 1), (1, 1, 1), [slot.value(0), slot.workspace(16)], workspace_bytes=64, zeroed_bytes=32
    )
    out = torch.zeros(1, device="cuda", dtype=torch.int32)
    torch.cuda.synchronize()
    for _ in range(3):
        launch.run(torch.cuda.current_stream().cuda_stream, out.data_ptr())
        torch.cuda.synchronize()
        assert int(out) == 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch.run(torch.cuda.current_stream().cuda_stream, out.data_ptr())
    out.zero_()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert int(out) == 1


def test_tensor_maps_are_encoded_once_an_address(core):
    library = core.KernelLibrary(PTX + b"\0")
    spec = core.Slot.tensor_map(0, 9, [64, 128], [128], [64, 64], swizzle=3)  # bfloat16, 128-byte swizzle
    launch = core.KernelLaunch(library, "takes_map", 0, (1, 1, 1), (1, 1, 1), [spec])
    tensors = [torch.empty((128, 64), device="cuda", dtype=torch.bfloat16) for _ in range(80)]
    for tensor in tensors[:3] * 2:
        launch.run(0, tensor.data_ptr())
    assert launch.cached_tensor_maps == 3
    for tensor in tensors:
        launch.run(0, tensor.data_ptr())
    torch.cuda.synchronize()
    assert launch.cached_tensor_maps == 64
    with pytest.raises(errors.LibraryError, match=r"CUDA_ERROR_INVALID_VALUE[\s\S]*cuTensorMapEncodeTiled for takes_map, parameter 0"):
        launch.run(0, tensors[0].data_ptr() + 2)


def test_from_another_thread(core):
    library = core.KernelLibrary(PTX + b"\0")
    launch = core.KernelLaunch(
        library, "count_out", 0, (1, 1, 1), (1, 1, 1), [core.Slot.value(0), core.Slot.workspace()], workspace_bytes=64, zeroed_bytes=4
    )
    out = torch.zeros(1, device="cuda", dtype=torch.int32)
    torch.cuda.synchronize()
    worker = threading.Thread(target=lambda: launch.run(0, out.data_ptr()))
    worker.start()
    worker.join()
    torch.cuda.synchronize()
    assert int(out) == 1


def test_errors_name_the_kernel(core):
    with pytest.raises(errors.LibraryError, match=r"cuLibraryGetKernel for nothing"):
        core.KernelLibrary(PTX + b"\0").attribute("nothing", 4)
    with pytest.raises(errors.LibraryError):
        core.KernelLibrary(b"not a cubin, nor PTX, by any reading of it\0").attribute("nothing", 4)


def test_memory_copies_and_events(core):
    import numpy as np

    x = np.arange(1000, dtype=np.float32)
    y = np.zeros_like(x)
    stream = core.create_stream(0)
    start, end = core.Event(0), core.Event(0)
    address = core.allocate(0, x.nbytes, stream)
    start.record(stream)
    core.copy(0, address, x.ctypes.data, x.nbytes, stream)
    core.copy(0, y.ctypes.data, address, x.nbytes, stream)
    end.record(stream)
    core.free(0, address, stream)
    core.synchronize(0, stream)
    core.destroy_stream(0, stream)
    np.testing.assert_array_equal(x, y)
    assert 0 < end.elapsed_ms(start) < 1000
    assert core.device_memory(0)[1] <= core.device_total_bytes(0)
