"""What is to be recorded: calibration lines as tokens, and how answers are made."""

from dataclasses import dataclass
from typing import Any, Literal

from ._library import KVBudgetError
from .calibration import Context


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


@dataclass
class Work:
    sample_id: str
    ids: list[int]
    questions: list[tuple[list[int], list[int] | None]]  # question with answer prefix; answer


def _tokens(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


def prepare(tokenizer: Any, c: Context, o: Options, vocabulary: int) -> Work:
    if c.ids is not None:
        ids = c.ids
    elif o.bos == "auto":
        ids = tokenizer(c.text).input_ids
    else:
        if o.bos == "yes" and tokenizer.bos_token_id is None:
            raise KVBudgetError('the tokenizer has no BOS token, but bos="yes" asks for it')
        ids = [tokenizer.bos_token_id] * (o.bos == "yes") + _tokens(tokenizer, c.text or "")
    ids = ids[: o.max_tokens] if o.max_tokens else ids
    questions = []
    for number, q in enumerate(c.questions[: o.max_questions or None], 1):
        suffix = q.ids if q.ids is not None else _tokens(tokenizer, (q.text or "") + c.answer_prefix)
        answer = None
        if not o.ignore_answers and (q.answer_ids is not None or q.answer is not None):
            answer = q.answer_ids if q.answer_ids is not None else _tokens(tokenizer, q.answer or "")
            if len(answer) + o.include_first < 2:
                raise KVBudgetError(
                    f"{c.where}: question {number}: the answer has {len(answer)} tokens, expected at least 2 (the last "
                    "one is never a query); leave it out to sample one"
                )
        if not suffix:
            raise KVBudgetError(f"{c.where}: question {number} has no tokens")
        questions.append((suffix, answer))
    for given in (ids, *(x for pair in questions for x in pair if x)):
        if not given or max(given) >= vocabulary:
            raise KVBudgetError(
                f"{c.where}: expected token ids from 0 to {vocabulary - 1}, found {max(given, default=None)}"
            )
    return Work(c.sample_id, ids, questions)
