#!/usr/bin/env bash
# llguidance 1.7.6: `whitespace_pattern` of a JSON schema's options bounds no white space. It names
# what may be skipped between two parts of the text, and what may be skipped is skipped again and
# again: under a pattern of at most eight spaces, or of one optional space, 1,000 spaces are
# accepted. A model that is decoded under such a grammar can write spaces until its limit of tokens.
# What bounds them is `whitespace_flexible: false` with patterns as item_separator and key_separator.
# Seen: 1,000 spaces after a colon accepted by both patterns; by separators of at most eight, 8 are
# accepted and 9 are not.
# Exits non-zero when that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check llguidance==1.7.6
cd "$folder"
venv/bin/python - <<'PROGRAM'
import json
import sys

from llguidance import LLMatcher, LLTokenizer

tokenizer = LLTokenizer("byte")
schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def accepts(options: dict, spaces: int) -> bool:
    text = '{"a":' + " " * spaces + "1}"
    grammar = "%llguidance {}\nstart: %json " + json.dumps(schema | {"x-guidance": options})
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(grammar))
    tokens = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


eight, one = ({"whitespace_pattern": pattern} for pattern in (r"[ ]{0,8}", r" ?"))
bounded = {"whitespace_flexible": False, "item_separator": ",[ ]{0,8}", "key_separator": ":[ ]{0,8}"}
seen = {
    "pattern of eight": accepts(eight, 1000),
    "pattern of one": accepts(one, 1000),
    "separators, 8": accepts(bounded, 8),
    "separators, 9": accepts(bounded, 9),
}
print(seen)
sys.exit(list(seen.values()) != [True, True, True, False])
PROGRAM
