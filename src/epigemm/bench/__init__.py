"""Benchmarks: what is measured (`suites`), against what (`baselines`), how (`measure`, `memory`), and how it is written down (`stamp`)."""
