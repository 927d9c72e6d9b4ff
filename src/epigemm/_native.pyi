"""The compiled core (src/native): CUDA libraries opened at run time, and launches that do only what changes from call to call.

Addresses, streams and handles are integers. A status other than success raises what `epigemm.engines.cuda.libraries` makes of it.
"""

from __future__ import annotations

# ---------------------------------------------------------------- driver

def open_driver(path: str) -> None: ...
def driver_path() -> str: ...
def driver_version() -> int: ...
def device_count() -> int: ...
def device_name(device: int) -> str: ...
def device_attribute(device: int, attribute: int) -> int: ...
def device_total_bytes(device: int) -> int: ...
def device_memory(device: int) -> tuple[int, int]:
    """(free, total) bytes."""

def is_capturing(device: int, stream: int) -> bool: ...
def allocate(device: int, bytes: int, stream: int = 0) -> int:
    """The address of new device memory, in the order of the stream."""

def free(device: int, address: int, stream: int = 0) -> None: ...
def copy(device: int, to: int, from_: int, bytes: int, stream: int = 0) -> None:
    """Copies between host and device or within the device, whichever the addresses are, in the order of the stream."""

def fill(device: int, to: int, value: int, bytes: int, stream: int = 0) -> None: ...
def synchronize(device: int, stream: int = 0) -> None: ...
def create_stream(device: int) -> int: ...
def destroy_stream(device: int, stream: int) -> None: ...
def kept_workspace_bytes() -> int:
    """Bytes of the workspaces that are kept for streams."""

def kept_workspaces() -> int: ...
def release_workspaces() -> int:
    """Frees every kept workspace that no launch holds, after the work of its device; the number of bytes."""

class Event:
    """A point in a stream's work, with its time."""

    def __init__(self, device: int) -> None: ...
    def record(self, stream: int = 0) -> None: ...
    def synchronize(self) -> None: ...
    def elapsed_ms(self, start: Event) -> float: ...

# ---------------------------------------------------------------- kernels

class KernelLibrary:
    """A loaded cubin, fatbin or PTX, for every device."""

    def __init__(self, code: bytes) -> None: ...
    def attribute(self, name: str, attribute: int, device: int = 0) -> int:
        """A CUfunction_attribute of the kernel `name`."""

    def blocks_per_multiprocessor(self, name: str, device: int, threads: int, shared_bytes: int = 0) -> int: ...

class Slot:
    """One parameter of a kernel: fixed, taken from the call's values, a tensor map over one of them, or the workspace."""

    @staticmethod
    def fixed(value: bytes) -> Slot: ...
    @staticmethod
    def value(index: int, size: int = 8) -> Slot:
        """The low `size` bytes of the call's value `index`: an address, or the bits of a scalar."""

    @staticmethod
    def workspace(offset: int = 0) -> Slot:
        """The address of the launch's workspace, `offset` bytes on."""

    @staticmethod
    def tensor_map(
        index: int,
        type: int,
        extents: list[int],
        strides_bytes: list[int],
        box: list[int],
        swizzle: int = 0,
        interleave: int = 0,
        l2_promotion: int = 2,
        fill: int = 0,
    ) -> Slot:
        """A CUtensorMap over the address `index`, encoded once an address; the fastest extent first, its stride left out."""

    def at(self, offset: int) -> Slot:
        """The same, `offset` bytes into the struct that is the kernel's only parameter: see `block_bytes`."""

class KernelLaunch:
    """A kernel with its argument block; any thread may run it, on any stream of its device."""

    def __init__(
        self,
        library: KernelLibrary,
        name: str,
        device: int,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        slots: list[Slot],
        shared_bytes: int = 0,
        cluster: tuple[int, int, int] = (1, 1, 1),
        cooperative: bool = False,
        overlaps_previous: bool = False,
        workspace_bytes: int = 0,
        zeroed_bytes: int = 0,
        block_bytes: int = 0,
    ) -> None:
        """`zeroed_bytes` at the workspace's start are set to 0 before each launch.

        With `block_bytes` the kernel has one parameter, a struct of so many bytes, whose fields the slots are, each `at` its offset;
        what no slot names is 0.
        """

    def run(self, stream: int, *values: int) -> None: ...
    @property
    def value_count(self) -> int: ...
    @property
    def workspace_bytes(self) -> int: ...
    @property
    def cached_tensor_maps(self) -> int: ...

# ---------------------------------------------------------------- cuBLASLt

_Attributes = list[tuple[int, bytes]]
_Layout = tuple[int, int, int, int, int, int]
_Heuristic = tuple[bytes, int, int, float]

def open_cublaslt(path: str) -> None: ...
def cublaslt_path() -> str: ...
def cublaslt_version() -> int: ...
def algorithm_ids(device: int, types: tuple[int, int, int, int, int, int], limit: int) -> list[int]: ...
def algorithm_init(device: int, types: tuple[int, int, int, int, int, int], id: int) -> bytes: ...
def algorithm_capability(algorithm: bytes, attribute: int, size: int) -> bytes:
    """A capability's value; size 0 asks the library how long it is."""

def algorithm_config(algorithm: bytes, attribute: int, size: int) -> bytes: ...
def algorithm_with(algorithm: bytes, attribute: int, value: bytes) -> bytes: ...

class Scalars:
    """alpha and beta as they lie in memory in a scale type."""

    def __init__(self, scale_type: int, alpha: complex, beta: complex) -> None: ...
    def raw(self) -> tuple[bytes, bytes]: ...

class LtMatmul:
    """A descriptor and the layouts of A, B, C and D, as (type, rows, columns, leading dimension, batch count, batch stride)."""

    def __init__(self, compute_type: int, scale_type: int, attributes: _Attributes, layouts: list[_Layout]) -> None: ...
    def heuristic(
        self, device: int, preference: _Attributes, limit: int, pointers: list[tuple[int, int]] = [], handle: int = 0
    ) -> list[_Heuristic]:
        """(algorithm, workspace bytes, status, waves) of each that can run."""

    def check(self, device: int, algorithm: bytes, handle: int = 0) -> _Heuristic: ...
    def attribute(self, number: int, size: int) -> bytes: ...
    def layout_attribute(self, which: int, number: int, size: int) -> bytes: ...

class LtLaunch:
    """A planned product: a call changes pointers and launches. Any thread may run it, on any stream of its device."""

    def __init__(
        self,
        matmul: LtMatmul,
        device: int,
        algorithm: bytes,
        workspace_bytes: int,
        scalars: Scalars,
        swapped: bool = False,
        c_is_d: bool = True,
        has_bias: bool = False,
        has_aux: bool = False,
        zeroed_aux_bytes: int = 0,
        handle: int = 0,
        what: str = "",
    ) -> None: ...
    def run(
        self, a: int, b: int, c: int, d: int, bias: int, aux: int, stream: int, scalars: Scalars | None = None, workspace: int = 0
    ) -> None: ...
    def run_with(
        self,
        pointers: list[tuple[int, int]],
        a: int,
        b: int,
        c: int,
        d: int,
        stream: int,
        scalars: Scalars | None = None,
        workspace: int = 0,
    ) -> None: ...
    @property
    def workspace_bytes(self) -> int: ...
    @property
    def device(self) -> int: ...
