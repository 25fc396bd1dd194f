"""Regenerates tests/golden/split: the tiny model's GGUF file in three parts, as the gguf package writes them.

usage: make_split.py     (needs tests/golden/requirements.txt; run `make all` first, for the tiny model)
"""
import os
import subprocess
import tempfile

import gguf

HERE = os.path.dirname(os.path.abspath(__file__))
BUILD = os.environ.get("BUILD", os.path.join(os.path.dirname(os.path.dirname(HERE)), "build"))


def copy(whole, path, tensors):
    """Writes all metadata and tensors of a reader to parts of at most `tensors` tensors."""
    g = gguf.GGUFWriter(path, "llama", split_max_tensors=tensors)
    for field in whole.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            kinds = field.types
            g.add_key_value(field.name, field.contents(), kinds[0], kinds[-1] if len(kinds) > 1 else None)
    for tensor in whole.tensors:
        g.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    g.write_header_to_file()
    g.write_kv_data_to_file()
    g.write_tensors_to_file()
    g.close()


def main():
    os.makedirs(os.path.join(HERE, "split"), exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        path = os.path.join(scratch, "tiny.gguf")
        subprocess.run([os.path.join(BUILD, "tests", "tiny_model"), "--type", "q8_0", path],
                       check=True, stdout=subprocess.DEVNULL)
        copy(gguf.GGUFReader(path), os.path.join(HERE, "split", "tiny.gguf"), 8)


main()
