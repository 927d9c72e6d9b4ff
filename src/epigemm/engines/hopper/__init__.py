"""The engine for SM90: our own CUDA C++ kernel, whose epilogue hides behind its products."""
