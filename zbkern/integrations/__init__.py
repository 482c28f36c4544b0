"""zbkern inside frameworks that have an engine of their own."""
