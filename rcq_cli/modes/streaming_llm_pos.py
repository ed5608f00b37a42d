"""Attention sinks and a recent window at their positions inside the cache. Source: arXiv:2309.17453.

Slot s of the cache counts as position s and the query as the last of them, as in the paper; `streaming-llm`
keeps true positions. A rotary score depends on the distance of key and query alone, and what was evicted is
one gap behind the sinks. So all distances are those of the paper once the sinks are moved up by that gap:
four keys a step are turned, from the keys as they came, and no rounding piles up.
"""

from typing import Any

import torch
from torch import Tensor

from rcq_cli.cache.rotary import moved
from rcq_cli.errors import SpecError
from rcq_cli.modes.streaming_llm import Options, StreamingLayer, StreamingLlm
from rcq_cli.protocols import Geometry, Needs


class StreamingPositionsLayer(StreamingLayer):
    """One layer under `streaming-llm-pos`."""

    def keys_to_read(self) -> Tensor:
        """Return the keys `[Hkv, held, D]` at the distances that their slots have from the last slot."""
        keys, start, gap = self.keys.rows, self.options.start, self.tokens - self.held
        if not gap or not start:
            return keys
        sinks = moved(keys[:, :start], self._rotation(), torch.tensor(gap))
        placed = torch.cat((sinks, keys[:, start:]), 1)
        self.scratch_bytes = max(self.scratch_bytes, placed.nbytes)
        return placed

    def _rotation(self) -> Any:
        rotation = self.geometry.rotation
        if rotation is None:
            raise SpecError(
                "streaming-llm-pos has keys to move and was not told how positions turn them",
                fix="give LayerCache a rotation=rcq_cli.protocols.Rotation(...), or use streaming-llm",
                id="RCQ-USE-33",
            )
        return rotation


class StreamingLlmPos(StreamingLlm):
    """Sinks and a window, renumbered."""

    name = "streaming-llm-pos"
    summary = "keeps the first tokens and a recent window, at positions inside the cache as in the paper"

    def needs(self, options: Any) -> Needs:
        """Return the rotation of keys, and the end of the prompt, of which a budget may be a share."""
        del options
        return Needs(rotation=True)

    def open(self, geometry: Geometry, options: Options, backend: Any) -> StreamingPositionsLayer:
        """Make the empty cache of one layer."""
        return StreamingPositionsLayer(geometry, options, backend)


MODE = StreamingLlmPos()
