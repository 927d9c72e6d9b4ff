"""The CPU engine: see `engine.py`."""
