"""How many replicas each model gets: demand, forecast, queueing model, schedules, autoscaler. Pure."""
