"""An engine on compiled graphs."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from models.compiled import DYNAMIC, Graph, decoder_graph, without_compiler
from models.graph_runner import load_graph, load_long_graph, load_runner, of_dense
from models.kv_cache import KVCache
from models.llama import Llama, of_all_rows
from models.tiled_decoder import TiledLayers, suits, suits_head, suits_whole, tiled_decoder, tiled_head
from models.tiles import instructions
from speculative.batch import TreeLayout, layout_operator, layout_suits
from speculative.config import EngineConfig
from speculative.drafters.independent import IndependentDrafter
from speculative.drafters.moa import MoADrafter
from speculative.drafters.moa_graphs import drafter_graphs, use_compiled
from speculative.drafters.wrapper import innermost
from speculative.engine import Engine
from speculative.errors import EngineLoadError
from speculative.packages import CompileCacheError, Recipe, compiles_graphs, packages
from speculative.sampling import argmax
from speculative.tiled_verification import TiledVerification


class _Head(nn.Module):
    """Logits and the best token of each row."""

    def __init__(self, target: Llama) -> None:
        super().__init__()
        self.head = target.lm_head

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        logits: Tensor = self.head(hidden)
        return logits, argmax(logits)


def compile_engine(engine: Engine, config: EngineConfig) -> None:
    """Let an engine run on compiled graphs; raises EngineLoadError when compilation fails.

    After a CompileCacheError the engine is of no use, but one that is loaded without compilation would be.
    """
    # Graphs are tuned for a number of threads, which something else in this process may have set.
    slots = engine.cache.num_slots  # which a limit to memory may have made fewer
    config = dataclasses.replace(config, num_threads=torch.get_num_threads(), max_num_seqs=slots, memory_limit=None)
    drafter = _compiled_drafter(engine, config)
    paths, runner = packages(_graphs(engine, drafter), Recipe(__name__, engine_graphs.__name__, dataclasses.asdict(config)))
    target = engine.target
    try:
        load_runner(runner)
        # Prompts are read in one call that takes tens of milliseconds: other threads go on meanwhile.
        decoder = load_long_graph(paths.pop("decoder")) if "decoder" in paths else None
        loaded = {name: load_graph(package) for name, package in paths.items()}
    except (OSError, RuntimeError) as error:
        # They are as they were made: the folder may allow no execution, or what they were linked with is another by now.
        raise CompileCacheError(
            f"cannot load what was compiled into {runner.parent}: {error} (deleted, it is compiled anew)"
        ) from error
    target.compiled = of_all_rows(decoder) if decoder is not None else tiled_decoder(target, released=own_layers(engine))
    head = None if "head" in loaded else tiled_head(target)
    layout = None if "layout" in loaded else layout_operator(engine.cache, target.config.groups)
    engine.compiled = {"head": loaded.pop("head") if head is None else of_dense(head.run)}
    if layout is None:
        engine.compiled["layout"] = loaded.pop("layout")
    else:
        engine.compiled |= dict.fromkeys(("layout", "root_layout"), of_dense(layout.run))
    taps_suit = engine.taps in ((), (target.config.num_layers,))
    if isinstance(target.compiled, TiledLayers) and head is not None and layout is not None and taps_suit:
        layers = target.compiled.operator
        engine.tree_pass = TiledVerification(layout, layers, head, engine.cache, taps=bool(engine.taps))
    if drafter is not None:
        use_compiled(drafter, loaded)
    elif isinstance(other := innermost(engine.drafter), IndependentDrafter) and suits_whole(other.model):
        other.use_operators()


def means(engine: Engine) -> str:
    """What a loaded engine's target is computed by, in words: speed goes by that."""
    if engine.target.compiled is None:
        return "PyTorch, uncompiled"
    return f"our operators ({instructions()})" if isinstance(engine.target.compiled, TiledLayers) else "compiled graphs"


def own_layers(engine: Engine) -> int:
    """How many of the target's first layers are its alone; some drafters run through the last ones."""
    drafter = innermost(engine.drafter)
    return engine.target.config.num_layers - (drafter.borrowed if isinstance(drafter, MoADrafter) else 0)


def engine_graphs(**config: Any) -> list[Graph]:
    """The graphs of the engine that an EngineConfig's fields describe."""
    from speculative.loading import load_uncompiled

    engine = load_uncompiled(EngineConfig(**config))
    return _graphs(engine, _compiled_drafter(engine, EngineConfig(**config)))


def _compiled_drafter(engine: Engine, config: EngineConfig) -> MoADrafter | None:
    """The drafter, where it is not left uncompiled: where no graph is compiled it has operators for all that it does, or none.

    Raises EngineLoadError where graphs were asked for and there is no compiler.
    """
    drafter = innermost(engine.drafter)
    if not isinstance(drafter, MoADrafter) or drafter.borrowed:
        return None
    if compiles_graphs(config.compile, engine.target) or not drafter_graphs(drafter, engine.cache):
        return drafter
    if config.compile == "on":
        raise EngineLoadError(f"--compile on: {without_compiler()}")
    return None


def _graphs(engine: Engine, drafter: MoADrafter | None) -> list[Graph]:
    target = engine.target
    graphs = [] if suits_head(target) else [_head_graph(target)]
    if not layout_suits(engine.cache):
        graphs.append(layout_graph(engine.cache, target.config.groups))
    if not suits(target):
        graphs.append(decoder_graph(target))
    if drafter is not None:
        graphs += drafter_graphs(drafter, engine.cache)
    return graphs


def _head_graph(target: Llama) -> Graph:
    hidden = torch.zeros(3, target.config.hidden_size, dtype=target.dtype)
    return Graph("head", _Head(target), (hidden,), ({0: DYNAMIC},))


def layout_graph(cache: KVCache, groups: int) -> Graph:
    """What TreeLayout computes, for any batch and trees."""
    layout, parents = TreeLayout(cache, groups), torch.tensor([[0, 1, 1], [0, 0, 1]])
    sizes = ({0: DYNAMIC, 1: DYNAMIC}, {0: DYNAMIC}, {0: DYNAMIC})
    return Graph("layout", layout, (parents, torch.tensor([7, 9]), torch.arange(64)), sizes, layout.settings)
