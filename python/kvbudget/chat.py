"""Puts a model's own chat template around texts, as `kvbudget profile --chat` does (profiler/text/model_text.h).

What the template writes around a message, whatever its words, is the frame. Its front goes with the context, its back
with the question, so that the context is calibrated at the place where a chat has it.
"""

import datetime
import hashlib
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from ._library import KVBudgetError

BEFORE, BEHIND = "\t \n\t", "\t\n \t"  # spaces that no template writes
WORD, OTHER = "Qmessage7", "It was,\n\n in 1999,  another\tone: é!"
DAY = datetime.date(2024, 7, 26)  # the program's too: a record must not depend on the day
MARKS = {
    "phi4": "<|im_sep|>", "chatml": "<|im_start|>", "llama3": "<|start_header_id|>", "gpt-oss": "<|start|>",
    "gemma": "<start_of_turn>", "mistral": "[INST]", "phi3": "<|end|>",
}  # fmt: skip


@dataclass(frozen=True)
class Frame:
    kind: str  # of MARKS, or "other"
    front: str  # from the beginning of the text to the message, without BOS
    back: str  # from the message to where the answer begins
    bos: bool  # BOS comes before it all
    trim: bool  # the template removes spaces at both ends of the message

    @classmethod
    def of(cls, tokenizer: Any) -> "Frame":
        """Returns the frame of one user message that is to be answered; raises KVBudgetError if there is none."""
        if not getattr(tokenizer, "chat_template", None):
            raise KVBudgetError("the tokenizer has no chat template; leave out chat=True", "UNSUPPORTED")
        front, back = _around(tokenizer, BEFORE + WORD + BEHIND, WORD)
        left, right = front.endswith(BEFORE), back.startswith(BEHIND)
        if left != right:
            raise _refused("it leaves out spaces on one side of the message only")
        if left:
            front, back = front[: -len(BEFORE)], back[len(BEHIND) :]
        if _around(tokenizer, OTHER, OTHER) != (front, back):
            raise _refused("what it writes depends on the message")
        bos = bool(tokenizer.bos_token) and front.startswith(tokenizer.bos_token)
        if bos:
            front = front[len(tokenizer.bos_token) :]
        kind = next((kind for kind, mark in MARKS.items() if mark in front or mark in back), "other")
        return cls(kind, front, back, bos, not left)

    def context(self, text: str) -> str:
        return self.front + (text.lstrip() if self.trim else text)

    def question(self, text: str) -> str:
        return (text.rstrip() if self.trim else text) + self.back

    def attributes(self) -> dict[str, str]:
        """Returns the kind of template, and a hash of the frame, since templates of one kind differ."""
        parts = f"{self.front}\0{self.back}\0"
        return {"chat": self.kind, "chat_sha256": hashlib.sha256(parts.encode()).hexdigest()}


def check_text(tokenizer: Any, text: str, where: str) -> None:
    """Refuses a text with control tokens: they would act like the template's own; the program reads them as text."""
    for token in tokenizer.all_special_tokens:
        if token in text:
            raise KVBudgetError(f"{where}: the text has the control token {token}, which chat=True takes for the "
                                "template's; leave it out of the text")  # fmt: skip


def _refused(why: str) -> KVBudgetError:
    return KVBudgetError(f"chat template: {why}; wrap the texts yourself in the place of chat=True", "UNSUPPORTED")


def _around(tokenizer: Any, message: str, word: str) -> tuple[str, str]:
    """Returns what the template writes before and after `word` of a message."""
    try:
        text: str = tokenizer.apply_chat_template(
            [{"role": "user", "content": message}],
            tokenize=False,
            add_generation_prompt=True,
            strftime_now=DAY.strftime,  # overrides transformers' own
        )
    except TemplateError as why:
        raise _refused(str(why)) from None
    parts = text.split(word)
    if len(parts) != 2:
        raise _refused("it writes the message twice" if len(parts) > 2 else "it does not write the message")
    return parts[0], parts[1]
