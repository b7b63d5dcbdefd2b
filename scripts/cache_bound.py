#!/usr/bin/env python3
"""How near the optimum an eviction rule could come that knows everything but the future: a fitted bound for cache policies.

    cache_bound.py --model DIR --windows FILE.npy --text FILE [--chunks 100] [--epochs 1]

A network is fitted on chunks of FILE (text of the same kind that is in no window) to foretell, at every request, after how
many visits of its layer each expert is used next. It sees what a policy could see, and more: averages of choices and of
router scores over five times, the age, the score of the last visit, which expert it is, the guesses that the routers of
later layers make of the state at hand, and that state itself. The odd windows are then replayed; the cached expert with the
least expected discounted use gives way. Beside it stand Belady's optimum and what is gained by knowing the next requests for
certain. Needs what golden.py needs.
"""
import argparse
import json

import numpy as np
import torch
from torch.nn import functional
from transformers import AutoTokenizer

from golden import Reference, watch_indexers

EDGES = [1, 2, 4, 8, 16, 32]                            # visits until the next use, in classes
VISITS = np.array([1, 2, 3.5, 6.5, 12.5, 24.5, 61])     # and what a class stands for
SIZES = (10, 25, 50, 75)


@torch.no_grad()
def record(reference, chunks):
    """Experts [tokens, layers, K], the state at each routed layer, and every router's margins there [.., source, layer, E]."""
    layers = [layer for layer in reference.model.model.layers[: reference.layers] if hasattr(layer.mlp, "gate")]
    states, hooks = [], []
    for layer in layers:
        hooks.append(layer.post_attention_layernorm.register_forward_pre_hook(lambda m, a: states.append(a[0][0])))
    x, margins = [], []
    top_k = reference.model.config.num_experts_per_tok
    for chunk in chunks:
        states.clear()
        reference.model.model(torch.tensor([chunk.tolist()]), use_cache=False)
        h = torch.stack(states, 1)                      # [tokens, source, hidden]
        scores = torch.stack([functional.linear(layer.post_attention_layernorm(h), layer.mlp.gate.weight).sigmoid()
                              + layer.mlp.gate.e_score_correction_bias for layer in layers], 2)
        edge = scores.topk(top_k + 1, -1).values[..., -2:].mean(-1, keepdim=True)
        x.append((h / h.square().mean(-1, keepdim=True).sqrt()).half())
        margins.append((scores - edge).half())
    for hook in hooks:
        hook.remove()
    margins, x = torch.cat(margins).float().numpy(), torch.cat(x).numpy()
    own = margins[:, np.arange(len(layers)), np.arange(len(layers))]
    return np.argsort(-own, -1)[..., :top_k], own, margins, x


def average(values, visits):
    out, now, keep = np.empty_like(values), values[:100].mean(0), 0.5 ** (1 / visits)
    for n, value in enumerate(values):
        out[n] = now = keep * now + (1 - keep) * value
    return out


class Data:
    def __init__(self, ids, own, margins, state):
        self.ids, self.state = ids, state
        self.guess = np.clip(8 * margins, -4, 4).astype(np.float16)
        chosen = np.zeros(own.shape, np.float32)
        np.put_along_axis(chosen, ids, 1, -1)
        soft = 1 / (1 + np.exp(-np.clip(own / 0.015, -30, 30)))
        age, until = np.empty_like(own), np.empty(own.shape, np.int64)
        now, then = np.full(own.shape[1:], 50.0), np.full(own.shape[1:], 1000)
        for n in range(len(ids)):
            age[n] = now = np.where(chosen[n] > 0, 0, now + 1)
            until[-1 - n] = then
            then = np.where(chosen[-1 - n] > 0, 1, then + 1)
        features = [np.log(average(chosen, v) + 0.01) for v in (3, 10, 32, 128, 512)]
        features += [np.log(average(soft, v) + 0.01) for v in (3, 10, 32, 128)]
        features += [np.log1p(age) / 3, np.clip(8 * own, -4, 4), chosen, 8 * average(own, 2), 8 * average(own, 16)]
        self.features = np.stack(features, -1).astype(np.float16)
        self.classes = np.searchsorted(EDGES, until)

    def at(self, tokens, layer):
        """What is known of every expert, and its class, when `layer` has asked: later layers were last visited a token before."""
        count = self.ids.shape[1]
        visit = np.stack([tokens if other <= layer else np.maximum(tokens - 1, 0) for other in range(count)], 1)
        other = np.arange(count)[None]
        guess = np.where(np.arange(count)[None, :, None] > layer, self.guess[tokens, layer], 0)[..., None]
        features = np.concatenate([self.features[visit, other], guess], -1).astype(np.float32)
        flat = lambda a: torch.from_numpy(a.reshape(len(tokens), -1, *a.shape[3:]))
        return flat(features), flat(self.classes[visit, other]), torch.from_numpy(self.state[tokens, layer].astype(np.float32))


class Net(torch.nn.Module):
    def __init__(self, layers, experts, hidden, features, width=48, rank=96):
        super().__init__()
        self.experts, keys, classes = experts, layers * experts, len(VISITS)
        self.expert = torch.nn.Parameter(0.1 * torch.randn(keys, 8))
        self.way = torch.nn.Parameter(0.1 * torch.randn(layers, layers, 8))
        self.bias = torch.nn.Parameter(torch.zeros(layers, keys, classes))
        self.first, self.second, self.last = (torch.nn.Linear(a, b) for a, b in ((features + 16, width), (width, width), (width, classes)))
        self.down = torch.nn.ModuleList([torch.nn.Linear(hidden, rank) for _ in range(layers)])
        self.up = torch.nn.ModuleList([torch.nn.Linear(rank, keys * classes) for _ in range(layers)])
        for up in self.up:
            torch.nn.init.zeros_(up.weight)

    def forward(self, layer, features, state):
        of_key = torch.cat([self.expert, self.way[layer].repeat_interleave(self.experts, 0)], -1)
        x = functional.silu(self.first(torch.cat([features, of_key.expand(len(features), -1, -1)], -1)))
        x = self.last(x + functional.silu(self.second(x))) + self.bias[layer]
        seen = functional.dropout(functional.silu(self.down[layer](state)), 0.2, self.training)
        return x + self.up[layer](seen).view_as(x)


def fit(net, data, epochs, batch=256):
    layers, steps = data.ids.shape[1], epochs * (len(data.ids) // batch)
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, steps * layers)
    order = np.concatenate([np.random.default_rng(e).permutation(len(data.ids)) for e in range(epochs)])
    for step in range(steps):
        tokens = np.sort(order[step * batch:][:batch])
        for layer in range(layers):
            features, classes, state = data.at(tokens, layer)
            loss = functional.cross_entropy(net(layer, features, state).flatten(0, 1), classes.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()


@torch.no_grad()
def worths(net, data, round_counts=0.4):
    """Expected discounted use of every expert after every request: [tokens, layers, keys]."""
    net.eval()
    count = data.ids.shape[1]
    out = np.empty((len(data.ids), count, count * net.experts), np.float32)
    for layer in range(count):
        way = np.repeat([(other - layer - 1) % count + 1 for other in range(count)], net.experts)
        use = round_counts ** (VISITS - 1 + way[:, None] / count)
        for tokens in np.array_split(np.arange(len(out)), max(1, len(out) // 512)):
            features, _, state = data.at(tokens, layer)
            out[tokens, layer] = (net(layer, features, state).softmax(-1).numpy() * use).sum(-1)
    return out


def next_uses(ids, experts):
    """Requests until the next use of every expert, after every request."""
    count = ids.shape[1]
    out, then = np.empty((len(ids), count, count * experts), np.float32), np.full(count * experts, 1e9)
    for n in reversed(range(len(ids))):
        for layer in reversed(range(count)):
            out[n, layer] = then = then + 1
            then = then.copy()
            then[layer * experts + ids[n, layer]] = 0
    return out


def replay(ids, worth, experts, capacity):
    """Hit rate where the cached expert of least worth gives way."""
    cached, hits = np.zeros(worth.shape[-1], bool), 0
    for n in range(len(ids)):
        for layer in range(ids.shape[1]):
            wanted = layer * experts + ids[n, layer]
            hits += int(cached[wanted].sum())
            cached[wanted] = True
            over = int(cached.sum()) - capacity
            if over > 0:
                rank = np.where(cached, worth[n, layer], np.inf)
                rank[wanted] = np.inf
                cached[np.argpartition(rank, over - 1)[:over]] = False
    return hits / ids.size


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--windows", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--chunks", type=int, default=100)
    parser.add_argument("--epochs", type=int, default=1)
    options = parser.parse_args()
    torch.manual_seed(0)
    watch_indexers(stable=True)
    reference = Reference(options.model)
    windows = np.load(options.windows).astype(np.int64)
    text = AutoTokenizer.from_pretrained(options.model)(open(options.text).read(), add_special_tokens=False)["input_ids"]
    known = {tuple(w[i:i + 8]) for w in windows.tolist() for i in range(len(w) - 7)}
    chunks = [text[at:at + 1024] for at in range(0, len(text) - 1024, 1024)]
    chunks = [c for c in chunks if sum(tuple(c[i:i + 8]) in known for i in range(len(c) - 7)) < 8][: options.chunks]
    data, held_out = Data(*record(reference, np.array(chunks))), Data(*record(reference, windows[1::2]))
    experts, state = reference.model.config.n_routed_experts, data.state.shape[-1]
    net = Net(data.ids.shape[1], experts, state, data.features.shape[-1] + 1)
    fit(net, data, options.epochs)
    ids, uses, worth = held_out.ids, next_uses(held_out.ids, experts), worths(net, held_out)
    keys = np.arange(ids.shape[1])[None, :, None] * experts + ids
    sizes = {size: max(1, len(np.unique(keys)) * size // 100) for size in SIZES}
    rules = {"belady": -uses, "fitted": worth}
    # Certain for so many tokens, and fitted from there on.
    rules |= {f"knows {n} tokens": np.where(uses <= n * ids.shape[1], 1e6 - uses, worth) for n in (1, 2, 4, 8)}
    rates = {name: {size: round(replay(ids, rule, experts, c), 4) for size, c in sizes.items()} for name, rule in rules.items()}
    print(json.dumps({"fitted_on_tokens": len(data.ids), "hit_rates": rates}, indent=1))


main()
