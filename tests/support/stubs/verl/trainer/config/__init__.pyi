class CheckpointConfig:
    save_contents: list[str]
    load_contents: list[str]
