#!/usr/bin/env python3
"""Writes a copy of a GGUF model with only its first layers: cut_model.py MODEL.gguf LAYERS OUT.gguf

`make check-docs` runs the pages' commands on it: the real tokenizer and real weights, in seconds.
"""

import struct
import sys

SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
STRING, ARRAY = 8, 9


class Reader:
    """A cursor over the bytes of a GGUF file (little endian, version 3)."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, form: str) -> tuple:
        values = struct.unpack_from("<" + form, self.data, self.at)
        self.at += struct.calcsize("<" + form)
        return values

    def string(self) -> str:
        (size,) = self.take("Q")
        self.at += size
        return self.data[self.at - size : self.at].decode()

    def skip_value(self, kind: int) -> None:
        if kind == STRING:
            self.string()
        elif kind == ARRAY:
            inner, count = self.take("IQ")
            for _ in range(count):
                self.skip_value(inner)
        else:
            self.at += SIZES[kind]


def layer_of(name: str) -> int:
    """Returns the layer of a tensor, or -1 if it belongs to none."""
    return int(name.split(".")[1]) if name.startswith("blk.") else -1


def aligned(size: int, alignment: int) -> int:
    return (size + alignment - 1) // alignment * alignment


def main() -> None:
    source, layers, target = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    with open(source, "rb") as file:
        reader = Reader(file.read())
    magic, version, n_tensors, n_pairs = reader.take("4sIQQ")
    if magic != b"GGUF" or version != 3:
        sys.exit(f"{source}: a GGUF file of version 3 was expected, this is {magic!r}, {version}")
    alignment, pairs = 32, b""
    for _ in range(n_pairs):
        start = reader.at
        key = reader.string()
        (kind,) = reader.take("I")
        value = reader.at
        reader.skip_value(kind)
        if key == "general.alignment":
            (alignment,) = struct.unpack_from("<I", reader.data, value)
        pair = reader.data[start : reader.at]
        if key.endswith(".block_count"):
            pair = pair[: value - start] + struct.pack("<I", layers)
        pairs += pair
    tensors = []
    for _ in range(n_tensors):
        name = reader.string()
        (n_dims,) = reader.take("I")
        shape = reader.take(f"{n_dims}Q")
        tensors.append((name, shape, *reader.take("IQ")))
    data = aligned(reader.at, alignment)
    ends = sorted(offset for *_, offset in tensors) + [len(reader.data) - data]
    infos, blobs = b"", b""
    kept = [t for t in tensors if layer_of(t[0]) < layers]
    for name, shape, kind, offset in kept:
        end = next(e for e in ends if e > offset)
        coded = name.encode()
        infos += struct.pack(
            f"<Q{len(coded)}sI{len(shape)}QIQ", len(coded), coded, len(shape), *shape, kind, len(blobs)
        )
        blob = reader.data[data + offset : data + end]
        blobs += blob + bytes(aligned(len(blob), alignment) - len(blob))
    head = struct.pack("<4sIQQ", magic, version, len(kept), n_pairs) + pairs + infos
    with open(target, "wb") as file:
        file.write(head + bytes(aligned(len(head), alignment) - len(head)) + blobs)


main()
