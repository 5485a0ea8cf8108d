"""The rules that judge a spec."""
