from process_kit import Ended


def refused(done: Ended, code: int, *said: str) -> None:
    """Exit code, every fragment, on one line that starts with `error:`, and no traceback."""
    lines = [x for x in done.err.splitlines() if x.startswith("error: ")]
    assert done.code == code and len(lines) == 1, (done.code, done.err[-3000:])
    assert "Traceback" not in done.err, done.err[-3000:]
    for fragment in said:
        assert fragment in lines[0], lines[0]
