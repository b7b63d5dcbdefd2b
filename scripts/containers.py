#!/usr/bin/env python3
"""Containers in the layout that people already have on their disks, from the tiny model, and what their weights mean.

    containers.py matrices OUT.safetensors   one small matrix of every format, with its values and a product
    containers.py model    OUT_DIR           the tiny model with every format somewhere in it

Written with numpy and struct alone, so that the engine is compared with numbers that none of its code has made:

- `matrices` holds for each case `CASE.weight` and `CASE.weight.qs` as a container stores them (NVFP4 as modelopt does),
  `CASE.decoded` (F32, each value times its scale, rounded once), `CASE.x` (F32) and `CASE.product` (F64, decoded times x).
- `model` writes decoded.json beside the shards: for each matrix its format and FNV-1a over the 32-bit words of its values.

The layout is that of published containers: shards `out-*`, the MTP layer in `out-mtp-*`, the indexer's weights in
`out-idx-*`; in each shard tensors of wider types first and then by name; headers padded to 8 bytes; a weight is U8 with one
dimension, and its scales are F32 with one dimension under `<name>.qs`.  Beside them lies what converters leave behind.
"""
import argparse
import json
import os
import shutil
import struct

import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
TINY = os.path.join(HERE, "..", "tests", "data", "tiny-glm-moe-dsa")
SIZES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "U8": 1}


# Files.


def read_shard(path):
    """Name -> (dtype, shape, bytes)."""
    with open(path, "rb") as file:
        data = file.read()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        tensors[name] = (entry["dtype"], entry["shape"], data[8 + length + begin : 8 + length + end])
    return tensors


def write_shard(path, tensors, metadata=None):
    """Wider types first, then by name as a string; the header is padded to 8 bytes and nothing else is."""
    order = sorted(tensors, key=lambda name: (-SIZES[tensors[name][0]], name))
    header, at = {}, 0
    if metadata:
        header["__metadata__"] = metadata
    for name in order:
        dtype, shape, data = tensors[name]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            file.write(tensors[name][2])


def floats_of(dtype, shape, data):
    if dtype == "F32":
        values = np.frombuffer(data, "<f4")
    elif dtype == "BF16":
        values = (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    else:
        raise SystemExit(f"no values of {dtype}")
    return values.reshape(shape).astype(np.float32)


# Formats.  Each encoder gives (bytes, scales); each decoder gives values from those alone.


def scales_of(weights, group, limit):
    """One for each run of `group` columns of each row."""
    rows, cols = weights.shape
    groups = -(-cols // group)
    padded = np.zeros((rows, groups * group), np.float32)
    padded[:, :cols] = weights
    most = np.abs(padded.reshape(rows, groups, group)).max(axis=2)
    return np.maximum(most / np.float32(limit), np.float32(1e-8)).astype(np.float32)


def spread(scales, group, cols):
    return np.repeat(scales, group, axis=1)[:, :cols]


def levels_of(weights, scales, group, limit):
    steps = np.rint(weights / spread(scales, group, weights.shape[1]))
    return np.clip(steps, -limit - 1, limit).astype(np.int64)


def pack(fields, bits):
    """Fields of a row, several to a byte, the first lowest."""
    per_byte = 8 // bits
    rows, cols = fields.shape
    padded = np.zeros((rows, -(-cols // per_byte) * per_byte), np.uint8)
    padded[:, :cols] = fields
    padded = padded.reshape(rows, -1, per_byte)
    return np.bitwise_or.reduce(padded << (bits * np.arange(per_byte, dtype=np.uint8)), axis=2).astype(np.uint8)


def unpack(data, bits, cols):
    per_byte = 8 // bits
    fields = (data[:, :, None] >> (bits * np.arange(per_byte, dtype=np.uint8))) & ((1 << bits) - 1)
    return fields.reshape(data.shape[0], -1)[:, :cols].astype(np.int64)


def encode_integer(bits, group):
    def encode(weights):
        limit, width = 2 ** (bits - 1) - 1, group or weights.shape[1]
        scales = scales_of(weights, width, limit)
        levels = levels_of(weights, scales, width, limit)
        if bits == 8:
            return levels.astype(np.int8).tobytes(), scales
        return pack((levels + limit + 1).astype(np.uint8), bits).tobytes(), scales

    return encode


def decode_integer(bits, group):
    def decode(data, scales, rows, cols):
        scale = spread(np.frombuffer(scales, "<f4").reshape(rows, -1), group or cols, cols)
        stored = np.frombuffer(data, np.uint8).reshape(rows, -1)
        levels = stored.view(np.int8) if bits == 8 else unpack(stored, bits, cols) - 2 ** (bits - 1)
        return levels.astype(np.float32) * scale

    return decode


def encode_int3(weights):
    rows, cols = weights.shape
    groups = -(-cols // 64)
    scales = scales_of(weights, 64, 3)
    fields = np.full((rows, groups * 64), 4, np.uint8)
    fields[:, :cols] = levels_of(weights, scales, 64, 3) + 4
    fields = fields.reshape(rows * groups, 64)
    return np.concatenate([pack(fields & 3, 2), pack(fields >> 2, 1)], axis=1).tobytes(), scales


def decode_int3(data, scales, rows, cols):
    groups = -(-cols // 64)
    stored = np.frombuffer(data, np.uint8).reshape(rows * groups, 24)
    fields = unpack(stored[:, :16], 2, 64) + 4 * unpack(stored[:, 16:], 1, 64)
    levels = fields.reshape(rows, groups * 64)[:, :cols] - 4
    return levels.astype(np.float32) * spread(np.frombuffer(scales, "<f4").reshape(rows, groups), 64, cols)


def e4m3_values():
    """What each byte means: 4 bits of exponent with bias 7, 3 of mantissa, no infinities."""
    byte = np.arange(256)
    exponent, mantissa = byte >> 3 & 15, byte & 7
    value = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    value[(byte & 0x7F) == 0x7F] = np.nan
    return np.where(byte & 0x80, -value, value).astype(np.float32)


def nearest_e4m3(values):
    table = e4m3_values()
    table[np.isnan(table)] = np.inf
    return np.abs(values.reshape(-1, 1) - table.reshape(1, -1)).argmin(axis=1).astype(np.uint8).reshape(values.shape)


def blocks_to_elements(scales, rows, cols):
    return np.repeat(np.repeat(scales, 128, axis=0), 128, axis=1)[:rows, :cols]


def encode_fp8(weights):
    rows, cols = weights.shape
    down, across = -(-rows // 128), -(-cols // 128)
    padded = np.zeros((down * 128, across * 128), np.float32)
    padded[:rows, :cols] = np.abs(weights)
    scales = (padded.reshape(down, 128, across, 128).max(axis=(1, 3)) / np.float32(448)).astype(np.float32)
    return nearest_e4m3(weights / blocks_to_elements(scales, rows, cols)).tobytes(), scales


def decode_fp8(data, scales, rows, cols):
    scales = np.frombuffer(scales, "<f4").reshape(-(-rows // 128), -(-cols // 128))
    values = e4m3_values()[np.frombuffer(data, np.uint8)].reshape(rows, cols)
    return values * blocks_to_elements(scales, rows, cols)


GROUPS = [16, 32, 48, 64, 96, 128, 192, 256]
FORMATS = {
    "int8": (encode_integer(8, None), decode_integer(8, None)),
    "int4": (encode_integer(4, None), decode_integer(4, None)),
    "int2": (encode_integer(2, None), decode_integer(2, None)),
    "int3-g64": (encode_int3, decode_int3),
    "fp8-b128": (encode_fp8, decode_fp8),
    **{f"int4-g{group}": (encode_integer(4, group), decode_integer(4, group)) for group in GROUPS},
}
STAMPS = {"int8": "int8-row", "int4": "int4-row", "int2": "int2-row", "int3-g64": "int3-g64", "fp8-b128": "fp8-e4m3-b128"}


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def encode_nvfp4(weights):
    """(codes, E4M3 scales, factor): the largest of a run of 16 becomes 6, the largest scale 448."""
    rows, cols = weights.shape
    runs = -(-cols // 16)
    padded = np.zeros((rows, runs * 16), np.float32)
    padded[:, :cols] = weights
    most = np.abs(padded.reshape(rows, runs, 16)).max(axis=2)
    factor = np.float32(most.max() / (6 * 448))
    scales = nearest_e4m3(most / 6 / factor)
    step = spread(e4m3_values()[scales] * factor, 16, cols)
    nearest = np.abs(np.abs(weights / step)[:, :, None] - E2M1).argmin(axis=2)
    return pack((nearest + 8 * (weights < 0)).astype(np.uint8), 4), scales, factor


def decode_nvfp4(codes, scales, factor, cols):
    """Value times the scale of its run, which the factor is applied to first."""
    codes = unpack(codes, 4, cols)
    values = np.where(codes & 8, -E2M1[codes & 7], E2M1[codes & 7])
    return values * spread(e4m3_values()[scales] * factor, 16, cols)


def nvfp4(name, weights):
    """The three tensors of a weight as modelopt names them, and the values that they mean."""
    codes, scales, factor = encode_nvfp4(weights)
    tensors = {
        name: ("U8", list(codes.shape), codes.tobytes()),
        f"{name}_scale": ("F8_E4M3", list(scales.shape), scales.tobytes()),
        f"{name}_scale_2": ("F32", [], factor.astype("<f4").tobytes()),
    }
    return tensors, decode_nvfp4(codes, scales, factor, weights.shape[1])


def stored(name, weights, format):
    """The two tensors of a weight, and the values that they mean."""
    encode, decode = FORMATS[format]
    data, scales = encode(weights)
    scales = scales.astype("<f4").tobytes()
    tensors = {name: ("U8", [len(data)], data), f"{name}.qs": ("F32", [len(scales) // 4], scales)}
    return tensors, decode(data, scales, *weights.shape)


# What is written.


def matrices(out):
    rng = np.random.default_rng(20261130)
    tensors = {}
    for format in [*FORMATS, "nvfp4"]:
        # Two blocks of FP8 down, and columns that leave a part of every group, byte and chunk; no two groups are as many.
        rows, cols = (130, 131) if format == "fp8-b128" else (2, 779)
        weights = rng.standard_normal((rows, cols)).astype(np.float32) * np.float32(0.05)
        x = rng.standard_normal(cols).astype(np.float32)
        name = f"{format}.weight"
        weight, decoded = nvfp4(name, weights) if format == "nvfp4" else stored(name, weights, format)
        tensors.update(weight)
        tensors[f"{format}.decoded"] = ("F32", [rows, cols], decoded.astype("<f4").tobytes())
        tensors[f"{format}.x"] = ("F32", [cols], x.astype("<f4").tobytes())
        product = decoded.astype(np.float64) @ x.astype(np.float64)
        tensors[f"{format}.product"] = ("F64", [rows], product.astype("<f8").tobytes())
    write_shard(out, tensors)


def format_of(name):
    """Which format a matrix of the tiny model gets; None where it stays F32.  Every format is somewhere."""
    if not name.endswith(".weight") or "norm" in name or name.endswith("mlp.gate.weight"):
        return None
    layer = int(name.split(".")[2]) if name.startswith("model.layers.") else None
    if layer is None or ".indexer." in name:
        return "int8"
    if layer == 5:
        if ".experts." not in name:
            return "int8"
        # The variants of a mixed MTP layer: whole experts, and parts of one, are narrower than the rest.
        expert = int(name.split(".experts.")[1].split(".")[0])
        return "int4" if expert in (1, 4) or (expert == 6 and "down_proj" in name) else "int8"
    if ".experts." in name:
        return {1: "int4", 2: "int3-g64", 3: "int4-g16", 4: "int2"}[layer]
    if layer == 0:
        return "fp8-b128"
    return "int4-g32" if "self_attn" in name and "kv_b_proj" not in name else "int4"


def shard_of(name, number, count):
    if ".indexer." in name:
        return "out-idx-00000.safetensors"
    if name.startswith("model.layers.5."):
        return f"out-mtp-0000{number * 3 // count}.safetensors"
    # Four shards, whose borders fall inside experts.
    return f"out-0000{(number + 20) * 4 // (count + 20)}.safetensors"


def model(out):
    source = read_shard(os.path.join(TINY, "model.safetensors"))
    os.makedirs(out, exist_ok=True)
    shards, stamps, decoded = {}, {}, {}
    for part in (True, False):
        names = sorted(name for name in source if name.startswith("model.layers.5.") == part)
        for number, name in enumerate(names):
            tensor = source[name]
            values, format = floats_of(*tensor), format_of(name)
            shard = shard_of(name, number, len(names))
            if format is None:
                tensors = {name: ("F32", tensor[1], values.astype("<f4").tobytes())}
            else:
                tensors, values = stored(name, values, format)
                decoded[name] = {"format": format, "shape": tensor[1], "fnv1a": f"{fnv1a(values):016x}"}
                # A matrix of one block of FP8 has as many scales as one of one row: only the stamp tells.
                if format == "fp8-b128":
                    stamps.setdefault(shard, {})[name] = STAMPS[format]
            shards.setdefault(shard, {}).update(tensors)
    for shard, tensors in shards.items():
        metadata = {"colibri.fmt": json.dumps(stamps[shard], sort_keys=True)} if shard in stamps else None
        write_shard(os.path.join(out, shard), tensors, metadata)
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(os.path.join(TINY, name), os.path.join(out, name))
    with open(os.path.join(out, "decoded.json"), "w") as file:
        json.dump(decoded, file, indent=0, sort_keys=True)
        file.write("\n")
    side_files(out)


def side_files(out):
    """What the converter and the other engine leave in a directory, and the index of the checkpoint it was made from."""
    for name, text in {
        ".out-progress.json": '{"done": ["out-00000"]}',
        ".out-params.json": '{"ebits": 4}',
        ".convert.lock": "",
        ".coli_usage": "not for us",
        "model.safetensors.index.json": json.dumps(
            {"metadata": {}, "weight_map": {"lm_head.weight": "model-00141-of-00141.safetensors"}}
        ),
    }.items():
        with open(os.path.join(out, name), "w") as file:
            file.write(text)
    for name in ("_meta", "_inflight"):
        os.makedirs(os.path.join(out, name), exist_ok=True)
        with open(os.path.join(out, name, "out-00000.safetensors"), "wb") as file:
            file.write(b"half a shard")


def fnv1a(values):
    hash = 0xCBF29CE484222325
    for word in values.astype("<f4").reshape(-1).view("<u4").tolist():
        hash = ((hash ^ word) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return hash


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["matrices", "model"])
    parser.add_argument("out")
    args = parser.parse_args()
    {"matrices": matrices, "model": model}[args.what](args.out)


if __name__ == "__main__":
    main()
