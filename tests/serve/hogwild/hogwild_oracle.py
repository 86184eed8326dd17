"""What concurrent workers should get, from scratch: no cache, no blocks, no rotation by parts.

Every token was computed over a text: its view when it was put down. Here each is computed again
over that text from its first layer on, with the keys that the text's other tokens have, rotated
to their places in it.
"""

from __future__ import annotations

import torch

from shoal.model.rope import tables_at


class Recorder:
    """Wraps the forward pass of an engine; remembers every token with the text that it saw."""

    def __init__(self, engine):
        self._forward = engine.forward
        self.nodes = []  # (token, numbers of the nodes of its text, itself last)
        self.logits = []  # (node, scores behind it)
        self._of = {}  # slot -> node
        engine.forward = self

    def __call__(self, feeds):
        logits = self._forward(feeds)
        store = self._forward._store
        fresh = []
        for feed in feeds:
            own = feed.view.own
            first = len(own) - len(feed.tokens)
            for place in range(first, len(own)):
                self._of[int(store.slots[own.number, place])] = len(self.nodes) + len(fresh)
                fresh.append((own, place, feed.view))
        for own, place, view in fresh:
            text = [
                self._of[int(slot)]
                for block in view.blocks
                for slot in store.slots[block.number, : place + 1 if block is own else len(block)]
            ]
            self.nodes.append((own.tokens[place], text))
        last = len(self.nodes) - len(fresh) - 1
        row = 0
        for feed in feeds:
            last += len(feed.tokens)
            if feed.yields:
                self.logits.append((last, logits[row].clone()))
                row += 1
        return logits


def from_scratch(model, nodes):
    """Scores behind every node [nodes, V]."""
    with torch.no_grad():
        x = model.embed(torch.tensor([token for token, _ in nodes]))
        for block in model.blocks:
            attention = block.attention
            heads, kv_heads = attention.num_heads, attention.num_kv_heads
            normed = block.attention_norm(x)
            qkv = attention.qkv_proj(normed).view(len(nodes), -1, attention.head_dim)
            seen = []
            for number, (_, text) in enumerate(nodes):
                assert text[-1] == number
                place = torch.arange(len(text))
                cos, sin = tables_at(place, *model.unstretched, x.dtype)
                q, k, v = attention.rotated(qkv[text].reshape(1, len(text), -1), cos, sin)
                k, v = (y[0].repeat_interleave(heads // kv_heads, 1) for y in (k, v))
                scores = torch.einsum("hd,shd->hs", q[0, -1], k) * attention.head_dim**-0.5
                seen.append(torch.einsum("hs,shd->hd", scores.softmax(-1), v).reshape(-1))
            x = x + attention.o_proj(torch.stack(seen))
            x = x + block.mlp(block.mlp_norm(x))
        return model.logits(model.norm(x))
