"""Calibration lines (formats/README.md): JSON objects with a context and questions about it."""

import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ._library import KVBudgetError


@dataclass
class Question:
    """A question and, if it is given, its answer; token ids, or a text that is still to be tokenized."""

    text: str | None
    ids: list[int] | None
    answer: str | None = None
    answer_ids: list[int] | None = None


@dataclass
class Context:
    sample_id: str
    where: str  # file and line, for messages
    text: str | None
    ids: list[int] | None
    answer_prefix: str
    has_answer_prefix: bool  # whether the line gives it
    questions: list[Question] = field(default_factory=list)


def read(paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> tuple[list[Context], str]:
    """Returns all contexts of the files, and one hash for them: a single file's own, which `sha256sum FILE` shows."""
    files = [Path(p) for p in ([paths] if isinstance(paths, (str, os.PathLike)) else paths)]
    found: list[Context] = []
    hashes = []
    for path in files:
        content = path.read_bytes()
        hashes.append(hashlib.sha256(content).hexdigest())
        try:
            lines = content.decode("utf-8-sig").split("\n")  # splitlines() would also split at U+2028 within a text
        except UnicodeDecodeError as why:
            raise KVBudgetError(f"{path}: byte {why.start} is no UTF-8: {why.reason}", "FORMAT") from None
        for number, line in enumerate(lines, 1):
            if line.strip():
                found.append(_context(line, path, number))
    taken: set[str] = set()
    for context in found:
        if context.sample_id in taken:
            raise KVBudgetError(
                f"{context.where}: sample_id {context.sample_id} occurs twice; give each context its own"
            )
        taken.add(context.sample_id)
    if not found:
        raise KVBudgetError(f"{', '.join(map(str, files))}: no calibration lines")
    joined = hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()
    return found, joined


def _context(line: str, path: Path, number: int) -> Context:
    where = f"{path}: line {number}"
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as why:
        raise KVBudgetError(f"{where}: not JSON: {why}", "FORMAT") from None
    if not isinstance(entry, dict):
        raise KVBudgetError(f"{where}: expected a JSON object", "FORMAT")
    text, ids = _one_of(entry, "context", "context_ids", where)
    default = re.sub(r"[^A-Za-z0-9_.-]", "_", path.stem)[:50] + f"-{number}"
    sample = str(entry.get("sample_id", default))
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", sample) or sample in (".", ".."):
        raise KVBudgetError(f"{where}: sample_id: expected 1 to 64 characters A-Z a-z 0-9 _ . -, found {sample!r}")
    prefix = entry.get("answer_prefix", "\nAnswer:")
    if not isinstance(prefix, str):
        raise KVBudgetError(f"{where}: answer_prefix: expected a text", "FORMAT")
    context = Context(sample, where, text, ids, prefix, "answer_prefix" in entry)
    texts, lists = _one_of(entry, "questions", "question_ids", where)
    n = len(texts if texts is not None else lists)
    answers, answer_ids = entry.get("answers"), entry.get("answer_ids")
    for name, given in (("answers", answers), ("answer_ids", answer_ids)):
        if given is not None and (not isinstance(given, list) or len(given) != n):
            raise KVBudgetError(f"{where}: {name}: expected as many as questions, {n}", "FORMAT")
    for i in range(n):
        context.questions.append(
            Question(
                _text(texts[i], where) if texts is not None else None,
                _ids(lists[i], where) if lists is not None else None,
                _text(answers[i], where) if answers is not None and answers[i] is not None else None,
                _ids(answer_ids[i], where) if answer_ids is not None and answer_ids[i] is not None else None,
            )
        )
    return context


def _one_of(entry: dict[str, Any], first: str, second: str, where: str) -> tuple[Any, Any]:
    a, b = entry.get(first), entry.get(second)
    if (a is None) == (b is None) or not (a or b):
        raise KVBudgetError(f"{where}: expected either {first} or {second}, and not empty", "FORMAT")
    if first == "context":
        return (_text(a, where), None) if a is not None else (None, _ids(b, where))
    if not isinstance(a if a is not None else b, list):
        raise KVBudgetError(f"{where}: {first if a is not None else second}: expected a list", "FORMAT")
    return a, b


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise KVBudgetError(f"{where}: expected a text without NUL, found {value!r:.60}", "FORMAT")
    return value


def _ids(value: Any, where: str) -> list[int]:
    if not isinstance(value, list) or not all(type(i) is int and 0 <= i < 2**31 for i in value):
        raise KVBudgetError(f"{where}: expected a list of token ids", "FORMAT")
    return value
