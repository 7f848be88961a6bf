"""HTTP in, HTTP out: OpenAI's wire format in front of the engine."""
