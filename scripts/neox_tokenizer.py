#!/usr/bin/env python3
"""Makes tests/data/neox-tokenizer: a small tokenizer put together as that of OLMoE and GPT-NeoX is, and ids by transformers.

    neox_tokenizer.py TEXT

What matters is the order of its parts, not its vocabulary: NFC, the byte-level split of GPT-2 without a blank in front, byte-level
BPE, runs of blanks as added tokens that are no special ones, and special tokens that nothing is put before or after.
TEXT is what the merges are learned from: any English text of a few hundred kilobytes.
"""
import json
import pathlib
import sys

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

HERE = pathlib.Path(__file__).parent.parent / "tests/data/neox-tokenizer"
SPECIAL = ["|||IP_ADDRESS|||", "<|padding|>"]
TEXTS = {
    "plain": "Once upon a time there was a king, who had three sons.",
    "blanks": "if x:\n    return  y\n\n\n\t\tz   ",
    "long blanks": "a" + " " * 30 + "b" + " " * 24 + "\n",
    "digits": "In 1,024 days 3.14159 and 0x7f; it's 'tis, we'LL, they've",
    "composed": "caf\u00e9 \u00fcber na\u00efve \u212b",
    "decomposed": "cafe\u0301 u\u0308ber nai\u0308ve A\u030a",
    "other scripts": "\u4f60\u597d\uff0c\u4e16\u754c \u041f\u0440\u0438\u0432\u0435\u0442 \u0645\u0631\u062d\u0628\u0627 \U0001f98a\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "special in the text": "a<|endoftext|>b |||EMAIL_ADDRESS||| <|padding|>c",
    "half a special": "<|endoftext and <|padding|",
    "control": "\x00\x01\x7f\u00ad\ufeff\u2028end",
    "empty": "",
}


def main():
    text = pathlib.Path(sys.argv[1]).read_text(encoding="utf-8")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True)
    tokenizer.decoder = decoders.ByteLevel(add_prefix_space=False, trim_offsets=True)
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    # As there: runs of blanks, longest first, then the rest of the special tokens.
    tokenizer.add_tokens([AddedToken(" " * count, normalized=True, special=False) for count in range(24, 1, -1)])
    late = ["<|endoftext|>", "|||EMAIL_ADDRESS|||", "|||PHONE_NUMBER|||"]
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in late])
    HERE.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(HERE / "tokenizer.json"), pretty=False)

    reference = PreTrainedTokenizerFast(tokenizer_file=str(HERE / "tokenizer.json"), eos_token="<|endoftext|>", pad_token="<|padding|>")
    texts = {}
    for name, value in TEXTS.items():
        ids = reference(value)["input_ids"]
        texts[name] = {"text": value, "ids": ids, "decoded": reference.decode(ids, clean_up_tokenization_spaces=False)}
    special = sorted(reference.all_special_ids + [i for i, t in reference.added_tokens_decoder.items() if t.special])
    record = {"vocab": len(reference), "special": sorted(set(special)), "texts": texts}
    (HERE / "ids.json").write_text(json.dumps(record, ensure_ascii=True, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
