"""The admin API: its HTTP server, and the operator's verbs behind it."""
