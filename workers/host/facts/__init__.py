"""What a host is made of, as its tools and its kernel tell: read with deadlines, and never by raising."""
