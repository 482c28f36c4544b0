"""What a model costs on a GPU, computed from its configuration and a table of hardware."""
