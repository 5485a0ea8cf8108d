"""Any server of OpenAI's API, by its command."""
