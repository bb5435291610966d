set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
export HOME="$work" CLAUDE_CONFIG_DIR="$work/.claude" CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1
text=$(python3 -c 'import json, sys; print(json.load(sys.stdin)["text"])' < "$ASYNCRL_TASK")
claude --print --allowedTools Bash,Write -- "$text Write the result to answer.txt." >&2
python3 - << 'REWARD'
import json
import os

task = json.load(open(os.environ["ASYNCRL_TASK"]))
try:
    answer = open("answer.txt").read().strip()
except FileNotFoundError:
    answer = ""
print(float(answer == task["meta"]["value"]))
REWARD
