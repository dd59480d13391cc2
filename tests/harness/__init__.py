"""What tests and benchmarks that start processes share: the processes, their batches, and faults around them."""
