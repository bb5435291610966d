set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
export HOME="$work" XDG_CONFIG_HOME="$work/config" XDG_DATA_HOME="$work/data"
export XDG_CACHE_HOME="$work/cache" XDG_STATE_HOME="$work/state"
cat > opencode.json << JSON
{
  "model": "asyncrl/$OPENAI_MODEL",
  "small_model": "asyncrl/$OPENAI_MODEL",
  "autoupdate": false,
  "share": "disabled",
  "permission": {"*": "allow"},
  "provider": {
    "asyncrl": {
      "npm": "@ai-sdk/openai-compatible",
      "options": {"baseURL": "$OPENAI_BASE_URL", "apiKey": "$OPENAI_API_KEY"},
      "models": {"$OPENAI_MODEL": {}}
    }
  }
}
JSON
text=$(python3 -c 'import json, sys; print(json.load(sys.stdin)["text"])' < "$ASYNCRL_TASK")
opencode run "$text Write the result to answer.txt." < /dev/null >&2
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
