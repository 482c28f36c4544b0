"""Running a schedule: the engine, its stages, and what they share with other ranks."""
