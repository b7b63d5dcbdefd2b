#!/usr/bin/env python3
"""Reference vectors for the forward pass, made by transformers (float32, eager attention) for a directory of a known family.

    golden.py verify     --model DIR --reference DIR              does transformers, unpatched, give the stored vectors?
    golden.py make       --model DIR --prompts FILE --out DIR     write vectors for the prompts of FILE that go sparse
    golden.py rounding   --model DIR --reference DIR --out DIR    how far stored logits are from those of float64
    golden.py perplexity --model DIR --windows FILE --out DIR     write the negative log likelihood of each window
    golden.py evaluate   --model DIR --windows FILE --questions FILE --out DIR
                                                                  write what `millstream eval` must find (evaluate.json)

An olmoe directory has no indexer, so its prompts never go sparse: `make` wants `--dense` for it.

FILE of `make` is a JSON object of prompt name to ids, or a reference.json.  An FP8 checkpoint is dequantized to float32
(value times the scale of its 128 x 128 block) before it is loaded.

`make`, `rounding` and `perplexity` change one thing in transformers: the indexer's topk becomes a stable sort, so that among equal
scores the lowest positions are kept.  torch.topk leaves the order of equal values open, and which of them it keeps depends
on the padded length of the row; relu makes equal scores (zero) common, so that without the change a vector would pin an
accident.  `--topk torch` leaves transformers as it is.

The MTP layer is not part of transformers' model, but it is an ordinary decoder layer: it is loaded as layer L, kept out of
the main forward, and fed with the joined and projected inputs.  `mtp_argmax[t]` is its draft of token t + 2.

Needs torch, numpy, safetensors, transformers 5.24.0.
"""
import argparse
import glob
import json
import math
import os
import sys
import tempfile

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as hf

FP8_BLOCK = 128
ALL_LOGITS_UP_TO = 64


class IndexerTopk(TorchFunctionMode):
    """Stands in for `Tensor.topk` while an indexer runs, and notes where its choice was one among equals.

    tied: query positions where the last score kept equals the first left out, in some layer
    margin: the smallest difference between those two scores where they differ
    """

    def __init__(self, stable):
        super().__init__()
        self.stable, self.tied, self.margin, self.rows = stable, set(), math.inf, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is not torch.Tensor.topk:
            return func(*args, **kwargs)
        scores, k = args[0], args[1]
        order = scores.sort(dim=-1, descending=True, stable=True)
        self.note(order.values, k)
        if self.stable:
            return torch.return_types.topk((order.values[..., :k], order.indices[..., :k]))
        return func(*args, **kwargs)

    def note(self, values, k):
        """values: [1, rows, positions], descending; causally masked ones are hugely negative"""
        if values.shape[-1] <= k:
            return
        kept, left = values[0, :, k - 1], values[0, :, k]
        sparse = left > -1e30
        self.rows += int(sparse.sum())
        gap = kept - left
        first = values.shape[-1] - values.shape[1]
        self.tied.update((first + torch.nonzero(sparse & (gap == 0))[:, 0]).tolist())
        positive = gap[sparse & (gap > 0)]
        if positive.numel():
            self.margin = min(self.margin, float(positive.min()))


def watch_indexers(stable):
    """Every indexer runs under one IndexerTopk, which is returned."""
    mode, forward = IndexerTopk(stable), hf.GlmMoeDsaIndexer.forward

    def watched(self, *args, **kwargs):
        with mode:
            return forward(self, *args, **kwargs)

    hf.GlmMoeDsaIndexer.forward = watched
    return mode


def load_tensors(model):
    tensors = {}
    for path in sorted(glob.glob(f"{model}/*.safetensors")):
        tensors.update(load_file(path))
    plain = {}
    for name, tensor in tensors.items():
        if name.endswith("weight_scale_inv"):
            continue
        scale = tensors.get(f"{name}_scale_inv")
        tensor = tensor.float()
        if scale is not None:
            rows, cols = tensor.shape
            tensor *= scale.repeat_interleave(FP8_BLOCK, 0)[:rows].repeat_interleave(FP8_BLOCK, 1)[:, :cols]
        plain[name] = tensor
    return plain


class Reference:
    """A checkpoint loaded with transformers, its MTP layer beside it."""

    def __init__(self, model):
        tensors = load_tensors(model)
        config = json.load(open(f"{model}/config.json"))
        config.pop("quantization_config", None)
        config["dtype"] = "float32"
        self.layers = config["num_hidden_layers"]
        self.top_k = config.get("index_topk", math.inf)
        prefix = f"model.layers.{self.layers}."
        self.has_mtp = prefix + "eh_proj.weight" in tensors
        if self.has_mtp:
            config["num_hidden_layers"] += 1
            config["indexer_types"] = AutoConfig.from_pretrained(model).indexer_types + ["full"]
            config["mlp_layer_types"] = AutoConfig.from_pretrained(model).mlp_layer_types + ["sparse"]
        extras = {n: tensors.pop(prefix + n) for n in ("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight")
                  if prefix + n in tensors}
        with tempfile.TemporaryDirectory() as tmp:
            json.dump(config, open(f"{tmp}/config.json", "w"))
            save_file(tensors, f"{tmp}/model.safetensors", metadata={"format": "pt"})
            self.model = AutoModelForCausalLM.from_pretrained(tmp, dtype=torch.float32, attn_implementation="eager").eval()
        # The forward runs the first num_hidden_layers layers only.
        self.model.model.config.num_hidden_layers = self.layers
        self.extras = extras

    def logits(self, ids):
        return self.model(torch.tensor([ids]), use_cache=False).logits[0]

    def greedy(self, ids, count):
        """ids, and the margin between first and second at each step; end tokens do not end it"""
        out = self.model(torch.tensor([ids]), use_cache=True)
        chosen, margins = [], []
        for _ in range(count):
            top = out.logits[0, -1].topk(2)
            chosen.append(int(top.indices[0]))
            margins.append(float(top.values[0] - top.values[1]))
            out = self.model(torch.tensor([chosen[-1:]]), use_cache=True, cache=out.cache)
        return chosen, margins

    def router(self, ids):
        """layer -> experts of every position, sorted by id, and their weights"""
        seen, hooks = {}, []
        for i, layer in enumerate(self.model.model.layers[: self.layers]):
            gate = getattr(layer.mlp, "gate", None)
            if gate is not None:
                hooks.append(gate.register_forward_hook(lambda m, a, out, i=i: seen.__setitem__(i, (out[2].clone(), out[1].clone()))))
        self.logits(ids)
        for hook in hooks:
            hook.remove()
        result = {}
        for i, (experts, weights) in seen.items():
            order = experts.sort(-1)
            weights = weights.gather(1, order.indices)
            result[str(i)] = {"experts": order.values.tolist(), "weights": [[round(float(w), 6) for w in row] for row in weights]}
        return result

    def mtp_logits(self, ids):
        """drafts of token t + 2 from the hidden state of t and token t + 1, for every t but the last"""
        main, m = self.model.model, self.model
        hidden = main(torch.tensor([ids]), use_cache=False).last_hidden_state[:, :-1]
        token = main.embed_tokens(torch.tensor([ids[1:]]))
        norm = lambda x, n: torch.nn.functional.rms_norm(x, x.shape[-1:], self.extras[n], m.config.rms_norm_eps)
        joined = torch.cat([norm(token, "enorm.weight"), norm(hidden, "hnorm.weight")], -1)
        z = torch.nn.functional.linear(joined, self.extras["eh_proj.weight"])
        count = z.shape[1]
        positions = torch.arange(count)[None]
        mask = torch.full((count, count), torch.finfo(torch.float32).min).triu(1)[None, None]
        z, _ = main.layers[self.layers](z, attention_mask=mask, position_ids=positions, position_embeddings=main.rotary_emb(z, position_ids=positions))
        return m.lm_head(norm(z, "shared_head.norm.weight"))[0]

    def vectors(self, ids, greedy, topk, router):
        """everything stored about a prompt, and its logits"""
        topk.tied, topk.margin, topk.rows = set(), math.inf, 0
        logits = self.logits(ids)
        top = logits.topk(2, -1).values
        out = {"ids": ids, "argmax": logits.argmax(-1).tolist(), "argmax_margin_min": float((top[:, 0] - top[:, 1]).min()),
               "sparse_rows": topk.rows, "tied_positions": sorted(topk.tied)}
        if topk.rows:
            out["selection_margin_min"] = topk.margin
        topk.tied = set()
        out["greedy"], margins = self.greedy(ids, greedy)
        out["greedy_tied_positions"] = sorted(p for p in topk.tied if p >= len(ids))
        out["greedy_margin_min"] = min(margins)
        out["mtp_argmax"] = self.mtp_logits(ids).argmax(-1).tolist() if self.has_mtp and len(ids) > 1 else []
        if router:
            out["router_topk"] = self.router(ids)
        return out, logits


def read_prompts(path):
    data = json.load(open(path))
    return {name: p["ids"] if isinstance(p, dict) else p for name, p in data.get("prompts", data).items()}


def made_by(topk):
    order = "indexer topk as a stable sort (equal scores: lowest position)" if topk == "stable" else "unpatched"
    return f"transformers 5.24.0, float32, eager attention, {order}; FP8 weights dequantized to float32"


def make(a):
    reference, topk = Reference(a.model), watch_indexers(a.topk == "stable")
    os.makedirs(a.out, exist_ok=True)
    prompts = {}
    for name, ids in read_prompts(a.prompts).items():
        if not a.dense and len(ids) + a.greedy <= reference.top_k:
            continue
        prompts[name], logits = reference.vectors(ids, a.greedy, topk, name == a.router)
        np.save(f"{a.out}/{name}.last_logits.npy", logits[-1].numpy())
        if len(ids) <= ALL_LOGITS_UP_TO:
            np.save(f"{a.out}/{name}.all_logits.npy", logits.numpy())
        p = prompts[name]
        print(name, len(ids), "ids,", p["sparse_rows"], "sparse rows,", len(p["tied_positions"]), "tied positions, margins: argmax",
              p["argmax_margin_min"], "greedy", p["greedy_margin_min"], "selection", p.get("selection_margin_min"))
    json.dump({"meta": {"made_by": made_by(a.topk)}, "prompts": prompts}, open(f"{a.out}/reference.json", "w"))


def verify(a):
    reference, topk = Reference(a.model), watch_indexers(a.topk == "stable")
    stored, bad = json.load(open(f"{a.reference}/reference.json"))["prompts"], 0
    for name, want in stored.items():
        got, logits = reference.vectors(want["ids"], len(want["greedy"]), topk, "router_topk" in want)
        error = np.abs(np.load(f"{a.reference}/{name}.last_logits.npy") - logits[-1].numpy()).max()
        every = f"{a.reference}/{name}.all_logits.npy"
        if os.path.exists(every):
            error = max(error, np.abs(np.load(every) - logits.numpy()).max())
        line = [f"{name}: logits differ by {error:.1e}"]
        for key in ("argmax", "greedy") + (("mtp_argmax",) if "mtp_argmax" in want else ()):
            differ = [i for i, (x, y) in enumerate(zip(got[key], want[key])) if x != y]
            line.append(f"{key} {'same' if got[key] == want[key] else f'differs at {differ[:20]}'}")
            bad += got[key] != want[key]
        if "router_topk" in want:
            same = all(got["router_topk"][i]["experts"] == w["experts"] for i, w in want["router_topk"].items())
            weights = max(np.abs(np.array(got["router_topk"][i]["weights"]) - np.array(w["weights"])).max() for i, w in want["router_topk"].items())
            line.append(f"router {'same' if same else 'DIFFERS'}, weights differ by {weights:.1e}")
            bad += not same
        bad += error > 1e-4
        line.append(f"{got['sparse_rows']} sparse rows, {len(got['tied_positions'])} tied positions")
        print("; ".join(line), flush=True)
    return 1 if bad else 0


def rounding(a):
    """how far the stored float32 logits are from transformers in float64 (router and softmax stay float32 there)"""
    reference, _ = Reference(a.model), watch_indexers(a.topk == "stable")
    reference.model.set_experts_implementation("eager")
    reference.model.double()
    stored = {name: (a.reference, p["ids"]) for name, p in json.load(open(f"{a.reference}/reference.json"))["prompts"].items()}
    for name, p in json.load(open(f"{a.out}/reference.json"))["prompts"].items():
        if p.get("tied_positions"):
            stored[name] = (a.out, p["ids"])
    off = {}
    for name, (where, ids) in stored.items():
        logits = reference.logits(ids).numpy()
        off[name] = float(np.abs(np.load(f"{where}/{name}.last_logits.npy") - logits[-1]).max())
        if os.path.exists(f"{where}/{name}.all_logits.npy"):
            off[name] = max(off[name], float(np.abs(np.load(f"{where}/{name}.all_logits.npy") - logits).max()))
        print(f"{name}: stored logits are off by {off[name]:.1e}", flush=True)
    json.dump({"made_by": "transformers 5.24.0 in float64 against the stored float32 logits", "largest_error": off},
              open(f"{a.out}/rounding.json", "w"), indent=1)


def perplexity(a):
    reference, topk = Reference(a.model), watch_indexers(a.topk == "stable")
    nll, tied, margin = [], [], []
    for window in np.load(a.windows):
        ids = window.astype(int).tolist()
        topk.tied, topk.margin = set(), math.inf
        log_p = reference.logits(ids)[:-1].log_softmax(-1)
        nll.append(-float(log_p.gather(1, torch.tensor(ids[1:])[:, None]).double().sum()))
        tied.append(len(topk.tied))
        margin.append(topk.margin)
        print(len(nll), nll[-1] / (len(ids) - 1), f"{tied[-1]} tied positions, selection margin {margin[-1]}", flush=True)
    tokens = len(nll) * (len(ids) - 1)
    os.makedirs(a.out, exist_ok=True)
    json.dump({"made_by": made_by(a.topk), "tokens": tokens, "nll_per_window": nll, "tied_positions": tied,
               "selection_margin_min": margin, "nll_per_token": sum(nll) / tokens,
               "perplexity": math.exp(sum(nll) / tokens)}, open(f"{a.out}/perplexity.json", "w"), indent=1)
    print("perplexity", math.exp(sum(nll) / tokens))


def scored(reference, ids, length, step, first, count):
    """negative log likelihoods of the scored tokens of each window, as perplexity.cpp takes them"""
    windows = []
    for i in range(count):
        window = ids[i * step : i * step + length]
        log_p = reference.logits(window)[first:-1].double().log_softmax(-1)
        windows.append((-log_p.gather(1, torch.tensor(window[first + 1 :])[:, None])[:, 0]).tolist())
    return windows


def summary(windows, **of):
    """mean and standard error of perplexity.cpp: its tokens count as independent"""
    nll, tokens, running = [x for w in windows for x in w], 0, []
    for i in range(len(windows)):
        part = [x for w in windows[: i + 1] for x in w]
        running.append(math.exp(sum(part) / len(part)))
    tokens, mean = len(nll), sum(nll) / len(nll)
    variance = sum(x * x for x in nll) / tokens - mean * mean
    return {**of, "tokens": tokens, "nll_per_window": [sum(w) for w in windows], "running": running, "nll_per_token": mean,
            "perplexity": math.exp(mean), "perplexity_error": math.sqrt(variance / (tokens - 1)) * math.exp(mean)}


def encode_pair(tokenizer, context, continuation):
    """as lm-eval has it (TemplateLM._encode_pair)"""
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)
    spaces = len(context) - len(context.rstrip())
    if spaces:
        context, continuation = context[:-spaces], context[-spaces:] + continuation
    whole, context = encode(context + continuation), encode(context)
    return context, whole[len(context):]


def choices(reference, tokenizer, questions):
    results = []
    for question in questions:
        scores = []
        for choice in question["choices"]:
            context, continuation = encode_pair(tokenizer, question["context"], " " + choice)
            ids = context + continuation
            log_p = reference.logits(ids)[len(context) - 1 : -1].double().log_softmax(-1)
            scores.append(float(log_p.gather(1, torch.tensor(continuation)[:, None]).sum()))
        by_length = [score / len(choice) for score, choice in zip(scores, question["choices"])]
        results.append({"log_likelihood": scores, "acc": float(np.argmax(scores) == question["answer"]),
                        "acc_norm": float(np.argmax(by_length) == question["answer"])})
    return {"results": results, "acc": np.mean([r["acc"] for r in results]), "acc_norm": np.mean([r["acc_norm"] for r in results])}


def evaluate(a):
    reference, _ = Reference(a.model), watch_indexers(a.topk == "stable")
    ids = np.load(a.windows).astype(int).reshape(-1).tolist()
    halves = summary(scored(reference, ids[:4096], 512, 512, 256, 8), window=512, first=256)
    # A window of 256 and a stride of 64: perplexity.cpp makes it 288 and scores the last 64, of (1024 - 288 + 63) // 64 windows.
    strided = summary(scored(reference, ids[:1024], 288, 64, 288 - 64 - 1, 12), window=288, first=223)
    questions = [json.loads(line) for line in open(a.questions, encoding="utf-8")]
    out = {"made_by": made_by(a.topk), "halves": halves, "strided": strided,
           "choices": choices(reference, AutoTokenizer.from_pretrained(a.model), questions)}
    json.dump(out, open(f"{a.out}/evaluate.json", "w"), indent=1)
    print("halves", halves["perplexity"], "strided", strided["perplexity"], "acc", out["choices"]["acc"], out["choices"]["acc_norm"])


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sub = p.add_subparsers(dest="what", required=True)
    commands = {"verify": (verify, "torch"), "make": (make, "stable"), "rounding": (rounding, "stable"),
                "perplexity": (perplexity, "stable"), "evaluate": (evaluate, "stable")}
    for name, (run, topk) in commands.items():
        s = sub.add_parser(name)
        s.set_defaults(run=run)
        s.add_argument("--model", required=True)
        s.add_argument("--topk", choices=["stable", "torch"], default=topk)
    for name in ("verify", "rounding"):
        sub.choices[name].add_argument("--reference", required=True)
    for name in ("make", "rounding", "perplexity", "evaluate"):
        sub.choices[name].add_argument("--out", required=True)
    sub.choices["make"].add_argument("--prompts", required=True)
    sub.choices["make"].add_argument("--greedy", type=int, default=48, help="tokens of the greedy continuation")
    sub.choices["make"].add_argument("--router", help="prompt whose router choices are stored")
    sub.choices["make"].add_argument("--dense", action="store_true", help="also prompts that never go sparse")
    for name in ("perplexity", "evaluate"):
        sub.choices[name].add_argument("--windows", required=True, help=".npy of ids, one window a row")
    sub.choices["evaluate"].add_argument("--questions", required=True, help="questions of `eval choices`, a JSON object a line")
    a = p.parse_args()
    torch.set_num_threads(2)
    with torch.no_grad():
        return a.run(a)


if __name__ == "__main__":
    sys.exit(main())
