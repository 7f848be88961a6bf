"""The networks: target decoders and drafters, as pure functions of their tensors. Imports nothing else of the project."""
