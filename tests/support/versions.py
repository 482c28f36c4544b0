"""Which torch is here."""

from __future__ import annotations

import torch

OLD_TORCH = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10)
