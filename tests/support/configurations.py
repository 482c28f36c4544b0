"""Published configurations of models, and questions about training them on H100s."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from zbkern.planning.command.question import Question
from zbkern.planning.cost_model.architecture import Architecture, load_architecture
from zbkern.planning.cost_model.hardware import load_hardware
from zbkern.planning.cost_model.job import Job
from zbkern.planning.cost_model.model_costs import Setting

CONFIGURATIONS = Path(__file__).parents[2] / "bench" / "configurations"
H100 = load_hardware("h100")


def path_of(name: str) -> str:
    return str(CONFIGURATIONS / f"{name}.json")


def of_layers(count: int, folder: Path, name: str = "llama-3-8b") -> Path:
    """The file of a configuration with so many layers: fewer fill as much of fewer GPUs, in less time."""
    path = folder / f"{name}-{count}.json"
    path.write_text(json.dumps(json.loads(Path(path_of(name)).read_text()) | {"num_hidden_layers": count}))
    return path


def model_of(name: str) -> Architecture:
    return load_architecture(path_of(name))


def setting_of(name: str, **sizes: Any) -> Setting:
    """sizes: of a Job."""
    return Setting(model_of(name), H100, Job(**sizes))


def question_of(
    name: str, stages: int, microbatches: int, asked: dict[str, Any] | None = None, **sizes: Any
) -> Question:
    """asked: what else is asked; the plan is the quick one."""
    return Question(stages, microbatches, setting=setting_of(name, **sizes), **{"effort": 0, **(asked or {})})
