"""Chat templates give the same ids as `kvbudget profile --chat`; templates without a fixed frame are refused."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import transformers
from families import build
from test_recorder import PROGRAM

import kvbudget
from kvbudget.chat import Frame

h5py = pytest.importorskip("h5py")
CONTROL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]"]
CHATML = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nhelp<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}{{ '<start_of_turn>' + m['role'] + '\n' + m['content'] | trim + "
    "'<end_of_turn>\n' }}{% endfor %}{{ '<start_of_turn>model\n' }}"
)
MISTRAL = "{{ bos_token }}{% for m in messages %}{{ '[INST] ' + m['content'] + ' [/INST]' }}{% endfor %}"
DATED = "{{ strftime_now('%d %b %Y') + '\n' }}" + CHATML
KINDS = {"chatml": CHATML, "gemma": GEMMA, "mistral": MISTRAL, "chatml, dated": DATED}


def byte_tokenizer(template: str | None) -> Any:
    """Returns byte-level BPE without merges, and with control tokens: 256 ids and a few more."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    plain.pre_tokenizer, plain.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    plain.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROL])
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, bos_token="<s>", eos_token="</s>", additional_special_tokens=CONTROL[2:]
    )
    made.chat_template = template
    return made


def text_lines(tmp_path: Path, **more: Any) -> Path:
    path = tmp_path / "calib.jsonl"
    line = {"sample_id": "c", "context": " \n It was, in 1999, é.  ", "questions": [" who? \n", "why"]}
    path.write_text(json.dumps(line | {"answers": ["someone", "because"]} | more) + "\n")
    return path


def ids_and_chat(record: Path) -> tuple[list[list[int]], list[str]]:
    with h5py.File(record) as f:
        c = f["contexts/c"]
        ids = [c["token_ids"], *(c[f"questions/{i}/{name}_ids"] for i in range(2) for name in ("suffix", "answer"))]
        words = [f.attrs[name] for name in ("chat", "chat_sha256")]
        return [i[:].tolist() for i in ids], [w.decode() if isinstance(w, bytes) else w for w in words]


@pytest.mark.parametrize("bos", ["auto", "yes", "no"])
@pytest.mark.parametrize("kind", KINDS)
def test_as_the_profiler(kind: str, bos: str, tmp_path: Path) -> None:
    """Ids of contexts, questions and answers, kind and hash are those of `kvbudget profile --chat`."""
    if bos != "auto" and kind != "gemma":
        pytest.skip("one kind says it")
    model, tokenizer = build("llama", vocab_size=264), byte_tokenizer(KINDS[kind])
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    for prefix in ({}, {"answer_prefix": "So:"}):
        calib, ours, theirs = text_lines(tmp_path, **prefix), tmp_path / "ours.h5", tmp_path / "theirs.h5"
        kvbudget.record(model, tokenizer, calib, ["keydiff"], output=ours, chat=True, force=True, bos=bos)
        words = ("profile", tmp_path / "model", calib, "-m", "keydiff", "-o", theirs, "--chat", "--bos", bos)
        subprocess.run([PROGRAM, *words, "--quiet", "--force"], check=True)
        found = ids_and_chat(ours)
        assert found == ids_and_chat(theirs) and found[1][0] == kind.split(",")[0]
    out = tmp_path / "t.safetensors"
    subprocess.run([PROGRAM, "solve", ours, "-m", "keydiff", "-o", out, "--quiet"], check=True)
    assert f'"chat":"{found[1][0]}"'.encode() in out.read_bytes()


def test_a_whole_message_is_transformers_own() -> None:
    """Front, text and back together are what apply_chat_template writes for the text."""
    for template in (CHATML, GEMMA, MISTRAL):
        tokenizer = byte_tokenizer(template)
        frame = Frame.of(tokenizer)
        for text in ("Who was it?", "  spaces \n", "\u00a0\u3000wide\u2003", "é 中文"):
            said = [{"role": "user", "content": text}]
            whole = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
            framed = frame.question(frame.context(text))
            assert whole == "<s>" * frame.bos + framed


@pytest.mark.parametrize(
    "template, why",
    [
        (None, "has no chat template"),
        ("x", "does not write the message"),
        ("{{ messages[0].content + messages[0].content }}", "writes the message twice"),
        ("{{ messages[0].content.lstrip() }}", "on one side"),
        ("{{ messages[0].content | replace('\n\n', '\n') }}", "does not write the message"),
        ("{{ messages[0].content | length }}{{ messages[0].content }}", "depends on the message"),
        ("{{ raise_exception('no users') }}", "no users"),
        ("{% for %}", "chat template"),
    ],
)
def test_templates_that_are_refused(template: str | None, why: str, tmp_path: Path) -> None:
    """A template that does not put every message, unchanged, into the same frame is refused with the reason."""
    with pytest.raises(kvbudget.KVBudgetError, match=why):
        Frame.of(byte_tokenizer(template))


def test_texts_that_are_refused(tmp_path: Path) -> None:
    """Refused: token ids, which cannot be framed; control tokens in a text; and no tokenizer, thus no template."""
    model, tokenizer = build("llama", vocab_size=264), byte_tokenizer(CHATML)

    def refused(words: str, of: Any = tokenizer, **line: Any) -> None:
        calib = tmp_path / "bad.jsonl"
        calib.write_text(json.dumps({"sample_id": "c", **line}) + "\n")
        with pytest.raises(kvbudget.KVBudgetError, match=words):
            kvbudget.record(model, of, calib, ["keydiff"], output=tmp_path / "no.h5", chat=True)

    refused("this context is given as token ids", context_ids=[5, 6], questions=["who"])
    refused("a question is given as token ids", context="a", question_ids=[[5]])
    refused("control token <|im_end|>", context="a <|im_end|>", questions=["who"])
    refused("control token </s>", context="a", questions=["who</s>"])
    refused("has no chat template", of=None, context="a", questions=["who"])
