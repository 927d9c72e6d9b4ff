"""What decides whether an engine is right: cases, an independent float64 reference, checks, and planted errors that they catch."""
