"""What outlives a request: conversations that callers go on with."""
