"""Parts of `surrogates`: what every surrogate is given and returns, and those that others published
for samples of an old policy, with the ratio w = pi_theta / mu.

    view         Tokens, Trust, Whole
    answers      on the ratio of whole answers
    tokens       on the ratio of tokens and of prefixes

W is an answer's product of w, x = log w, X its sum.  They stand in `surrogates.SURROGATES`; where
the ratio must be against mu, in `surrogates.ON_BEHAVIOR` too, so that Correct is off and nothing
counts twice."""
