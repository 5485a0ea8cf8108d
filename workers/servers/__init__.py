"""Servers as engines: a replica that runs vLLM, or another server of OpenAI's API, on its cores."""
