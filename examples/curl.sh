#!/usr/bin/env bash
# One request to SGLang's own HTTP API; prints the answer and what drafting did for it.
#
#   make serve              # in another terminal
#   examples/curl.sh [URL]  # default http://127.0.0.1:30000
#
# The prompt is some hundred tokens of Python source: drafting starts at 128 tokens of context.
set -euo pipefail

url="${1:-http://127.0.0.1:30000}"
body="$(python3 -c '
import inspect, json, textwrap
params = {"temperature": 0, "max_new_tokens": 64}
print(json.dumps({"text": inspect.getsource(textwrap)[:2000], "sampling_params": params}))
')"

status=0
answer="$(curl --silent --show-error --fail-with-body "$url/generate" \
    --header 'Content-Type: application/json' --data "$body")" || status=$?
if [ "$status" -ne 0 ]; then
    # What the server said, where one answered; curl itself has told the rest.
    [ -z "$answer" ] || printf '%s\n' "$answer" >&2
    exit "$status"
fi

printf '%s' "$answer" | python3 -c '
import json, sys
answer = json.load(sys.stdin)
print(answer["text"])
print({name: value for name, value in answer["meta_info"].items() if name.startswith("kv_")})
'
