"""See a run while it runs, or after: `asyncrl watch` and `asyncrl samples`.

This package only reads the files of run directories, so it also works on a finished run, on a
copied directory and on the runs of a comparison in progress. It never writes into them.

    findings       one run as the pages show it: state, processes, ledger, checks, config, logs
    tinker_models  the same for a model of a Tinker server
    run_search     the search for run directories
    app            the HTTP routes (starlette); static/ holds the page
    server         address and token

Metrics, samples and advice are read by asyncrl.supervise.report.
"""
