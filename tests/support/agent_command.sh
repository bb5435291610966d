# An agent as agent.command: what it does is in its task, which comes on standard input.
kind=$(sed 's/.*"kind": "\([a-z]*\)".*/\1/')
case $kind in
pays) echo thinking; echo 0.5 ;;
file) echo 0.1; echo '{"reward": 2, "neat": 1}' >"$ASYNCRL_REWARD" ;;
told)
    env >"$PIDS.env"
    echo "$OPENAI_BASE_URL $OPENAI_API_KEY $ANTHROPIC_BASE_URL $ANTHROPIC_API_KEY" >&2
    echo "$ASYNCRL_URL $ASYNCRL_MODEL" >&2
    cat "$ASYNCRL_TASK" >&2
    echo 1
    ;;
fails) echo because >&2; exit 3 ;;
asks) exec "$PYTHON" "$ASKS" ;;
family)  # a child that leaves the group, and one of its own that leaves that
    setsid sh -c 'setsid sleep 1000 & echo $! $$ >"$PIDS.new"; mv "$PIDS.new" "$PIDS"; wait' &
    while [ ! -e "$PIDS" ]; do sleep 0.02; done
    echo 1
    ;;
hides)  # a descendant that nothing but its parent links to the session, and ignores SIGTERM
    setsid env -i sh -c 'trap "" TERM; echo $$ >"$0.new"; mv "$0.new" "$0"; exec sleep 1000' "$PIDS.$kind" &
    while [ ! -e "$PIDS.$kind" ]; do sleep 0.02; done
    echo 1
    ;;
keeps)  # the same, of a program that goes on, and whose shell in between has ended
    (setsid env -i sh -c 'echo $$ >"$0.new"; mv "$0.new" "$0"; exec sleep 1000' "$PIDS.$kind" &)
    while [ ! -e "$PIDS.go" ]; do sleep 0.02; done
    kill -0 "$(cat "$PIDS.$kind")" && echo 1
    ;;
sleeps) echo begun >"$PIDS"; sleep 1000 ;;
stubborn) trap '' TERM; echo $$ >"$PIDS.new"; mv "$PIDS.new" "$PIDS"; while :; do sleep 1000; done ;;
esac
