"""What happens next in a fleet, decided from a snapshot: goal, rollout, relocation, hosts and effects. Pure."""
