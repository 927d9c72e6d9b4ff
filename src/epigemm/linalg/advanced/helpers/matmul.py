"""Block scales and packed 4-bit floats, under the peer's path; they live in `epigemm.quantization`."""

from __future__ import annotations

from epigemm.quantization import (
    BlockScalingFormat,
    apply_mxfp8_scale,
    create_mxfp8_scale,
    expand_block_scale,
    get_block_scale_offset,
    get_mxfp8_scale_offset,
    invert_mxfp8_scale,
    quantize_to_fp4,
    to_block_scale,
    unpack_fp4,
)

__all__ = [
    "BlockScalingFormat",
    "apply_mxfp8_scale",
    "create_mxfp8_scale",
    "expand_block_scale",
    "get_block_scale_offset",
    "get_mxfp8_scale_offset",
    "invert_mxfp8_scale",
    "quantize_to_fp4",
    "to_block_scale",
    "unpack_fp4",
]
