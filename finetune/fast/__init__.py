"""The hot path's own code; each file is usable and testable alone."""
