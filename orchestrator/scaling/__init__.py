"""Autoscaling: demand reports, forecasts, the queueing model, schedules and the autoscaler. Pure."""
