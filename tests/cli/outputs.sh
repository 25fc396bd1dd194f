#!/usr/bin/env bash
# No output overwrites an input, another output, or a file of another kind: every option of every command that takes a
# value is tried with every file that the command reads.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
tiny_table
expect 0 'export an array' export table.safetensors -o table.npy
expect 0 'learn' learn run.h5 -o rank.safetensors --quiet
expect 0 'export' export run.h5 --format lukv-steps -o steps
tiny_texts 4 40
"$PYTHON" "$KVB_ROOT/tests/cli/outputs.py" "$KVB" || FAILED=$((FAILED + $?))

# Cases that only some commands have.
mkdir model && echo '{}' >model/config.json && ln -s run.h5 keydiff.safetensors && ln run.h5 hard.h5
fails 'a file inside the model folder' 'is inside model, which is read' profile model -o model/config.json calib.jsonl \
    --force
fails 'a ranking that is read' 'would be both read and written' profile tiny.gguf calib.jsonl \
    --metric learned=rank.safetensors -o rank.safetensors --force
fails 'the results and the kept positions' 'would write the same file' eval tiny.gguf table.safetensors text0.txt \
    -o both --dump-kept both.csv
fails 'one of the files for each metric' 'both read and' solve run.h5 -m keydiff -o '{metric}.safetensors' --force
fails 'a record that is merged' 'both read and' merge run.h5 run.h5 --force
fails 'a second name of the record' 'both read and' solve hard.h5 --metric keydiff -o run.h5
fails 'a name that is empty' "expected a file's name" eval tiny.gguf table.safetensors text0.txt -o ''
fails 'a folder where names are formed' "expected a file's name" eval tiny.gguf table.safetensors text0.txt -o ./
echo 'my notes, of today' >notes
fails 'notes are no CSV' 'exists and is not CSV' solve run.h5 --metric keydiff --csv notes
expect 0 'with --force they are replaced' solve run.h5 --metric keydiff --csv notes --force --quiet
expect 0 'a CSV is replaced' solve run.h5 --metric keydiff --csv notes --quiet
says 'and is one' '^metric,' notes
echo '{"mine": 1}' >mine.json
for format in per-layer shares; do
    OUT=(export table.safetensors -f "$format" -r 0.5 -t 100 -o)
    for _ in 1 2; do expect 0 "$format, and again" "${OUT[@]}" $format.json; done
    fails "$format onto other JSON" 'mine.json: exists and is not' "${OUT[@]}" mine.json
done
cp text0.txt page.html
fails 'a text where tune puts its report' 'would be both read and written' tune tiny.gguf page.html -o page
fails 'and one that it does not read' 'page.html: exists and is not an HTML page' tune tiny.gguf -o page
end
