"""A server of the Tinker API that measures the lag of every trained token.

    client --- HTTP ---> server process (app.py, models.py, samplers.py; no model)
                             |  calls over pipes (links.py, workers/worker.py)
                             +--> training process: weights, optimizers (workers/trainer.py)
                             +--> sampling process: the embedded engine (workers/sampler.py)

The server process orders the calls of each model, writes each to disk before it promises a result
(model_records.py), and records which weights sampled every sequence (sequences.py). So it checks
the lag before a call reaches the training process, and repeats calls after a process was killed.

The package stands above actors/ and learner/, as experiments/serial.py does: it composes their
engine and their loss, and neither imports it. `wire.py` alone depends on the format of the
messages, which come from the installed package `tinker`.
"""
