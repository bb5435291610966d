"""asyncrl trains language models by reinforcement learning while generation goes on.

```
 prompts --ticket--> generator --trajectories--> buffer --batch--> learner
    ^                   ^                          |                  |
    |                   +-------- weights v+1 -----|------------------+
    +------------- admission: may another ticket go out? -------------+
```

With a section `[agent]` a gateway stands between: tickets go to it, it plays their sessions with
environments, with programs it starts or with a harness, and generators draw its calls.

| loop      | consumes        | waits for                              | unblocked by              |
|-----------|-----------------|----------------------------------------|---------------------------|
| generator | tickets         | a ticket; the ticket's minimum version | a commit, a publication   |
| buffer    | what peers send | nothing: it never blocks               | -                         |
| learner   | batches         | the oldest group of its batch          | a generator that delivers |
| gateway   | tickets, calls  | an environment's step, a call's answer | deadlines of the session  |
| weights   | a publication   | nothing: generators pull what is there | the learner               |

Glossary, one word for one thing in code, configs, metrics and docs:

- behaviour policy (mu): drew the token; `behavior_logprobs` are recorded by the engine, after
  temperature, top-p and top-k.
- start (pi_start): the learner as the batch begins, which is what staleness and mismatch are
  measured from.
- proximal policy (pi_prox), the loss's anchor: what the trust region divides by; pi_start, mu or
  between (`correction.proximal`).
- target policy (pi_theta): the learner now. Reference (pi_ref): frozen.
- version, label: (epoch, number). The number counts committed batches, the epoch the learner's
  lives.
- term: a life of the buffer, numbered in the run directory; the newest alone speaks.
- lag: versions between the policy that drew a token and the one its batch starts from. Staleness:
  the fact of lag.
- group: the samples of one prompt. Ticket: the order to write one group. Lease, attempt: one grant
  of a ticket.
- session: a sample that takes several calls of the model. Row: what the learner runs forward of it;
  a call that continues no earlier one begins a row of its own. Set aside: drawn, never trained.
- ledger: where every generated token ended, in exactly one line.
- ESS: effective sample size of the importance weights, as a share of the samples.

Where things are.  `actors` prompt to trajectory, `buffer` trajectory to batch, `learner` batch to
weights: they never import each other and meet in `asyncrl.contract.messages`.  Around them lie the
floors of this package, and imports run down only:

- `cli`: a command each.
- `experiments`: `serial` (the whole system in one process: read it first), `compare` (compare,
  sweep: many runs and what their difference is worth), `simulate` (a run in simulated time, by the
  buffer's own store), `replay` (of the stream that `learner.recorder` kept), `lab` (estimators
  against exact gradients).
- `supervise`: starts, watches, ends and reports one run; `hosts`: where its processes are made.
- `actors`, `buffer`, `learner`.
- `tasks`: prompts and rewards.
- `transport`: sockets, and the ways of the weights.
- `models`: the policy, its packed forward, its adapters, its tokenizer.
- `records`: what a run writes and what is read from it.
- `config`: from TOML to one frozen tree.
- `algorithms`: the mathematics, on torch alone.
- `contract`: messages, versions, admission, errors.

From Python, as in a notebook: `asyncrl.run(config, sets)` and `asyncrl.load_run(path)`.
"""

import sys as _sys
from typing import TYPE_CHECKING as _TYPE_CHECKING

__version__ = "0.1.0"

# `python -m asyncrl...` is looking for its module, with the working directory first on sys.path: it
# goes last before anything else is imported, so that a queue.py in it hides nothing.
_by_name = (
    _sys.argv[:1] == ["-m"]
    and "-m asyncrl" in " ".join(_sys.orig_argv)
    and not _sys.flags.safe_path
)
if _by_name:
    _sys.path.append(_sys.path.pop(0))

from asyncrl.contract import importing as _importing  # noqa: E402

_importing.install_finder()
if _by_name:
    _importing.export_checkout_path()

if _TYPE_CHECKING:
    from asyncrl.supervise.notebook import LoadedRun, load_run, run

__all__ = ["LoadedRun", "__version__", "load_run", "run"]


def __getattr__(name: str) -> object:
    """What a notebook calls, imported when it is asked for: every process of a run imports this."""
    if name not in ("LoadedRun", "load_run", "run"):
        raise AttributeError(f"module 'asyncrl' has no attribute {name!r}")
    from asyncrl.supervise import notebook

    return getattr(notebook, name)
