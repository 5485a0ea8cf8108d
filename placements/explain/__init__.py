"""Why a model is placed as it is, what would help, and plans as text."""
