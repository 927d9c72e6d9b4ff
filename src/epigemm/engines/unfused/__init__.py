"""The engine that does not fuse: cuBLASLt's plain product, then one generated kernel over D."""
