"""The web console: a page that the controller serves beside the admin API, and what only that page reads."""
