"""See a run while it runs, or after: `asyncrl watch` and `asyncrl samples`.

This package only reads the files of run directories, so it also works on a finished run, on a
copied directory and on the runs of a comparison in progress. It never writes into them.

    run_search  the search for run directories
    app         the HTTP routes (starlette); static/ holds the page
    server      address and token

asyncrl.supervise.report reads the runs, and asyncrl.supervise.tinker_status the models of a server.
"""
