"""The peer's enums, each member numerically equal to CUDA's and cuBLASLt's, so that values travel between the libraries.

Source: the enum tables of NVIDIA's cuBLAS manual and of CUDA's `library_types.h`.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag


class CudaDataType(IntEnum):
    """`cudaDataType`: how the element types of operands, results and scales are named in options.

    Example:
        >>> CudaDataType.CUDA_R_16BF.value
        14
    """

    CUDA_R_16F = 2
    CUDA_C_16F = 6
    CUDA_R_16BF = 14
    CUDA_C_16BF = 15
    CUDA_R_32F = 0
    CUDA_C_32F = 4
    CUDA_R_64F = 1
    CUDA_C_64F = 5
    CUDA_R_4I = 16
    CUDA_C_4I = 17
    CUDA_R_4U = 18
    CUDA_C_4U = 19
    CUDA_R_8I = 3
    CUDA_C_8I = 7
    CUDA_R_8U = 8
    CUDA_C_8U = 9
    CUDA_R_16I = 20
    CUDA_C_16I = 21
    CUDA_R_16U = 22
    CUDA_C_16U = 23
    CUDA_R_32I = 10
    CUDA_C_32I = 11
    CUDA_R_32U = 12
    CUDA_C_32U = 13
    CUDA_R_64I = 24
    CUDA_C_64I = 25
    CUDA_R_64U = 26
    CUDA_C_64U = 27
    CUDA_R_8F_E4M3 = 28
    CUDA_R_8F_UE4M3 = 28  # an alias in CUDA too: the sign bit of a scale is ignored
    CUDA_R_8F_E5M2 = 29
    CUDA_R_8F_UE8M0 = 30
    CUDA_R_6F_E2M3 = 31
    CUDA_R_6F_E3M2 = 32
    CUDA_R_4F_E2M1 = 33


class MatmulComputeType(IntEnum):
    """`cublasComputeType_t`: in which arithmetic products are formed and summed."""

    COMPUTE_16F = 64
    COMPUTE_16F_PEDANTIC = 65
    COMPUTE_32F = 68
    COMPUTE_32F_PEDANTIC = 69
    COMPUTE_32F_FAST_16F = 74
    COMPUTE_32F_FAST_16BF = 75
    COMPUTE_32F_FAST_TF32 = 77
    COMPUTE_32F_EMULATED_16BFX9 = 78
    COMPUTE_64F = 70
    COMPUTE_64F_PEDANTIC = 71
    COMPUTE_64F_EMULATED_FIXEDPOINT = 79
    COMPUTE_32I = 72
    COMPUTE_32I_PEDANTIC = 73


class MatmulEpilog(IntEnum):
    """`cublasLtEpilogue_t`: the predefined epilogs. `DEFAULT` (no epilog) is refused in use: leave `epilog` out instead.

    The values are made of bits: 2 RELU, 4 BIAS, 8 DRELU, 16 BGRAD, 32 GELU, 64 DGELU, 128 AUX, 256 BGRADA, 512 BGRADB.
    """

    DEFAULT = 1
    RELU = 2
    RELU_AUX = 130
    BIAS = 4
    RELU_BIAS = 6
    RELU_AUX_BIAS = 134
    DRELU = 136
    DRELU_BGRAD = 152
    GELU = 32
    GELU_AUX = 160
    GELU_BIAS = 36
    GELU_AUX_BIAS = 164
    DGELU = 192
    DGELU_BGRAD = 208
    BGRADA = 256
    BGRADB = 512


class MatmulInnerShape(IntEnum):
    """`cublasLtMatmulInnerShape_t`: the shape of one matrix instruction."""

    UNDEFINED = 0
    MMA884 = 1
    MMA1684 = 2
    MMA1688 = 3
    MMA16816 = 4


class MatmulReductionScheme(IntEnum):
    """`cublasLtReductionScheme_t`: where split-K partial sums meet. Values are bits, so a mask is their sum."""

    NONE = 0
    INPLACE = 1
    COMPUTE_TYPE = 2
    OUTPUT_TYPE = 4
    MASK = 7


class MatmulNumericalImplFlags(IntFlag):
    """`cublasLtNumericalImplFlags_t`: which instructions, accumulators and input types an algorithm may use."""

    OP_TYPE_FMA = 1 << 0
    OP_TYPE_TENSOR_HMMA = 1 << 1
    OP_TYPE_TENSOR_IMMA = 1 << 2
    OP_TYPE_TENSOR_DMMA = 1 << 3
    OP_TYPE_TENSOR_MASK = 0xFE
    OP_TYPE_MASK = 0xFF
    ACCUMULATOR_16F = 1 << 8
    ACCUMULATOR_32F = 2 << 8
    ACCUMULATOR_64F = 4 << 8
    ACCUMULATOR_32I = 8 << 8
    ACCUMULATOR_TYPE_MASK = 0xFF << 8
    INPUT_TYPE_16F = 1 << 16
    INPUT_TYPE_16BF = 2 << 16
    INPUT_TYPE_TF32 = 4 << 16
    INPUT_TYPE_32F = 8 << 16
    INPUT_TYPE_64F = 0x10 << 16
    INPUT_TYPE_8I = 0x20 << 16
    INPUT_TYPE_8F_E4M3 = 0x40 << 16
    INPUT_TYPE_8F_E5M2 = 0x80 << 16
    INPUT_TYPE_MASK = 0xFF << 16
    GAUSSIAN = 1 << 32
    ALL = (1 << 64) - 1


class MatmulMatrixScale(IntEnum):
    """`cublasLtMatmulMatrixScale_t`: how the scales of an 8- or 4-bit operand are laid out."""

    SCALAR_32F = 0
    VEC16_UE4M3 = 1
    VEC32_UE8M0 = 2
    OUTER_VEC_32F = 3
    VEC128_32F = 4
    BLK128x128_32F = 5
    PER_BATCH_SCALAR_32F = 6


class Order(IntEnum):
    """`cublasLtOrder_t`, the two plain orders: `COL` (columns contiguous) and `ROW` (rows contiguous)."""

    COL = 0
    ROW = 1
