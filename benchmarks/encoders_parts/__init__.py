"""Parts of benchmarks.encoders."""
