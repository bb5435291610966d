set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
export CODEX_HOME="$work/.codex"
mkdir "$CODEX_HOME"
cat > "$CODEX_HOME/config.toml" << TOML
model = "$OPENAI_MODEL"
model_provider = "asyncrl"
[model_providers.asyncrl]
name = "asyncrl"
base_url = "$OPENAI_BASE_URL"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
TOML
text=$(python3 -c 'import json, sys; print(json.load(sys.stdin)["text"])' < "$ASYNCRL_TASK")
codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox \
  "$text Write the result to answer.txt." < /dev/null >&2
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
