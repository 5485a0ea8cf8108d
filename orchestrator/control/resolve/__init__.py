"""From a spec's file to the configurations of replicas: checkpoints, engines, revisions and rollbacks."""
