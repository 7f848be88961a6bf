"""Client-server mode over emulated networks, beside what else could be done over them."""
