"""The simulator: the planner, the router and the autoscaler on a virtual clock."""
