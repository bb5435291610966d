"""Parts of `surrogates`: its types, and the surrogates published for samples of an old policy.

    view                  SurrogateTokens, SurrogateTerm, StepBatch
    sequence_surrogates   on the ratio of whole samples
    token_surrogates      on the ratio of tokens and of prefixes

w = pi_theta / mu, x = log w. W is the product of w over a sample and X the sum of x. They are
listed in `surrogates.SURROGATES`. Where the ratio must be against mu, they are listed in
`surrogates.ON_BEHAVIOR` too, which turns the correction off so that nothing counts twice.
"""
