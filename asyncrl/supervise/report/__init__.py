"""A run's metrics as columns, their plots, advice, and report.html.

`asyncrl watch` shows the same during the run.

    plots      metrics.jsonl as columns that grow with it, and the metrics on each page
    token_samples  samples of token_samples.jsonl, with the values that a token's color can show
    advice     what limited the speed, whether staleness hurt, what to try next
    run_view   one run: state, processes, settings, logs, the blocks of every page, report.html
"""
