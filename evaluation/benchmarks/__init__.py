"""The registry of benchmarks."""
