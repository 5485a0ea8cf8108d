"""The rules that a spec must satisfy."""
