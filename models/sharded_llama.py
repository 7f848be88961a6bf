"""A target whose layers and LM head are shared by several processes, one a GPU: tensor parallelism.

Rank 0 has the target that engine and drafter see, ``LeadingLlama``; what it does with its part each ``Follower`` does with its own
when it is ordered to. Embedding and LM head stand whole on rank 0, as drafters use both without asking anybody; the target's logits
are computed by all, each for its stretch of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from models.attention import AttentionPlan, additive
from models.config import DecoderConfig
from models.digest import WeightSample, sample_places
from models.kv_cache import BlockPool, KVCache, KVWindow, heads_of
from models.layers import DecoderLayer, Linear
from models.llama import Llama
from models.loader import empty, fill, optimize_for_inference, target_config
from models.orders import Orders, gathered
from models.published_layer import check_head, ends, layer_state, take
from models.sharded_cache import LeadingCache
from models.sharding import Layout, Part, ShardedTensors, layout_of, own_places, sharded, vocabulary_part


class SummedLinear(Linear):
    """A Linear of which each rank has some inputs: the sum over ranks is what the whole one gives. A bias is rank 0's."""

    def forward(self, x: Tensor) -> Tensor:
        """x [n, in/ranks] -> [n, out]."""
        out = super().forward(x)
        dist.all_reduce(out)
        return out


def _share(model: Llama) -> None:
    """Have the ends of each layer's attention and MLP summed over ranks."""
    for layer in model.layers:
        assert isinstance(layer, DecoderLayer)
        for module, name in ((layer, "output"), (layer.mlp, "down")):
            alone: Linear = getattr(module, name)
            out_features, in_features = alone.weight.shape
            setattr(module, name, SummedLinear(in_features, out_features, bias=alone.bias is not None))


class LeadingLlama(Llama):
    """Rank 0's part of a target of sizes ``config``; where ``orders`` go is set once all ranks have theirs."""

    orders: Orders

    def __init__(self, config: DecoderConfig, size: int) -> None:
        super().__init__(sharded(config, size))
        self.config = config
        self._part = Part(0, size)
        _share(self)

    def new_cache(self, num_slots: int, scratch: int, length: int) -> KVCache:
        """As in Llama: a cache on every rank for its own KV heads."""
        c = self.config
        self.rotary.reserve(length + scratch, self.norm.weight)
        sizes = c.num_layers, num_slots, scratch, length, c.num_kv_heads // self._part.size, c.head_dim
        with self.orders.order("new_cache", num_slots, scratch, length, confirmed=True):
            return LeadingCache(self.orders, *sizes, dtype=self.dtype, device=self.device)

    def run_layers(
        self,
        hidden: Tensor,
        plan: AttentionPlan,
        cache: KVCache | KVWindow,
        *,
        first_layer: int,
        outputs: list[Tensor] | None = None,
    ) -> Tensor:
        """As in Llama, by all ranks together."""
        # The mask is sent as truths, and each row once instead of once for each query head of a KV head.
        seen = plan.mask[:, 0, :: self.config.groups] == 0
        place = first_layer, plan.first_slot, plan.batch, plan.rows
        with self.orders.order("run_layers", *place, tensors=(plan.positions, plan.write, hidden, seen)):
            return super().run_layers(hidden, plan, cache, first_layer=first_layer, outputs=outputs)

    def logits(self, hidden: Tensor) -> Tensor:
        """As in Llama, each rank for its stretch of the vocabulary."""
        with self.orders.order("logits", tensors=(hidden,)):
            own = self.lm_head.part(hidden, slice(vocabulary_part(self.config.vocab_size, self._part.size)))
            return torch.cat(gathered(own), dim=-1)[:, : self.config.vocab_size]

    def release_layers(self, end: int) -> None:
        """As in Llama; the others make theirs ready for inference, too."""
        with self.orders.order("settle", confirmed=True):
            super().release_layers(end)

    def weight_samples(self) -> Iterator[WeightSample]:
        """As ``digest.weight_samples`` of the same target in one process."""
        for name, tensor in sorted(self.state_dict().items()):
            layout = layout_of(name, self.config)
            shape = tuple(tensor.shape)
            if layout is not None:
                shape = tuple(n * self._part.size if dim == layout.dim else n for dim, n in enumerate(shape))
                with self.orders.order("sample", name, shape):
                    numbers = _shared_samples(tensor, layout, shape, self._part)
            else:
                flat = tensor.detach().flatten()
                numbers = flat[:: sample_places(len(flat)).step]
            yield WeightSample(name, shape, numbers)


def _shared_samples(tensor: Tensor, layout: Layout, shape: tuple[int, ...], part: Part) -> Tensor:
    """Numbers at ``sample_places`` of a whole weight of ``shape``, each from the rank that has it."""
    places = torch.tensor(sample_places(torch.Size(shape).numel()))
    own, local = (each.to(tensor.device) for each in own_places(places, layout.shape(shape), layout.dim + layout.axis, part))
    there = tensor.detach().flatten()[local]
    numbers = torch.where(own, there, there.new_zeros(()))
    dist.all_reduce(numbers)
    return numbers


class Follower:
    """What a rank behind the first does when it is told to; each method is the one of its name there, for this rank's part."""

    cache: KVCache
    pool: BlockPool

    def __init__(self, network: Llama, config: DecoderConfig, part: Part) -> None:
        self.network, self._config, self._part = network, config, part

    def new_cache(self, num_slots: int, scratch: int, length: int) -> None:
        """A cache for the KV heads that are this rank's."""
        self.cache = self.network.new_cache(num_slots, scratch, length)

    def resize(self, num_slots: int) -> None:
        """See KVCache."""
        self.cache.resize(num_slots)

    def move_rows(self, source: Tensor, destination: Tensor) -> None:
        """See KVCache."""
        self.cache.move_rows(source, destination)

    def move_listed_rows(self, source: Sequence[int], destination: Sequence[int]) -> None:
        """See KVCache."""
        self.cache.move_listed_rows(source, destination)

    def move_slot(self, source: int, destination: int, length: int) -> None:
        """See KVCache."""
        self.cache.move_slot(source, destination, length)

    def gather(self, rows: Tensor) -> None:
        """See KVCache."""
        gathered(self.cache.gather(rows))

    def new_pool(self, num_blocks: int, size: int) -> None:
        """See KVCache."""
        self.pool = self.cache.new_pool(num_blocks, size)

    def store(self, slot: int, places: Sequence[int], blocks: Sequence[int]) -> None:
        """See BlockPool."""
        self.pool.store(slot, places, blocks)

    def load(self, blocks: Sequence[int], slot: int) -> None:
        """See BlockPool."""
        self.pool.load(blocks, slot)

    def read(self, blocks: Sequence[int]) -> None:
        """See BlockPool."""
        gathered(self.pool.read(blocks))

    def write(self, blocks: Sequence[int], whole: Tensor) -> None:
        """See BlockPool; ``whole`` [blocks, L, size, row] has the heads of all ranks."""
        heads = self._part.of(self._config.num_kv_heads)
        self.pool.write(blocks, heads_of(whole, heads, self._config.num_kv_heads, self._config.head_dim).unbind())

    def run_layers(
        self,
        first_layer: int,
        first_slot: int,
        batch: int,
        rows: int,
        positions: Tensor,
        write: Tensor,
        hidden: Tensor,
        seen: Tensor,
    ) -> None:
        """See Llama; the plan comes in pieces, its mask as truths [batch, rows, span]."""
        mask = additive(seen.repeat_interleave(self._config.groups, dim=1).unsqueeze(1), self.network.dtype)
        plan = AttentionPlan(first_slot, batch, rows, positions, write, mask)
        self.network.run_layers(hidden, plan, self.cache, first_layer=first_layer)

    def logits(self, hidden: Tensor) -> None:
        """See Llama."""
        gathered(self.network.logits(hidden))

    def settle(self) -> None:
        """Make the weights ready for inference."""
        optimize_for_inference(self.network)
        self.network.release_layers(self._config.num_layers)

    def sample(self, name: str, shape: tuple[int, ...]) -> None:
        """Take part in ``LeadingLlama.weight_samples``."""
        layout = layout_of(name, self._config)
        assert layout is not None
        _shared_samples(self.network.get_parameter(name), layout, shape, self._part)


def load_leading(folder: Path, size: int, *, dtype: torch.dtype, device: torch.device) -> LeadingLlama:
    """Rank 0's part of a checkpoint; raises CheckpointError."""
    config = target_config(folder)
    model = empty(lambda: LeadingLlama(config, size), dtype, device)
    if config.tie_word_embeddings:
        model.tie_embeddings()  # each has memory of its own
    tensors = ShardedTensors(folder, Part(0, size))
    try:
        check_head(tensors, config, folder)
        for ours, theirs in ends(config).items():
            module, _, name = ours.rpartition(".")
            fill(model.get_submodule(module), [{name: take(tensors, theirs)}], folder)
        _fill_layers(model, tensors, folder)
    finally:
        tensors.close()
    return model.eval().requires_grad_(False)


def load_follower(folder: Path, part: Part, *, dtype: torch.dtype, device: torch.device) -> Follower:
    """Another rank's part: layers, the last norm, and a stretch of the LM head; raises CheckpointError."""
    config = target_config(folder)
    rows = vocabulary_part(config.vocab_size, part.size)

    def make() -> Llama:
        model = Llama(replace(sharded(config, part.size), tie_word_embeddings=False))
        _share(model)
        model.lm_head = Linear(config.hidden_size, rows)
        del model.embedding
        return model

    model = empty(make, dtype, device)
    tensors = ShardedTensors(folder, part)
    try:
        names = ends(config)
        fill(model.norm, [{"weight": take(tensors, names["norm.weight"])}], folder)
        if names["lm_head.weight"] not in tensors:
            take(tensors, names["lm_head.weight"])
        head = tensors.rows(names["lm_head.weight"], part.of_vocabulary(config.vocab_size))
        fill(model.lm_head, [{"weight": nn.functional.pad(head, (0, 0, 0, rows - len(head)))}], folder)
        _fill_layers(model, tensors, folder)
    finally:
        tensors.close()
    return Follower(model.eval().requires_grad_(False), config, part)


def _fill_layers(model: Llama, tensors: ShardedTensors, folder: Path) -> None:
    """A layer at a time: no more than one is there twice."""
    for index, layer in enumerate(model.borrowed(0)):
        fill(layer, [layer_state(tensors, f"model.layers.{index}.", layer)], folder)
