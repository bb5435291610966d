"""Reinforcement learning of language models, with generation and training at the same time.

```
 prompts --ticket--> generator --trajectories--> buffer --batch--> learner
    ^                   ^                          |                  |
    |                   +-------- weights v+1 -----|------------------+
    +------------- admission: is another ticket granted? -------------+
```

With a section `[agent]`, a gateway leases the tickets. It runs their sessions with environments,
with programs that it starts or with a harness, and generators sample the tokens of its calls.

| loop      | consumes        | waits for                              | unblocked by              |
|-----------|-----------------|----------------------------------------|---------------------------|
| generator | tickets         | a ticket; the ticket's minimum version | a commit, a publication   |
| buffer    | messages        | nothing: it never blocks               | -                         |
| learner   | batches         | the oldest group of its batch          | a generator that delivers |
| gateway   | tickets, calls  | an environment's step, a call's result | deadlines of the session  |
| weights   | a publication   | nothing: generators pull the newest    | the learner               |

Glossary: code, configs, metrics and docs use one word for each thing.

- behavior policy (mu): the policy that sampled the token. The engine records `behavior_logprobs`
  after temperature, top-p and top-k.
- start policy (pi_start): the learner's policy at the beginning of a batch. Staleness and mismatch
  are measured from it.
- proximal policy (pi_prox): the denominator of the trust region's ratio: pi_start, mu, a mixture,
  the version that sampled the token or an average of versions (`correction.proximal`).
- target policy (pi_theta): the learner's current policy. Reference policy (pi_ref): frozen.
- version, label: (epoch, number). The number counts committed batches; the epoch counts starts of
  the learner.
- term: the number of a buffer process in its run directory. Only the newest term may send.
- lag: updates between the policy that sampled a token and the policy that its batch starts from.
  Staleness: the effect of lag on training.
- group: the samples of one prompt. Ticket: the order to generate one group. Attempt: one grant of a
  ticket. Lease: the time for which an attempt is granted.
- session: a sample that takes several calls of the model. Training sequence: one forward pass of
  the learner over part of a session; a call that does not continue an earlier call begins a new
  one. Excluded: sampled but never trained (ledger line `set_aside`).
- ledger: the account of generated tokens. Every token ends in exactly one line.
- ESS: effective sample size of the importance weights, as a share of the samples.

`actors` turns a prompt into a trajectory, `buffer` trajectories into a batch, and `learner` a batch
into weights. They never import each other; they share `asyncrl.contract.messages`.  The other
packages form layers, and each imports only from the layers below it:

- `cli`: one module per command.
- `tinker`: the server of the Tinker API, with its models in separate processes.
- `viewer`: the page of runs in a browser, and samples in the terminal, only from a run's files.
- `experiments`: `serial` (the whole system in one process: read it first), `compare` (compare and
  sweep: many runs, and whether they differ significantly), `simulate` (a run in simulated time with
  the buffer's real store), `replay` (of the batches that `learner.publisher` saved), `lab`
  (estimators against exact gradients), `diagnose` (logs of other frameworks).
- `supervise`: starts, watches, stops and reports one run; `hosts`: starts processes on machines.
- `actors`, `buffer`, `learner`.
- `tasks`: prompts and rewards.
- `transport`: sockets, the transport of weights, the HTTP server.
- `models`: the policy, its packed forward, its adapters, its tokenizer.
- `records`: the files that a run writes, and their readers.
- `losses`: the losses of a run as functions, for other trainers.
- `config`: from TOML to one frozen tree.
- `algorithms`: the mathematics, which only needs torch.
- `contract`: messages, versions, admission, errors.

From Python, for example in a notebook: `asyncrl.train(model, dataset, reward)`,
`asyncrl.run(config, sets)`, `asyncrl.load_run(path)` and `asyncrl.watch(path)`.
"""

import sys as _sys
from typing import TYPE_CHECKING as _TYPE_CHECKING

__version__ = "0.1.0"

# `python -m asyncrl...` puts the working directory first on sys.path. Move it to the end before
# anything else is imported, so that a user's queue.py does not shadow the standard library.
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
    from asyncrl.supervise.notebook import LoadedRun, load_run, run, train
    from asyncrl.viewer.server import watch

__all__ = ["LoadedRun", "__version__", "load_run", "run", "train", "watch"]


def __getattr__(name: str) -> object:
    """Import the notebook API on first use, because every process of a run imports this module."""
    if name == "watch":
        from asyncrl.viewer import server

        return server.watch
    if name not in ("LoadedRun", "load_run", "run", "train"):
        raise AttributeError(f"module 'asyncrl' has no attribute {name!r}")
    from asyncrl.supervise import notebook

    return getattr(notebook, name)
