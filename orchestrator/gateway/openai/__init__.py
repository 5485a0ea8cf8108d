"""OpenAI's API: requests read, answers written, errors, tools, OpenAPI document."""
