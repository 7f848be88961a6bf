"""Replicas: do they add up, keep chats where they are known, and lose nothing when they die or are replaced."""
