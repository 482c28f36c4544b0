from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel's module is imported
