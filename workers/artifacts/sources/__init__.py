"""Where models come from: S3 and the Hugging Face hub."""
