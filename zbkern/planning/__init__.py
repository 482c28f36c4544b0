"""Planning, without torch: costs, the simulation of a schedule, the search for one, pictures, and `zbkern plan`."""
