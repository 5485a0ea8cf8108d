"""OpenAI's Responses API: its requests become chats, and its answers are written from theirs."""
