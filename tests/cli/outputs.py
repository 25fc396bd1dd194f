"""Gives every option of every command that takes a value every file that the command reads: outputs.py KVBUDGET, in a
folder with tiny.gguf, calib.jsonl, run.h5, table.safetensors, table.npy and texts. Exit status: failures."""
import os
import re
import subprocess
import sys

KVB = sys.argv[1]
SIZE = "--tokens 100 --next 6 --quiet"
# For every command, arguments with which it succeeds; OUT is a new file.
LINES = {
    "calib": "tiny.gguf calib.jsonl -o OUT",
    "profile": "tiny.gguf calib.jsonl -o OUT --new-tokens 2 --ignore-eos --metric keydiff --quiet --force",
    "merge": "OUT run.h5 --force",
    "tune": "tiny.gguf -o OUT --tokens 100 --quiet",
    "tables": "",
    "learn": "run.h5 -o OUT --quiet",
    "solve": "run.h5 --metric keydiff -o OUT --quiet",
    "validate": "run.h5 --metric keydiff --quiet",
    "eval": f"tiny.gguf table.safetensors text0.txt -r 0.5 -a none {SIZE}",
    "refine": f"tiny.gguf table.safetensors text0.txt text1.txt text2.txt text3.txt -o OUT --evaluations 2 {SIZE}",
    "recommend": f"tiny.gguf table.safetensors text0.txt text1.txt -r 50% --max-kl 1e6 --confidence 0.1 {SIZE}",
    "report": "table.safetensors -o OUT --quiet",
    "budgets": "table.safetensors --ratio 0.5 --tokens 100",
    "export": "table.safetensors --format npy -o OUT",
    "import": "steps -o OUT",
    "inspect": "run.h5",
    "task": "tiny.gguf -k niah_single_1 -t 700 -c 1 -q --answer",
}
NAMES = ("eval --output", "task --results", "tune --output")  # prefixes of file names, tried by outputs.sh
STRANGE = "\x1b[31m\u202e\x9b"
failed = 0


def check(good, name, shown=""):
    global failed
    failed += not good
    print(f"ok - {name}" if good else f"not ok - {name}\n    {shown}")


def run(words):
    p = subprocess.run([KVB, *words], stdin=subprocess.DEVNULL, capture_output=True, errors="replace", timeout=900)
    return p.returncode, p.stderr


def remove_new():
    for name in os.listdir("."):
        if name.startswith(("new", STRANGE + "new")):
            subprocess.run(["rm", "-rf", name], check=True)


def content(names):
    """Returns {name: bytes} of files, and of all files in folders."""
    within = [os.path.join(at, file) for name in names for at, _, files in os.walk(name) for file in files]
    return {name: open(name, "rb").read() for name in [*filter(os.path.isfile, names), *within]}


def walk(command, options):
    words = [command, *LINES[command].replace("OUT", "new.svg").split()]
    inputs = [w for w in words if os.path.exists(w)]
    before = content(inputs)
    code, err = run(words)
    check(code == 0, f"{command} works", err)
    outputs = []
    for option in options:
        remove_new()
        run([*words, f"--{option}", "new_too.svg"])
        if any(name.startswith("new_too") for name in os.listdir(".")):
            outputs.append(option)
        for name in inputs:
            run([*words, f"--{option}", name])
            after = content(inputs)
            check(after == before, f"{command} --{option} {name} leaves it alone")
            for n, whole in before.items():
                open(n, "wb").write(whole)
    remove_new()
    files = [option for option in outputs if f"{command} --{option}" not in NAMES]
    for i, option in enumerate(files):
        os.symlink(inputs[-1], "new_link.svg")
        code, err = run([*words, "--force", f"--{option}", "new_link.svg"])
        check(code == 1 and "would be both read and written" in err, f"{command} --{option} through a link", err)
        open("new_notes.svg", "w").write("notes, of today")
        code, err = run([w for w in words if w != "--force"] + [f"--{option}", "new_notes.svg"])
        check(code == 1 and "exists and" in err, f"{command} --{option} onto notes", err)
        for other in files[:i]:
            code, err = run([*words, f"--{other}", "new_both.svg", f"--{option}", "./new_both.svg"])
            good = code != 0 and not os.path.exists("new_both.svg")
            check(good, f"{command} --{other} and --{option} to one file", err)
        remove_new()
    return outputs


def say_names(command):
    """Control characters in names and texts are printed as escapes, in all messages."""
    words = [command]
    for word in LINES[command].replace("OUT", "new.svg").replace("--quiet", "").split():
        if os.path.exists(word) and not os.path.exists(STRANGE + word):
            subprocess.run(["cp", "-r", word, STRANGE + word], check=True)
        words.append(STRANGE + word if os.path.exists(word) or word == "new.svg" else word)
    p = subprocess.run([KVB, *words], stdin=subprocess.DEVNULL, capture_output=True)
    said = (p.stdout + p.stderr).decode()
    remove_new()
    bad = re.search("[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", said)
    check(p.returncode == 0 and not bad, f"{command} prints no control characters", repr(said[-300:]))
    return "\\u001b" in said


def refuse_wide_counts(command, text):
    """A count of 2**32 + 1 is refused, not taken as 1; so is a sink or window whose sum with the other is too large."""
    words = [command, *LINES[command].replace("OUT", "new.svg").split()]
    for option in sorted(set(re.findall(r"--([a-z-]+) [NKT]\b", text)) - {"seed", "temperature"}):
        code, err = run([*words, f"--{option}={2**32 - 1 if option in ('sink', 'window') else 2**32 + 1}"])
        check(code == 2 and "expected" in err, f"{command} --{option}: too large", f"{code} {err}")


text = subprocess.run([KVB, "help"], capture_output=True, text=True, check=True).stdout
commands = re.findall(r"^  ([a-z]+) ", text.split("Commands:")[1].split("\n\n")[0], re.M)
check(set(commands) == set(LINES), "every command has a line here", str(set(commands) ^ set(LINES)))
found = []
for command in commands:
    text = subprocess.run([KVB, "help", command], capture_output=True, text=True, check=True).stdout
    options = re.findall(r"^  (?:-\w, |    )--([a-z-]+) [^ ]", text, re.M)
    refuse_wide_counts(command, text)
    found += [f"{command} --{o}" for o in walk(command, options)]
print("outputs:", ", ".join(found))
said = [command for command in commands if say_names(command)]
check(len(said) >= 8, "names are printed", str(said))
check(len(found) >= 21, "outputs are found", str(len(found)))
sys.exit(min(failed, 100))
