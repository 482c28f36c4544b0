"""How tensors travel between ranks: torch.distributed, or threads of one process."""
