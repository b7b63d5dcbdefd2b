#!/usr/bin/env python3
"""A tiny random OLMoE model that has what the published ones leave out.

    tiny_olmoe.py --tokenizer FILE --out DIR

Two query heads share a key-value head, queries, keys and values are clamped (at a bound that some of them pass), the
chosen experts' weights are normalized, the head is the embedding, and weights are F16.  Its reference vectors are made
by golden.py.  Needs torch, transformers 5.24.0.
"""
import argparse
import os
import shutil

import torch
from transformers import OlmoeConfig, OlmoeForCausalLM


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--tokenizer", required=True)
    p.add_argument("--out", required=True)
    a = p.parse_args()
    torch.manual_seed(7)
    config = OlmoeConfig(vocab_size=272, hidden_size=32, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
                         num_key_value_heads=2, clip_qkv=1.5, num_experts=6, num_experts_per_tok=3, norm_topk_prob=True,
                         tie_word_embeddings=True, max_position_embeddings=256, rms_norm_eps=1e-3, eos_token_id=256,
                         pad_token_id=256, bos_token_id=None,
                         rope_parameters={"rope_type": "default", "rope_theta": 50000.0})
    model = OlmoeForCausalLM(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(1 + 0.2 * torch.randn_like(p) if p.dim() == 1 else torch.randn_like(p) * (1.2 / p.shape[-1] ** 0.5))
    os.makedirs(a.out, exist_ok=True)
    model.to(torch.float16).save_pretrained(a.out)
    os.chmod(f"{a.out}/model.safetensors", 0o644)
    shutil.copy(a.tokenizer, f"{a.out}/tokenizer.json")


if __name__ == "__main__":
    main()
