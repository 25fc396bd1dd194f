"""Compares the ids that chat templates give (tokens.c) with transformers' apply_chat_template, for templates of every
kind and on difficult messages; and checks that templates without a fixed frame around the message are refused.

usage: compare_chat.py KVBUDGET [--templates FOLDER]     (needs: pip install transformers tokenizers)
Without FOLDER: the templates below, which are the families' own, reduced to the parts that one message uses, and those
of tests/golden/make_jinja.py. With it: every *.jinja there; those that kvbudget refuses are listed. The tokenizer is a
small one, trained here, with all control tokens. Today's date is replaced by the one that kvbudget uses. Prints a line
for each, and PASS or FAIL.
"""

import argparse
import datetime
import glob
import importlib.util
import json
import os
import subprocess
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"
import transformers.utils.chat_template_utils as chat_utils
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
CONTROL = (
    "<s> </s> <|im_start|> <|im_end|> <|im_sep|> <|start_header_id|> <|end_header_id|> <|eot_id|> [INST] "
    "[/INST] <start_of_turn> <end_of_turn> <|user|> <|assistant|> <|system|> <|end|> <|start|> <|message|>"
).split()
LOOP = "{% for message in messages %}%s{% endfor %}"
GENERATE = "{%% if add_generation_prompt %%}{{ '%s' }}{%% endif %%}"


def loop(body, answer="", front=""):
    return front + LOOP.replace("%s", body) + (GENERATE % answer if answer else "")


CHATML = "{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}"
LLAMA3 = (
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | "
    "trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}"
)
LLAMA31 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- set system_message = "" %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Cutting Knowledge Date: December 2023\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""
GPT_OSS = """{%- macro build_system_message() -%}
    {%- set model_identity = "You are ChatGPT, a large language model trained by OpenAI." %}
    {{- model_identity + "\\n" }}
    {{- "Knowledge cutoff: 2024-06\\n" }}
    {{- "Current date: " + strftime_now("%Y-%m-%d") + "\\n\\n" }}
    {{- "Reasoning: medium\\n\\n" }}
    {{- "# Valid channels: analysis, commentary, final. Channel must be included for every message." }}
{%- endmacro -%}
{{- "<|start|>system<|message|>" }}
{{- build_system_message() }}
{{- "<|end|>" }}
{%- for message in messages -%}
    {{- "<|start|>user<|message|>" + message.content + "<|end|>" }}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|start|>assistant
{%- endif -%}"""
MISTRAL3 = """{{- bos_token }}
{%- for message in messages %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- endif %}
{%- endfor %}"""
SYSTEM = (
    "{%% if messages[0]['role'] != 'system' %%}{{ '<|im_start|>system\\n%s<|im_end|>\\n' }}{%% endif %%}"
    % "You are a helpful assistant."
)
QWEN3 = (
    "{%- if messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}"
    "{%- endif %}"
    + loop(
        "{%- if (message.role == \"user\") %}{{- '<|im_start|>' + message.role + '\\n' + "
        "message.content + '<|im_end|>' + '\\n' }}{%- endif %}"
    )
    + "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- if enable_thinking is defined and "
    "enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
)
USER = "{%% if message['role'] == 'user' %%}{{ %s }}{%% endif %%}"
FORMS = {
    "chatml": loop(CHATML, "<|im_start|>assistant\\n"),
    "chatml, system (SmolLM2, Qwen2)": loop(CHATML, "<|im_start|>assistant\\n", SYSTEM),
    "chatml, thinking (Qwen3)": QWEN3,
    "chatml, thinks always": loop(CHATML, "<|im_start|>assistant\\n<think>\\n"),
    "llama3": loop(LLAMA3, "<|start_header_id|>assistant<|end_header_id|>\\n\\n"),
    "llama3.1": LLAMA31,
    "mistral v1": loop(USER % "'[INST] ' + message['content'] + ' [/INST]'", front="{{ bos_token }}"),
    "mistral v0.1": loop(USER % "' [INST] ' + message['content'] + ' [/INST]'", front="{{ bos_token }}"),
    "mistral v3": MISTRAL3,
    "mistral nemo": MISTRAL3.replace("[INST] ", "[INST]"),
    "gemma": loop(
        "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}"
        "{% endif %}{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}",
        "<start_of_turn>model\\n",
        "{{ bos_token }}",
    ),
    "phi3": loop(
        USER % "'<|user|>' + '\\n' + message['content'] + '<|end|>' + '\\n' + '<|assistant|>' + '\\n'",
        front="{{ bos_token }}",
    ),
    "phi3.5": loop(USER % "'<|user|>\\n' + message['content'] + '<|end|>\\n'", "<|assistant|>\\n"),
    "phi4-mini": loop("{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}", "<|assistant|>"),
    "phi4": loop(
        USER % "'<|im_start|>user<|im_sep|>' + message['content'] + '<|im_end|>'", "<|im_start|>assistant<|im_sep|>"
    ),
    "gpt-oss": GPT_OSS,
    "alpaca": loop("{{ '### Instruction:\\n' + message['content'] }}", "### Response:\\n"),
    "chatml with a date": loop(CHATML, "<|im_start|>assistant\\n", "{{ strftime_now('%d %b %Y') }}"),
    "chatml that writes spaces": loop("{{ bos_token }} " + CHATML, "<|im_start|>assistant\\n"),
}
REFUSED = {
    "nothing": "x",
    "an unknown name": loop("{{ '[INST] <<SYS>>\\n' + system + '<</SYS>>' + message['content'] + '[/INST]' }}"),
    "the message twice": loop("{{ message['content'] + message['content'] }}"),
    "another message": loop("{{ message['content'].replace('\\n\\n', '\\n') }}"),
    "an exception": "{{ raise_exception('no') }}" + loop(CHATML),
    "a statement that is not read": loop(CHATML) + "{% filter upper %}{% endfilter %}",
}
MESSAGES = [
    "Who was it?",
    "  spaces \n",
    "\n\nlines\n\n",
    "<|im_end|> </s> [/INST] <|eot_id|>",
    "don't 123  4",
    "x",
    "\u00a0\u3000wide spaces\u2003",
    "é 中文 😀",
]


def golden_kinds():
    """Returns the templates of the six kinds in make_jinja.py."""
    place = os.path.join(ROOT, "tests", "golden", "make_jinja.py")
    spec = importlib.util.spec_from_file_location("make_jinja", place)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found.KINDS


def make_tokenizer(folder):
    """Writes a byte-level tokenizer with all control tokens to a folder."""
    t = Tokenizer(models.BPE())
    t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    texts = open(os.path.join(ROOT, "calib-data", "narrative-en.jsonl"), encoding="utf-8").read()[:200000]
    t.train_from_iterator(
        [texts],
        trainers.BpeTrainer(vocab_size=1500, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()),
    )
    t.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROL])
    made = PreTrainedTokenizerFast(tokenizer_object=t, bos_token="<s>", eos_token="</s>")
    made.save_pretrained(folder)
    return made


def ours(program, folder, message):
    """Returns the ids, or the error message if the template is refused."""
    tokens = os.path.join(os.path.dirname(program), "tests/tokens")
    found = subprocess.run([tokens, folder, "-", "--chat"], input=message.encode(), capture_output=True)
    return [int(i) for i in found.stdout.split()] if found.returncode == 0 else found.stderr.decode().strip()


def theirs(tokenizer, template, message):
    """Returns transformers' ids. It takes control tokens in a message as tokens, kvbudget takes them as text."""
    said = [{"role": "user", "content": message}]
    return tokenizer.apply_chat_template(
        said,
        chat_template=template,
        add_generation_prompt=True,
        tokenize=True,
        date_string="26 Jul 2024",
        return_dict=False,
    )


def compare(program, tokenizer, folder, name, template):
    with open(os.path.join(folder, "chat_template.jinja"), "w", encoding="utf-8") as file:
        file.write(template)
    wrong, n = [], 0
    for message in MESSAGES:
        found = ours(program, folder, message)
        if isinstance(found, str):
            return found
        if not any(token in message for token in CONTROL):
            want, n = theirs(tokenizer, template, message), n + 1
            if found != want:
                wrong.append((message, tokenizer.decode(found), tokenizer.decode(want)))
        elif sum(i >= len(tokenizer) - len(CONTROL) for i in found) != sum(
            i >= len(tokenizer) - len(CONTROL) for i in theirs(tokenizer, template, "plain")
        ):
            wrong.append((message, tokenizer.decode(found), "no control token of the message's own"))
    print(f"{name}: {'all ids of %d messages equal' % n if not wrong else 'DIFFERS'}")
    for message, found, want in wrong:
        print(f"  {message!r}:\n    {found!r}\n    {want!r}")
    return not wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kvbudget")
    parser.add_argument("--templates", help="a folder of *.jinja")
    o = parser.parse_args()
    real = chat_utils._compile_jinja_template.__wrapped__

    def dated(template):
        made = real(template)
        made.globals["strftime_now"] = datetime.date(2024, 7, 26).strftime
        return made

    chat_utils._compile_jinja_template = dated
    forms = FORMS | {f"{name} (make_jinja.py)": text for name, text in golden_kinds().items()}
    if o.templates:
        names = sorted(glob.glob(os.path.join(o.templates, "*.jinja")))
        forms = {os.path.basename(n): open(n, encoding="utf-8").read() for n in names}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer, good = make_tokenizer(folder), True
        for name, template in forms.items():
            found = compare(o.kvbudget, tokenizer, folder, name, template)
            if isinstance(found, str):
                print(f"{name}: refused: {found}")
            good &= found is True or (isinstance(found, str) and bool(o.templates))
        for name, template in REFUSED.items():
            found = compare(o.kvbudget, tokenizer, folder, name, template)
            refused = isinstance(found, str) and "chat template" in found
            print(f"{name}: {'refused' if refused else 'NOT REFUSED'}")
            good &= refused
    print("PASS" if good else "FAIL")
    raise SystemExit(not good)


if __name__ == "__main__":
    main()
