"""A network trained on handwritten digits through fused products, beside the same network trained step by step.

`digits` is the data, `network` the arithmetic both ways, `training` the runs and what is measured of them, `show` and `plot` what one sees.
"""
