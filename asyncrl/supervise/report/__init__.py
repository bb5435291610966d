"""A run's metrics as columns, their plots, advice, and report.html.

`asyncrl watch` shows the same while the run goes on.

    series     metrics.jsonl, read as it grows; downsampling, smoothing, the x axis
    plots      which metrics each page draws
    step_plots the plots of each optimizer step
    token_samples  samples of token_samples.jsonl, with what each token's color can show
    advice     what limited speed, whether staleness hurt, what to try next
    run_page   report.html
"""
