"""The CPU engine: stock transformers models with static slots."""
