"""`moaserve bench peers`: our server beside others' ways of decoding, on the same weights and prompts in one run."""
