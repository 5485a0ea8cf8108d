"""OpenAI's API: reading requests, writing answers, errors, tool calls, the OpenAPI document."""
