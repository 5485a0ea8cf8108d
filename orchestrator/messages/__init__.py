"""Values that the processes of a fleet exchange: settings, routes, status, and the places and key usage of gateways."""
