"""Values that the processes of a fleet exchange: settings, routes, status, and reports of gateways."""
