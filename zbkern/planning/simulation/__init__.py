"""When the actions of a schedule run, given costs, and what each rank holds meanwhile."""
