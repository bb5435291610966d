"""The mathematics: tensors and floats in, tensors out.  Torch only; `step_loss` is the one entry
that the learner uses.

    advantages   rewards to advantages
    weights      behaviour -> proximal: level, bound, reject, veto, self-normalise
    surrogates   trust regions on theta / anchor
    reshape      IS-reshape and its four repairs
    kl           estimators, with a gradient through the expectation too, off-policy
    reduce       factors with global denominators
    stopping     early stop, budgets, ESS floor
    values       value loss
    diagnostics  sums, and metrics from them
    ratios       log-ratios and sums over samples

Packed notation: N response tokens, B samples; `seq` int64 [N] is each token's sample, tokens of a
sample contiguous and in order."""
