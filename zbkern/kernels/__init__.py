"""Raw launches: the contract (`spec`), its plain-torch twin (`reference`), and who runs what (`dispatch`)."""
