"""What is to be recorded: calibration lines as tokens, and how answers are made."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from ._library import KVBudgetError, count, one_of, real
from .calibration import Context, Question
from .chat import Frame, check_text


@dataclass(frozen=True)
class Options:
    """How answers are made and what is left out; as in `kvbudget help profile`."""

    new_tokens: int = 64
    temperature: float = 0.7
    seed: int = 1
    greedy: bool = False
    ignore_eos: bool = False
    ignore_answers: bool = False
    include_first: bool = False
    bos: Literal["auto", "yes", "no"] = "auto"
    max_tokens: int = 0
    max_questions: int = 0
    chat: bool = False

    def __post_init__(self) -> None:
        for name in ("new_tokens", "max_tokens", "max_questions"):
            count(getattr(self, name), name)
        count(self.seed, "seed", 2**64 - 1)
        one_of("bos", self.bos, ("auto", "yes", "no"))
        if self.new_tokens < 1:
            raise KVBudgetError("new_tokens: expected at least 1")
        if not (self.greedy or 0 < real(self.temperature, "temperature") < math.inf):
            raise KVBudgetError("temperature: expected a number above 0")


@dataclass
class Work:
    sample_id: str
    ids: list[int]
    questions: list[tuple[list[int], list[int] | None]]  # question with answer prefix; answer
    n_short: int  # given answers that are too short to record a query; new ones are drawn


def _tokens(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


def _context(tokenizer: Any, c: Context, o: Options, frame: Frame | None) -> list[int]:
    """Returns the context's ids, with BOS first where the rule says so; given ids are taken as they are."""
    if c.ids is not None:
        if frame:
            raise KVBudgetError(f"{c.where}: chat=True wraps texts, but this context is given as token ids")
        return c.ids
    text = c.text or ""
    if frame:
        check_text(tokenizer, text, c.where)
        text = frame.context(text)
    elif o.bos == "auto":
        ids: list[int] = tokenizer(text).input_ids
        return ids
    if o.bos == "yes" and tokenizer.bos_token_id is None:
        raise KVBudgetError('the tokenizer has no BOS token, but bos="yes" asks for it')
    begins = o.bos == "yes" or (o.bos == "auto" and frame is not None and frame.bos)
    return [tokenizer.bos_token_id] * begins + _tokens(tokenizer, text)


def _suffix(tokenizer: Any, c: Context, q: Question, frame: Frame | None) -> list[int]:
    """Returns the ids of question and answer prefix, as one text. A chat template says where the answer begins, so the
    default prefix is left out with one."""
    if q.ids is not None:
        if frame:
            raise KVBudgetError(f"{c.where}: chat=True wraps texts, but a question is given as token ids")
        return q.ids
    text = q.text or ""
    if frame is None:
        return _tokens(tokenizer, text + c.answer_prefix)
    check_text(tokenizer, text, c.where)
    return _tokens(tokenizer, frame.question(text) + (c.answer_prefix if c.has_answer_prefix else ""))


def prepare(tokenizer: Any, c: Context, o: Options, vocabulary: int, frame: Frame | None = None) -> Work:
    ids = _context(tokenizer, c, o, frame)
    ids = ids[: o.max_tokens] if o.max_tokens else ids
    questions, n_short = [], 0
    for number, q in enumerate(c.questions[: o.max_questions or None], 1):
        suffix = _suffix(tokenizer, c, q, frame)
        answer = None
        if not o.ignore_answers and (q.answer_ids is not None or q.answer is not None):
            answer = q.answer_ids if q.answer_ids is not None else _tokens(tokenizer, q.answer or "")
            if len(answer) + o.include_first < 2:  # its last token is never a query
                answer, n_short = None, n_short + 1
        if not suffix:
            raise KVBudgetError(f"{c.where}: question {number} has no tokens")
        questions.append((suffix, answer))
    for given in (ids, *(x for pair in questions for x in pair if x)):
        if not given or max(given) >= vocabulary:
            raise KVBudgetError(
                f"{c.where}: expected token ids from 0 to {vocabulary - 1}, found {max(given, default=None)}"
            )
    return Work(c.sample_id, ids, questions, n_short)
