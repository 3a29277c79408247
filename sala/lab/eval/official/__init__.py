"""Published long-context benchmarks: their cases, made here or read from their data, and their metrics."""
