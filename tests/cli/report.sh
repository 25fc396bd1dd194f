#!/usr/bin/env bash
# kvbudget report: one self-contained page with all of its inputs, and safe against hostile texts.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
tiny_record --metric snapkv:kvpress:window=16
for m in keydiff snapkv; do expect 0 "solve $m" solve run.h5 --metric $m -o $m.safetensors --quiet; done
tiny_texts 2 60
expect 0 'eval' eval tiny.gguf keydiff.safetensors text0.txt text1.txt --tokens 160 --next 12 -r 0.5,0.8 -o worth \
    --quiet
expect 0 'task' task tiny.gguf keydiff.safetensors -k niah_single_1 -t 900 -c 2 -a uniform -r 0.5 \
    --quiet --results needles
expect 0 'solve --holdout --json' solve run.h5 -m keydiff --holdout --json --quiet
mv out holdout.json

# page NAME FILE: independent code finds every element closed, no network address, and a picture in every chart.
page() {
    holds "$1" "$PYTHON" - "$2" <<'PYTHON_END'
import html.parser, re, sys
text = open(sys.argv[1], encoding="utf-8").read()
assert len(text.encode()) < 2_000_000
VOID = {"meta", "input", "br", "link", "img"}
class Reader(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.sections, self.figures, self.attributes = [], [], 0, []
    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, *a) for a in attrs]
        if tag not in VOID: self.open.append(tag)
        if tag == "section": self.sections.append(dict(attrs)["id"])
        self.figures += ("role", "img") in attrs
    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> at {self.getpos()}"
reader = Reader()
reader.feed(text)
reader.close()
assert not reader.open, reader.open
for tag, name, value in reader.attributes:
    assert tag not in ("img", "link", "iframe", "object"), tag
    assert not name.startswith("on"), name
    assert name not in ("src", "href") or value.startswith("#"), (name, value)
assert text.count("<script") == 0
assert text.count('<div class="plot">') == reader.figures
assert "nan" not in " ".join(v for t, n, v in reader.attributes if n in ("d", "x", "y", "cx", "cy") and v)
print(" ".join(reader.sections))
print(re.findall(r"<figcaption>(.*?)</figcaption>", text))
PYTHON_END
    cp held page.out
}

expect 0 'a report of a table alone' report keydiff.safetensors -o alone.html
says 'says what it wrote' '^wrote alone.html' err
page 'the page stands alone' alone.html
says 'a table that nobody tried is called so' 'not tried yet' alone.html
says 'and how to try it' 'kvbudget eval MODEL keydiff.safetensors' alone.html

expect 0 'a report of everything' report keydiff.safetensors snapkv.safetensors --record run.h5 --results worth.json \
    --results needles.json --results holdout.json -o all.html --quiet
page 'the page of everything stands alone' all.html
for s in verdict worth maps losses holdout origin repeat; do
    says "section $s" "\\b$s\\b" page.out
done
says 'the loss is in every page' '<title>keydiff: what is lost</title>' alone.html
says 'a chart of KL' 'keydiff: KL to the full cache' page.out
says 'a chart of the task' 'niah_single' page.out
says 'a chart of what was left out' 'keydiff: loss, share' page.out
says 'the verdict is on this very table' 'class="badge">(better|worse|not certain)' all.html
says 'few texts are called few' 'Measured on 2 texts. <b>So few' all.html
says 'the other table is untried' 'not tried yet' all.html
says 'the settings of the record' '<summary>run.h5</summary>' all.html
says 'the model it is for' 'Tiny test model' all.html
says 'the command that gave the results' '^kvbudget eval .*tiny.gguf keydiff.safetensors text0.txt' all.html
says 'the hash of the table' "$(sha256sum keydiff.safetensors | cut -d ' ' -f 1)" all.html
cp all.html first.html
expect 0 'the same again' report keydiff.safetensors snapkv.safetensors --record run.h5 --results worth.json \
    --results needles.json --results holdout.json -o all.html --quiet
same 'gives the same bytes' first.html all.html

# ---- Other kinds of tables
expect 0 'a table of three ratios in pages' solve run.h5 -m keydiff --ratios 0.3,0.5,0.8 --block 16 \
    -o few.safetensors --quiet
expect 0 'its report' report few.safetensors -o few.html --quiet
page 'stands alone' few.html
says 'has its ratios' '3, from 30 to 80&nbsp;% pruned' few.html
says 'and its constraints' '<dt>constraints</dt><dd>.*block' few.html

# ---- Hostile texts
evil='a"><script>alert(1)<'
cp keydiff.safetensors "$evil.safetensors"
"$PYTHON" - <<'PYTHON_END'
import json
j = json.load(open("worth.json"))
for row in j["rows"]: row["allocator"] += "<img src=x onerror=alert(1)>"
j["inputs"][0]["name"] = "</td></table><script>alert(2)</script>\u202e"
j["arguments"] += ["$(rm -rf /)", "</pre>"]
json.dump(j, open("evil.json", "w"))
PYTHON_END
expect 0 'a report with hostile names' report "$evil.safetensors" --results evil.json -o evil.html
page 'is still one page' evil.html
lacks 'no text became markup' '<img|<script>alert' evil.html
says 'words of a shell are quoted' '&#39;\$\(rm -rf /\)&#39;' evil.html

# ---- What is refused
expect 0 'another profile' profile tiny.gguf calib.jsonl -o other.h5 --quiet --new-tokens 5 --ignore-eos -m keydiff
fails 'a record of another run' 'no table of the report was made from this record' report keydiff.safetensors \
    --record other.h5 -o x.html
misused 'no table' 'expected a table' report -o x.html
misused 'no output' '--output is needed' report keydiff.safetensors
absent 'nothing is left' x.html

# ---- A single value, long names and narrow screens
"$PYTHON" - <<'PYTHON_END'
import json
j = json.load(open("worth.json"))
j["rows"] = [r for r in j["rows"] if r["ratio"] == 0.5 and r["allocator"] == "uniform"][:1]
j["rows"][0]["allocator"] = "a" * 216
json.dump(j, open("single.json", "w"))
PYTHON_END
expect 0 'a report of a single value' report keydiff.safetensors --results single.json -o single.html --quiet
page 'is a page with a chart of it' single.html
lacks 'no coordinate is NaN' '[nN][aA][nN]' <(grep -o '<svg.*' single.html)
# Text without line breaks makes a page wider than a screen of 320 pixels. Only tables and programs, which scroll, and
# numbers with their units may forbid breaks.
holds 'long words may be broken, but in what scrolls' "$PYTHON" - <<'PYTHON_END'
import re
css = re.search(r"<style>(.*?)</style>", open("single.html").read(), re.S)[1]
screen = css.split("@media print")[0]
assert re.search(r"body \{[^}]*overflow-wrap: anywhere", screen)
for selector, rules in re.findall(r"([^{}]+)\{([^{}]*)\}", screen):
    if "overflow-wrap: normal" in rules or "white-space: nowrap" in rules:
        assert selector.strip() in (".wide", "td small"), selector
    assert not re.search(r"(?<!-)(?<!max-)(?<!min-)width: *(3[3-9]\d|[4-9]\d\d)px", rules), selector
assert "overflow-x: auto" in re.search(r"\.wide \{([^}]*)", screen)[1]
text = open("single.html").read()
for table in re.finditer(r"<table", text): # every one is inside an element that scrolls
    assert '<div class="wide">' in text[max(0, table.start() - 40) : table.start()], text[table.start() - 60 :][:90]
PYTHON_END

end
