"""Tools: what callers offer, how models call them, and calls read out of generated text."""
