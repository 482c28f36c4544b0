"""The commands `zbkern plan` and `zbkern play`."""
