"""What the GPU engines share: C++ from expressions, the run-time compiler with its store, and the pointwise kernel."""
