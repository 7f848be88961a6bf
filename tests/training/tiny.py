"""The sizes of a target so small that drafters for it are made in no time."""

from models.config import DecoderConfig
from models.rope import RopeConfig

TARGET = DecoderConfig(
    architecture="llama",
    vocab_size=64,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    rms_norm_eps=1e-5,
    max_position_embeddings=64,
    rope=RopeConfig(),
)
