"""What plans, and needs no torch: the model of costs, the simulator, the planner, pictures, and the command."""
