"""How many replicas, how much Redis and how many cores so many sessions need, worked out from what each costs."""
