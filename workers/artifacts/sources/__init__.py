"""Model sources: S3 and the Hugging Face Hub."""
